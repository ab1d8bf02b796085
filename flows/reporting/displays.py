"""What executions have shown and brought home, as parts of a report, beside the execution: pictures, HTML, files.

Code chose every byte. SVG is an image like others, which runs nothing; HTML has a frame of its own in which nothing
runs.
"""

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any

from ...sandbox.meta import Meta
from .document import Files, Heading, Image, Markup, PageSection, Part, Text, Verbatim
from .text_table import format_variables

MAX_SHOWN = 100  # executions whose displays are in a report, and
MAX_SHOWN_BYTES = 32 * 1024 * 1024  # of their displays, together: what a browser opens at once
MAX_PARTS = 50  # of each
MAX_VARIABLES = 8  # that tell an execution in a heading
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
SVG = "image/svg+xml"
HTML = "text/html"
TEXT = "text/plain"


class ShownDisplays:
    """What the first executions of a run have shown, the last values that are no fields, and files that came home."""

    def __init__(self) -> None:
        self._metas: list[Meta] = []
        self._bytes = 0
        self._left_out = 0

    def add(self, meta: Meta) -> None:
        """Takes what one execution has shown, where there is room for it."""
        has_files = meta.collected or meta.not_collected
        if not (meta.displays or has_files) and meta.value is None and meta.value_repr is None:
            return
        size = _count_bytes(meta)
        if len(self._metas) >= MAX_SHOWN or self._bytes + size > MAX_SHOWN_BYTES:
            self._left_out += 1
            return
        self._bytes += size
        self._metas.append(meta)

    def build_parts(self, noun: str) -> list[Part]:
        """The parts of the report, empty where nothing was shown; `noun` is what executions are called."""
        if not self._metas and not self._left_out:
            return []
        parts: list[Image | Markup | Heading | Verbatim | Text | Files] = []
        for meta in sorted(self._metas, key=lambda meta: meta.index or 0):
            values = format_variables(meta.variables, MAX_VARIABLES)
            parts.append(Heading(f"{noun.capitalize()} {meta.index}" + (f" with {values}" if values else ""), 3))
            parts += [build_display_part(bundle) for bundle in meta.displays[:MAX_PARTS]]
            if len(meta.displays) > MAX_PARTS:
                parts.append(Text(f"{len(meta.displays) - MAX_PARTS:,} more displays are in the ledger."))
            if meta.value is not None:
                parts.append(Verbatim(json.dumps(meta.value, ensure_ascii=False)))
            elif meta.value_repr is not None and not any(
                bundle.get(TEXT) == meta.value_repr for bundle in meta.displays
            ):
                parts.append(Verbatim(meta.value_repr))
            parts += _build_file_parts(meta)
        if self._left_out:
            parts.append(Text(f"What {self._left_out:,} more have shown is in the ledger."))
        count = len(self._metas) + self._left_out
        mention = (
            f"What {count:,} {noun}{'' if count == 1 else 's'} displayed, ended with, or brought home, is in the page "
            "that rlm-batch report writes."
        )
        return [Heading("Shown"), PageSection(parts, mention)]


def _build_file_parts(meta: Meta) -> list[Files | Text | Verbatim]:
    parts: list[Files | Text | Verbatim] = []
    if meta.collected:
        parts.append(Files(list(meta.collected[:MAX_PARTS])))
    if len(meta.collected) > MAX_PARTS:
        parts.append(Text(f"{len(meta.collected) - MAX_PARTS:,} more files are beside them."))
    if meta.not_collected:
        parts += [Text("Not collected:"), Verbatim("\n".join(meta.not_collected))]
    return parts


def build_display_part(bundle: dict[str, Any]) -> Image | Markup | Verbatim:
    """The best form of a display that a page can have: a picture, then HTML, then text."""
    for name in IMAGES:
        data = bundle.get(name)
        if isinstance(data, str) and (image := _decode_base64(data)) is not None:
            return _build_image(name, image)
    svg, html, text = bundle.get(SVG), bundle.get(HTML), bundle.get(TEXT)
    if isinstance(svg, str):
        return _build_image(SVG, svg.encode("utf-8", "replace"))
    if isinstance(html, str):
        return Markup(html, f"{HTML}, {len(html.encode('utf-8', 'replace')):,} bytes")
    return Verbatim(text if isinstance(text, str) else f"[{', '.join(bundle)}: a form that this page has no place for]")


def _build_image(name: str, data: bytes) -> Image:
    return Image(f"data:{name};base64,{base64.b64encode(data).decode('ascii')}", f"{name}, {len(data):,} bytes")


def _decode_base64(data: str) -> bytes | None:
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _count_bytes(meta: Meta) -> int:
    texts = [meta.value, meta.value_repr, *meta.displays, *meta.collected[:MAX_PARTS], *meta.not_collected]
    return sum(map(len, _list_texts(texts)))


def _list_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        items: Any = value  # type: ignore[reportUnknownVariableType]
        for item in items.values():
            yield from _list_texts(item)
    elif isinstance(value, list):
        items = value
        for item in items:
            yield from _list_texts(item)
