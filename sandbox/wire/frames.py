"""Frames: the messages between the host and a driver, and between a supervisor and its children.

A frame is one line of JSON, its header. A header with ``body: n`` is followed by a line of exactly n bytes, itself
JSON, which the supervisor hands on unread; with ``file: path`` in its place the body is what that file holds, and
whoever takes the frame removes the file. Every frame has ``op``, an ``id`` (the execution's; 0 for the sandbox) and, on
the host's wire, ``n``, a number that grows by one: a frame that comes again is dropped.

    host to driver   start (first, body: the settings), prepare (timeout, body: code), execute (timeout, context,
                     collect, body: code, variables, names), reply (call, body), cancel, forget (context), beat, stop
    driver to host   ready, output (stream, text, dropped), call (call, name, body), display (body: a MIME bundle),
                     files (body: what was written on the volume), value (body: of the last expression), end (status,
                     body, and `collects` where files come home besides), collect (body: a piece of a file, or why
                     another is none), collected (body: why there is no more, empty where that was all), beat
"""

from __future__ import annotations

import os

from .strict_json import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_HEADER_BYTES = 64 * 1024  # headers hold ids and short names only
MAX_CALL_BYTES = 4 * 1024 * 1024  # of the body with which code calls a function of the host, and of any other to it


class BadFrameError(Exception):
    """Bytes on a channel that are no frame."""


def encode_frame(header: dict[str, Any], body: bytes | None = None) -> bytes:
    """A frame's bytes."""
    return b"".join(encode_frame_parts(header, body))


def encode_frame_parts(header: dict[str, Any], body: bytes | list[bytes] | None = None) -> list[bytes]:
    """A frame's bytes, one part after the other, with the body, or its parts, as they are: they may be large."""
    parts = [] if body is None else body if isinstance(body, list) else [body]
    if body is not None:
        header["body"] = sum(map(len, parts))
    line = dumps(header).encode("utf-8", "replace") + b"\n"
    return [line] if body is None else [line, *parts, b"\n"]


def take_file(path: str) -> bytes:
    """What a file holds that stands for a body or a value; the file goes."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        os.unlink(path)
    except OSError:
        pass  # it is another's, or has gone
    return data


class FrameReader:
    """Cuts a stream of bytes into frames: pairs of a header and a body, which is None where there is none."""

    def __init__(self, body_limit: int | None = None) -> None:
        self._body_limit = body_limit
        self._line = b""  # of a header that is not complete yet
        self._header: dict[str, Any] | None = None  # of a body that is not complete yet
        self._parts: list[bytes] = []  # of that body and the newline after it, copied once, for it may be large
        self._missing = 0  # bytes of them

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes | None]]:
        """The frames that these bytes complete. Raises BadFrameError; the stream is lost after that."""
        frames: list[tuple[dict[str, Any], bytes | None]] = []
        begin = 0
        if self._line:
            data, self._line = self._line + data, b""
        size = len(data)
        while begin < size:
            if self._header is not None:
                taken = data[begin : begin + self._missing]
                self._parts.append(taken)
                self._missing -= len(taken)
                begin += len(taken)
                if not self._missing:
                    frames.append((self._header, self._finish_body()))
                    self._header = None
                continue
            end = data.find(b"\n", begin)
            if end < 0:
                if size - begin > MAX_HEADER_BYTES:
                    raise BadFrameError("a header longer than any of ours")
                self._line = data[begin:]
                break
            header = self._parse_header(data[begin:end])
            begin = end + 1
            if "body" not in header:
                frames.append((header, None))
                continue
            stop = begin + header["body"]
            if stop < size:  # most of them
                if data[stop] != 10:
                    raise BadFrameError("a body that is longer than its header says")
                frames.append((header, data[begin:stop]))
                begin = stop + 1
            else:
                self._header, self._missing = header, header["body"] + 1
        return frames

    def _finish_body(self) -> bytes:
        parts, self._parts = self._parts, []
        if parts[-1][-1] != 10:
            raise BadFrameError("a body that is longer than its header says")
        parts[-1] = parts[-1][:-1]
        return b"".join(parts)

    def _parse_header(self, line: bytes) -> dict[str, Any]:
        try:
            header: Any = loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise BadFrameError(f"a line that is no frame: {line[:80]!r}")
        frame: dict[str, Any] = header  # type: ignore[reportUnknownVariableType]
        size = frame.get("body", 0)
        if type(size) is not int or size < 0 or (self._body_limit is not None and size > self._body_limit):
            raise BadFrameError(f"a body of {size!r} bytes")
        return frame
