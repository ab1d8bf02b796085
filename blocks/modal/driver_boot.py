"""The driver as a program that Modal's `python -c` takes from its standard input."""

from __future__ import annotations

import zlib
from functools import cache
from importlib.util import MAGIC_NUMBER

from ...sandbox.driver_bundle import build_driver_code, build_driver_text

# Takes the driver from standard input, ahead of the first frame, and becomes it: compiled, where this Python is one
# like the host's (which saves some 25 ms), and else as text. What waited for a driver that never comes would keep
# its sandbox from being idle, so it ends itself.
BOOT = """
import marshal, os, signal, sys, zlib
from _frozen_importlib_external import MAGIC_NUMBER

signal.alarm(120)

def take(rest):
    data = []
    while rest:
        data.append(os.read(0, rest))
        rest -= len(data[-1]) or os._exit(0)
    return zlib.decompress(b"".join(data))

code, text = take({code}), take({text})
signal.alarm(0)
os.makedirs({workdir!r}, exist_ok=True)
sys.path[:] = [path for path in sys.path if path]
found = {{"__name__": "driver"}}
exec(marshal.loads(code) if MAGIC_NUMBER == {magic!r} else compile(text, "driver", "exec"), found)
found["main"]()
"""


def make_boot_program(workdir: str) -> tuple[str, bytes]:
    """A program that starts the driver, and what is to be written to it ahead of the first frame."""
    code, text = _compress_driver()
    return BOOT.format(code=len(code), text=len(text), magic=MAGIC_NUMBER, workdir=workdir), code + text


@cache
def _compress_driver() -> tuple[bytes, bytes]:
    """The driver, compiled for this Python and as text, each compressed."""
    return zlib.compress(build_driver_code()), zlib.compress(build_driver_text())
