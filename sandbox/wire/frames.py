"""Frames: the messages between the host and a driver, and between a supervisor and its children.

A frame is one line of JSON, its header. After a header with ``body: n`` follows a line of exactly n bytes, also JSON,
which the supervisor forwards without parsing it. A header with ``file: path`` means that the body is in that file. The
receiver deletes the file.

Every frame has ``op`` and ``id`` (the execution's id, or 0 for the sandbox). Between host and driver a frame also has
``n``, which grows by one. The receiver drops a frame whose number it has already seen.

    host to driver   start (first, body: the settings), prepare (timeout, body: code), execute (timeout, context,
                     collect, body: code, variables, names), reply (call, body), cancel, forget (context), beat, stop
    driver to host   ready, output (stream, text, dropped), call (call, name, body), display (body: a MIME bundle),
                     files (body: files written on the volume), value (body: the last expression's value), end (status,
                     body, and `collects` if collected files follow), collect (body: a piece of a file, or the reason
                     why one is missing), collected (body: why the rest is missing, empty if complete), beat
"""

from __future__ import annotations

import os

from .strict_json import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXITED = b'"exited"'  # body of the end of code that called sys.exit with the status of success
MAX_HEADER_BYTES = 64 * 1024  # headers hold ids and short names only
MAX_CALL_BYTES = 4 * 1024 * 1024  # body of a call of a host function, and of any other frame to the host
NEWLINE = ord("\n")
LONG_BODY = "a body that is longer than its header says"


class BadFrameError(Exception):
    """Invalid data on a channel that carries frames."""


def encode_frame(header: dict[str, Any], body: bytes | None = None) -> bytes:
    """Return a frame as bytes."""
    return b"".join(encode_frame_parts(header, body))


def encode_frame_parts(header: dict[str, Any], body: bytes | list[bytes] | None = None) -> list[bytes]:
    """Return a frame as parts, without copying the body or its parts, which may be large."""
    if body is None:
        return [dumps(header).encode("utf-8", "replace"), b"\n"]
    parts = body if isinstance(body, list) else [body]
    header["body"] = sum(map(len, parts))
    return [dumps(header).encode("utf-8", "replace"), b"\n", *parts, b"\n"]


def take_file(path: str) -> bytes:
    """Read a file that carries a body or a value, delete it, and return its content."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        os.unlink(path)
    except OSError:
        pass  # the file belongs to another user or no longer exists
    return data


class FrameReader:
    """A parser that splits a byte stream into frames: pairs of a header and a body, or None without a body."""

    def __init__(self, body_limit: int | None = None) -> None:
        self._body_limit = body_limit
        self._line = b""  # beginning of an incomplete header
        self._header: dict[str, Any] | None = None  # header of an incomplete body
        self._parts: list[bytes] = []  # parts of that body and its newline, joined once because a body may be large
        self._missing = 0  # missing bytes of that body and its newline

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes | None]]:
        """Return the frames that these bytes complete. After BadFrameError the stream is unusable."""
        frames: list[tuple[dict[str, Any], bytes | None]] = []
        begin = 0
        if self._line:
            data = self._line + data
            self._line = b""
        size = len(data)
        while begin < size:
            if self._header is not None:
                part = data[begin : begin + self._missing]
                begin += len(part)
                body = self._add_part(part)
                if body is not None:
                    frames.append((self._header, body))
                    self._header = None
                continue
            header_end = data.find(b"\n", begin)
            if header_end < 0:
                if size - begin > MAX_HEADER_BYTES:
                    raise BadFrameError("a header longer than any of ours")
                self._line = data[begin:]
                break
            header = self._parse_header(data[begin:header_end])
            begin = header_end + 1
            if "body" not in header:
                frames.append((header, None))
                continue
            body_end = begin + header["body"]
            if body_end < size:  # the common case: the whole body is here
                if data[body_end] != NEWLINE:
                    raise BadFrameError(LONG_BODY)
                frames.append((header, data[begin:body_end]))
                begin = body_end + 1
            else:
                self._header = header
                self._missing = header["body"] + 1
        return frames

    def _add_part(self, part: bytes) -> bytes | None:
        """Add a part to the incomplete body, and return the body if it is complete."""
        self._missing -= len(part)
        if self._missing:
            self._parts.append(part)
            return None
        if part[-1] != NEWLINE:
            raise BadFrameError(LONG_BODY)
        body = b"".join([*self._parts, part[:-1]])
        self._parts = []
        return body

    def _parse_header(self, line: bytes) -> dict[str, Any]:
        try:
            header: Any = loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise BadFrameError(f"a line that is no frame: {line[:80]!r}")
        frame: dict[str, Any] = header  # type: ignore[reportUnknownVariableType]
        size = frame.get("body", 0)
        is_size = type(size) is int and size >= 0
        if not is_size or (self._body_limit is not None and size > self._body_limit):
            raise BadFrameError(f"a body of {size!r} bytes")
        return frame
