"""The driver as files for a sandbox of Daytona, and the command that starts it there."""

from __future__ import annotations

import functools
import importlib.util
import shlex
import sys

from ...sandbox.driver_bundle import build_driver_code, build_driver_text

FILES = "/tmp/rlm-batch"  # the driver's own directory in a sandbox
MODULE = "_rlm_batch_driver"  # a name that no code has for a module of its own
BOOT = f"import sys; sys.path[0] = {FILES!r}; import {MODULE} as d; del sys.path[0]; d.main(first=sys.argv[1])"


@functools.cache
def make_driver_files() -> dict[str, bytes]:
    """The driver's text, and compiled for a Python such as ours: in a sandbox that has another the text is compiled."""
    text = build_driver_text()
    # A pyc that is taken without a look at its source (PEP 552): the two come from here together.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(text)
    return {
        f"{MODULE}.py": text,
        f"__pycache__/{MODULE}.{sys.implementation.cache_tag}.pyc": head + build_driver_code(),
    }


def make_start_command(python: str, first_frame: str, directory: str) -> str:
    """The shell command that starts the driver with its first frame, in a directory or, if empty, where it is run."""
    command = f"{python} -u -c {shlex.quote(BOOT)} {shlex.quote(first_frame)}"
    return f"cd {shlex.quote(directory)} && {command}" if directory else command
