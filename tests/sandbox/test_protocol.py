"""Tests that a stream of frames is decoded correctly, however the stream is split."""

import random

import pytest

from rlm_batch.sandbox.wire.frames import BadFrameError, FrameReader, encode_frame
from rlm_batch.sandbox.wire.strict_json import dumps, loads

FRAMES = [
    ({"op": "beat", "id": 0}, None), ({"op": "end", "id": 1}, b""), ({"op": "end", "id": 2}, b"{}"),
    ({"op": "call", "id": 3, "name": "é"}, "\"é\"".encode()), ({"op": "end"}, b"\n\n\n"),
    ({"op": "end", "id": 5}, b"x" * 300_000), ({"op": "output", "text": "\n\"\\" * 99}, None),
]  # fmt: skip
RUBBISH = [
    b"rubbish\n", b"\n", b"[]\n", b"1\n", b'"x"\n', b"null\n", b"{\n", b"\xff\n", b"NaN\n", b"[" * 9999 + b"\n",
    b'{"body":-1}\n', b'{"body":"5"}\n', b'{"body":null}\n', b'{"body":true}\n', b'{"body":1.5}\n',
    b'{"body":2}\nabcd\n', b"\0" * 10_000_000,
]  # fmt: skip


def test_frames_are_decoded_from_any_stream_pieces() -> None:
    stream = b"".join(encode_frame(dict(header), body) for header, body in FRAMES)
    for seed in range(100):
        chance, frames, decoded, begin = random.Random(seed), FrameReader(), [], 0
        while begin < len(stream):
            end = begin + chance.choice([1, 2, 7, 50, 1000, 70_000, 400_000])
            decoded += frames.feed(stream[begin:end])
            begin = end
        for (header, body), (expected, expected_body) in zip(decoded, FRAMES, strict=True):
            header.pop("body", None)
            assert (header, body) == (expected, expected_body)


def test_the_longest_output_is_decoded_in_pieces() -> None:
    text = "\x01" * 50_000  # six bytes of JSON for each character
    data = encode_frame({"op": "output", "id": 1, "stream": "stdout"}, dumps(text).encode())
    for size in (len(data), 4096):
        frames, decoded = FrameReader(), []
        for begin in range(0, len(data), size):
            decoded += frames.feed(data[begin : begin + size])
        assert loads((decoded[0][1] or b"").decode()) == text


@pytest.mark.parametrize("data", RUBBISH, ids=lambda data: repr(data[:15]))
def test_bytes_that_are_not_a_frame_are_refused(data: bytes) -> None:
    with pytest.raises(BadFrameError):
        FrameReader().feed(data)


def test_a_too_long_frame_is_refused_before_it_fills_memory() -> None:
    assert len(FrameReader(10).feed(b'{"body":10}\n0123456789\n')) == 1
    with pytest.raises(BadFrameError, match="11 bytes"):
        FrameReader(10).feed(b'{"body":11}\n')
    frames, endless = FrameReader(), (b"x" * 100_000 for _ in range(1000))
    with pytest.raises(BadFrameError, match="header"):
        [frames.feed(data) for data in endless]
    assert next(endless), "it took everything first"
