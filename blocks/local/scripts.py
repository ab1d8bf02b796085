"""Programs of packages (`pytest`, `black`) as a sandbox has them: they start its own Python, not that of the host."""

import os
import re
import shutil
from pathlib import Path

from ...sandbox.wire.python_directory import link_python
from .launch.driver_process import find_python

# The sandbox's Python is beside the script, in a `bin` that may be a link. To Python these lines are a text.
HEAD = b"""#!/bin/sh
'''exec' "${0%/*}/python" "$0" "$@"
' '''
"""
# What installers begin a script with: the path of a Python, or a shell's way to one whose path is long or has blanks.
PYTHON_HEADS = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec'[^\n]*\n' '''\n")
# An environment's own programs: a sandbox has its own Python.
OWN_NAMES = re.compile(r"python[0-9.]*t?|[Aa]ctivate.*")
SYSTEM = "/usr/"  # A sandbox has the compiled programs below it anyway.
MAX_HEAD_BYTES = 4096


def write_scripts(source: Path, folder: Path) -> None:
    """Write Python and the programs of `source` to `folder`, open to every user; make `folder` where it is missing.

    Other programs than Python scripts are linked, or copied where they cannot be linked. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    link_python(str(folder), find_python())
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if not path.is_file() or path.is_symlink() or not os.access(path, os.X_OK) or OWN_NAMES.fullmatch(path.name):
            continue
        target = folder / path.name
        with path.open("rb") as file:
            start = file.read(MAX_HEAD_BYTES)
            head = PYTHON_HEADS.match(start)
            if head is not None:
                target.write_bytes(HEAD + start[head.end() :] + file.read())
                target.chmod(0o755)
                continue
        if str(source).startswith(SYSTEM):
            continue
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)
            target.chmod(0o755)
