"""Smaller PNGs: the same picture with its 256 most frequent colours."""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLORS = 256


def shrink_png(data: bytes) -> bytes:
    """Reduce a picture of 8-bit red, green and blue to a palette; other colours become the nearest one in it."""
    chunks = list(_read_chunks(data))
    width, height, depth, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    if (depth, kind) != (8, 2):
        raise ValueError("the picture is not one of 8 bits of red, green and blue")
    raw = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    rows = _unfilter(raw, width * 3)
    pixels = [[row[at : at + 3] for at in range(0, len(row), 3)] for row in rows]
    counts = Counter(pixel for row in pixels for pixel in row)
    palette = [color for color, _ in counts.most_common(COLORS)]
    numbers = {color: number for number, color in enumerate(palette)}
    for color in counts.keys() - numbers.keys():
        numbers[color] = min(range(len(palette)), key=lambda number: _compare_colors(color, palette[number]))
    packed = zlib.compress(b"".join(b"\0" + bytes(numbers[pixel] for pixel in row) for row in pixels), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", packed), (b"IEND", b"")]
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def _read_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        yield name, data[at + 8 : at + 8 + length]
        at += length + 12


def _unfilter(raw: bytes, size: int) -> Iterator[bytes]:
    """Yield the rows of pixels. A row's first byte says how its bytes differ from those to the left and above."""
    above = bytes(size)
    for start in range(0, len(raw), size + 1):
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + size])
        for at in range(size if kind else 0):
            left, up = row[at - 3] if at >= 3 else 0, above[at]
            corner = above[at - 3] if at >= 3 else 0
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda value: abs(guess - value))
            row[at] = row[at] + (0, left, up, (left + up) // 2, nearest)[kind] & 255
        above = bytes(row)
        yield above


def _compare_colors(one: bytes, other: bytes) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
