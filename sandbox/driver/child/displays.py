"""Values that code shows without submitting them: the value of its last expression, and its displays.

`repr` and methods like `_repr_html_` are the code's own. If such a method raises an Exception, the exception is shown
instead of its result. Any other exception, such as a SystemExit, ends the code.
"""

from __future__ import annotations

import sys

from ...wire.strict_json import NotJsonError, dumps, encode_fields, loads
from ...wire.submission import (
    MAX_DISPLAYS,
    MAX_DISPLAYS_BYTES,
    MAX_NOTE_BYTES,
    MAX_REPR_CHARACTERS,
    MAX_SUBMIT_BYTES,
    MAX_TYPE_CHARACTERS,
    MAX_TYPES,
    check_bundle,
)
from .environment import MODULES
from .submit import encode_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PYPLOT = "matplotlib.pyplot"
TEXT = "text/plain"
FORMS = {"_repr_html_": "text/html", "_repr_svg_": "image/svg+xml", "_repr_png_": "image/png"}
PLAIN_TYPES = frozenset((int, float, bool, str, list, dict, tuple, bytes))  # types without a form besides `repr`
SIZED_TYPES = (str, bytes, list, tuple, dict)
MAX_NOTE_CHARACTERS = MAX_NOTE_BYTES // 6 - len(TEXT)  # a character takes at most 6 bytes of JSON
LIMITS = f"an execution may display {MAX_DISPLAYS_BYTES // 1024 // 1024} MiB and {MAX_DISPLAYS:,} displays"


class Displays:
    """A sender of an execution's value and displays, within limits. `send` takes the kind of a frame and its body."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._count = self._bytes = 0

    def display(self, *values: Any) -> None:
        """Show each value in its forms: HTML, SVG, PNG, text."""
        for value in values:
            bundle = _build_bundle(value)
            bundle.setdefault(TEXT, describe(value))
            self._send_bundle(bundle)

    def send_value(self, value: Any) -> None:
        """Send the value of the last expression, and display it if it has other forms than its `repr`."""
        if value is None:
            return
        text, body = "", _encode_value(value)
        if body is None:
            text = describe(value)
            body = _encode({"repr": text})
        self._send("value", body)
        if type(value) in PLAIN_TYPES or _is_open_figure(value):
            return  # open figures are shown at the end
        bundle = _build_bundle(value)
        if bundle:
            bundle.setdefault(TEXT, text or describe(value))
            self._send_bundle(bundle)

    def show_figures(self) -> None:
        pyplot: Any = MODULES.get(PYPLOT)
        if pyplot is None:
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                self.display(figure)
                pyplot.close(figure)
        except Exception as error:
            _complain(f"the open figures could not be displayed: {_describe_error(error)}")

    def _send_bundle(self, bundle: dict[str, Any]) -> None:
        """Send the forms that fit, with a note in the text on those left out."""
        self._count += 1
        if self._count > MAX_DISPLAYS:
            return
        left_out: list[str] = []
        if self._count == MAX_DISPLAYS:
            bundle, left_out = {}, ["this display and the following ones"]
        # A display and its note go in one frame.
        max_bytes = min(MAX_DISPLAYS_BYTES - self._bytes, MAX_DISPLAYS_BYTES - MAX_NOTE_BYTES)
        body = b""
        while bundle:
            sizes = {name: _count_bytes(data) for name, data in bundle.items()}
            if sum(sizes.values()) <= max_bytes:
                body = _encode(bundle)
                if len(body) <= max_bytes:
                    self._bytes += len(body)
                    break
            largest = max(sizes, key=sizes.__getitem__)
            left_out.append(f"{largest} of {sizes[largest]:,} bytes")
            del bundle[largest]
        if left_out:
            note = f"[left out: {', '.join(left_out)}; {LIMITS}]"[:MAX_NOTE_CHARACTERS]
            bundle[TEXT] = f"{bundle[TEXT]}\n{note}" if TEXT in bundle else note
            body = _encode(bundle)
        self._send("display", body)


def _encode_value(value: Any) -> bytes | None:
    """Encode the value as SUBMIT would; return None if SUBMIT would refuse it."""
    if type(value) in SIZED_TYPES and len(value) > MAX_SUBMIT_BYTES:
        return None
    try:
        return encode_output({"value": value})
    except Exception:  # not only NotJsonError: a subclass of list may raise anything
        return None


def describe(value: Any) -> str:
    """Return the value's `repr`, cut to the limit."""
    if type(value) in (str, bytes):
        excess = len(value) - MAX_REPR_CHARACTERS
        text = repr(value[:MAX_REPR_CHARACTERS])  # The value may be much larger.
    else:
        try:
            text = str.__str__(repr(value))  # a class of the code may return a subclass of str
        except Exception as error:
            text = f"<{type(value).__qualname__}, whose repr raised {_describe_error(error)}>"
        excess = len(text) - MAX_REPR_CHARACTERS
        text = text[:MAX_REPR_CHARACTERS]
    return f"{text}\n[... {excess:,} characters left out ...]" if excess > 0 else text


def _build_bundle(value: Any) -> dict[str, Any]:
    """Return the value's forms besides its `repr`, by MIME type."""
    if _is_figure(value):
        import io

        file = io.BytesIO()
        value.savefig(file, format="png", bbox_inches="tight")
        return {"image/png": file.getvalue()}
    result: Any = _call_form(value, "_repr_mimebundle_", include=None, exclude=None)
    if type(result) is tuple and result:  # type: ignore[reportUnknownArgumentType]
        result = result[0]  # type: ignore[reportUnknownVariableType] - data, followed by metadata
    forms: dict[Any, Any] = result if type(result) is dict else {}  # type: ignore[reportUnknownArgumentType]
    items = list(forms.items())[:MAX_TYPES]
    for method, name in FORMS.items():
        if name not in forms and len(items) < MAX_TYPES:
            items.append((name, _call_form(value, method)))
    bundle: dict[str, Any] = {}
    for name, form in items:
        data = _convert(name, form)
        if data:
            bundle[name] = data
    return bundle


def _call_form(value: Any, method: str, **options: Any) -> Any:
    """Return the result of a method like `_repr_html_`, or None if it is missing or fails."""
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
    """Return a form's data as text, bytes or other JSON; None for other types."""
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
    pyplot: Any = MODULES.get(PYPLOT)
    if pyplot is None or not _is_figure(value):
        return False
    return pyplot.fignum_exists(getattr(value, "number", -1))


def _count_bytes(data: Any) -> int:
    """Return a lower limit of the data's size as JSON, without encoding it."""
    if isinstance(data, bytes):
        return -(-len(data) // 3) * 4  # the length of its base64
    return len(data) if isinstance(data, str) else 0


def _encode(fields: dict[str, Any]) -> bytes:
    """Encode the fields as JSON, with bytes as base64 like Jupyter."""
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
    try:
        stream: Any = sys.stderr
        stream.write(f"rlm-batch: {text}\n")
    except Exception:  # the code may have put anything there
        pass
