"""Standard output and standard error for commands: an error of a stream does not fail a run."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StandardStream(io.TextIOWrapper):
    """Standard output or standard error in a command.

    A character that the encoding lacks is written as an escape. After the first error, such as a full disk, the stream
    discards all further text, and keeps the error in `error`. If the reader of standard output has closed the pipe, the
    stream raises BrokenPipeError.
    """

    error: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write the text, or discard it after an error."""
        try:
            return super().write(text)
        except OSError as error:
            self._discard_after(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it after an error."""
        try:
            super().flush()
        except OSError as error:
            self._discard_after(error)

    def _discard_after(self, error: OSError) -> None:
        self.error = error
        if isinstance(error, BrokenPipeError) and self is sys.stdout:
            raise error
        # Otherwise the end of the process would write the buffer again, and fail again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


@contextmanager
def open_standard_streams() -> Iterator[None]:
    """Use `StandardStream` for standard output and error in the context. A closed stream is opened on /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the whole process
    originals = sys.stdout, sys.stderr
    for stream in originals:
        stream.flush()
    sys.stdout, sys.stderr = _wrap(sys.stdout), _wrap(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, StandardStream):
                stream.flush()
                stream.detach()
        sys.stdout, sys.stderr = originals


def _wrap(stream: Any) -> Any:
    """Return a `StandardStream` over the stream's file. A stream that a program has replaced is returned unchanged."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return StandardStream(
        stream.buffer, stream.encoding, "backslashreplace",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip
