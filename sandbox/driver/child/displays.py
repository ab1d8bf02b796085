"""What code in a sandbox shows, beside what it submits: the value of its last expression, and its displays.

Whatever runs here is the code's own: an object's `repr`, its `_repr_html_`. An Exception of theirs is said in the place
of what they should have returned; anything else that they raise ends the code, as it would anywhere in it.
"""

from __future__ import annotations

import sys

from ...wire.displays import (
    MAX_DISPLAYS,
    MAX_DISPLAYS_BYTES,
    MAX_NOTE_BYTES,
    MAX_REPR_CHARACTERS,
    MAX_TYPE_CHARACTERS,
    MAX_TYPES,
    check_bundle,
)
from ...wire.strict_json import NotJsonError, dumps, encode_fields, loads
from ...wire.submission import MAX_SUBMIT_BYTES
from .imports import MODULES
from .submit import encode_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PYPLOT = "matplotlib.pyplot"
TEXT = "text/plain"
FORMS = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml", "_repr_png_": "image/png"}
PLAIN_TYPES = frozenset((int, float, bool, str, list, dict, tuple, bytes))  # that have no form but their `repr`
SIZED_TYPES = (str, bytes, list, tuple, dict)
MAX_NOTE_CHARACTERS = MAX_NOTE_BYTES // 6 - len(TEXT)  # as JSON has the longest
MORE = f"an execution shows {MAX_DISPLAYS_BYTES // 1024 // 1024} MiB and {MAX_DISPLAYS:,} displays at most"


class Displays:
    """Sends what one execution shows, as long as there is room; `send` sends a kind of frame with its body."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._count = self._bytes = 0

    def display(self, *values: Any) -> None:
        """Shows each value, in the forms that it has: HTML, SVG, PNG, text."""
        for value in values:
            bundle = _build_bundle(value)
            bundle.setdefault(TEXT, describe(value))
            self._send_bundle(bundle)

    def send_value(self, value: Any) -> None:
        """Sends the value of the last expression, and displays it where it has other forms than its `repr`."""
        if value is None:
            return
        text, body = "", _encode_value(value)
        if body is None:
            text = describe(value)
            body = _encode({"repr": text})
        self._send("value", body)
        if type(value) not in PLAIN_TYPES and not _is_open_figure(value):
            bundle = _build_bundle(value)
            if bundle:
                bundle.setdefault(TEXT, text or describe(value))
                self._send_bundle(bundle)

    def show_figures(self) -> None:
        """Displays the figures of pyplot that are open, and closes them."""
        pyplot: Any = MODULES.get(PYPLOT)
        if pyplot is None:
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                self.display(figure)
                pyplot.close(figure)
        except Exception as error:
            _complain(f"the figures that are open could not be shown: {_describe_error(error)}")

    def _send_bundle(self, bundle: dict[str, Any]) -> None:
        """Sends what there is room for, with a note in its text on what is left out."""
        self._count += 1
        if self._count > MAX_DISPLAYS:
            return
        left_out: list[str] = []
        if self._count == MAX_DISPLAYS:
            bundle, left_out = {}, ["this display and those that follow"]
        room = min(MAX_DISPLAYS_BYTES - self._bytes, MAX_DISPLAYS_BYTES - MAX_NOTE_BYTES)  # in one frame, with a note
        body = b""
        while bundle:
            sizes = {name: _count_bytes(data) for name, data in bundle.items()}
            if sum(sizes.values()) <= room:
                body = _encode(bundle)
                if len(body) <= room:
                    self._bytes += len(body)
                    break
            name = max(sizes, key=sizes.__getitem__)
            left_out.append(f"{name} of {sizes[name]:,} bytes")
            del bundle[name]
        if left_out:
            note = f"[left out: {', '.join(left_out)}; {MORE}]"[:MAX_NOTE_CHARACTERS]
            body = _encode({**bundle, TEXT: f"{bundle[TEXT]}\n{note}" if TEXT in bundle else note})
        self._send("display", body)


def replace_show(pyplot: Any, show: Callable[[], None]) -> None:
    """Gives pyplot a `show` that shows: where no screen is, its own only warns."""

    def show_figures(*_arguments: Any, **_options: Any) -> None:
        """Displays all open figures, and closes them."""
        show()

    show_figures.__name__ = show_figures.__qualname__ = "show"
    pyplot.show = show_figures


def _encode_value(value: Any) -> bytes | None:
    """The value as SUBMIT would hand it back, None where it would not."""
    if type(value) in SIZED_TYPES and len(value) > MAX_SUBMIT_BYTES:
        return None
    try:
        return encode_output({"value": value})
    except Exception:  # not only NotJsonError: a list's own class may do anything when it is asked for its items
        return None


def describe(value: Any) -> str:
    """The value's `repr`, as much of it as is shown. Of a text or bytes no more than that is looked at."""
    if type(value) in (str, bytes):
        rest = len(value) - MAX_REPR_CHARACTERS
        text = repr(value[:MAX_REPR_CHARACTERS])
    else:
        try:
            text = str.__str__(repr(value))  # of a class of the code's own it could be anything
        except Exception as error:
            text = f"<{type(value).__qualname__}, whose repr raised {_describe_error(error)}>"
        rest = len(text) - MAX_REPR_CHARACTERS
        text = text[:MAX_REPR_CHARACTERS]
    return f"{text}\n[... {rest:,} characters left out ...]" if rest > 0 else text


def _build_bundle(value: Any) -> dict[str, Any]:
    """The forms that the value has beside its `repr`, by their MIME types."""
    if _is_figure(value):
        return {"image/png": _draw(value)}
    bundle: dict[str, Any] = {}
    forms = _call_form(value, "_repr_mimebundle_", include=None, exclude=None)
    if type(forms) is tuple and forms:  # with metadata
        bundle.update(forms[0] if type(forms[0]) is dict else {})  # type: ignore[reportUnknownArgumentType]
    elif type(forms) is dict:  # type: ignore[reportUnknownArgumentType]
        bundle.update(forms)  # type: ignore[reportUnknownArgumentType]
    bundle = dict(list(bundle.items())[:MAX_TYPES])
    for method, name in FORMS.items():
        if name not in bundle and len(bundle) < MAX_TYPES:
            bundle[name] = _call_form(value, method)
    return {name: data for name, data in ((name, _convert(name, data)) for name, data in bundle.items()) if data}


def _call_form(value: Any, method: str, **options: Any) -> Any:
    """What that method of the value's class returns, None where it has none or that fails."""
    kind: Any = type(value)  # type: ignore[reportUnknownVariableType]
    function: Any = getattr(kind, method, None)
    if function is None:
        return None
    try:
        return function(value, **options)
    except Exception as error:
        _complain(f"{kind.__qualname__}.{method} raised {_describe_error(error)}")
        return None


def _convert(name: Any, data: Any) -> Any:
    """A form's data as text, bytes or other JSON, None where it is none of these."""
    if type(name) is not str or len(name) > MAX_TYPE_CHARACTERS or data is None:
        return None
    if isinstance(data, str):
        return str.__str__(data)
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    try:
        body = encode_fields({name: data})
        return check_bundle(loads(body.decode("utf-8")), body)[name]
    except (NotJsonError, ValueError) as error:
        _complain(f"a display's {name[:MAX_TYPE_CHARACTERS]} was left out: {error}")
        return None


def _is_figure(value: Any) -> bool:
    module: Any = MODULES.get("matplotlib.figure")
    kind: Any = getattr(module, "Figure", None)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_open_figure(value: Any) -> bool:
    """Whether it is a figure that is displayed at the end anyway."""
    pyplot: Any = MODULES.get(PYPLOT)
    return pyplot is not None and _is_figure(value) and pyplot.fignum_exists(getattr(value, "number", -1))


def _draw(figure: Any) -> bytes:
    import io

    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _count_bytes(data: Any) -> int:
    """Those that the data certainly takes as JSON, without making that."""
    if isinstance(data, bytes):
        return -(-len(data) // 3) * 4
    return len(data) if isinstance(data, str) else 0


def _encode(fields: dict[str, Any]) -> bytes:
    """The fields as JSON, bytes as base64, which is how Jupyter has them."""
    import binascii

    for name, data in fields.items():
        if isinstance(data, bytes):
            fields[name] = binascii.b2a_base64(data, newline=False).decode("ascii")
    return dumps(fields).encode("utf-8", "replace")


def _describe_error(error: Exception) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"[:MAX_NOTE_BYTES]
    except Exception:
        return type(error).__qualname__


def _complain(text: str) -> None:
    """Says it where the code's own warnings are."""
    try:
        stream: Any = sys.stderr
        stream.write(f"rlm-batch: {text}\n")
    except Exception:  # the code may have put anything there
        pass
