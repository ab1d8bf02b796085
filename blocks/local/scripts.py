"""Programs of packages (`pytest`, `black`) for a sandbox: they start the sandbox's Python, not the host's."""

import os
import re
import shutil
from pathlib import Path

from ...sandbox.wire.python_directory import link_python
from .launch.driver_process import find_python

# It starts the Python beside the script, in a `bin` that may be a link. Python reads these lines as a string.
HEAD = b"""#!/bin/sh
'''exec' "${0%/*}/python" "$0" "$@"
' '''
"""
# An installer starts a script with a Python's path, or with shell lines if the path is long or has blanks.
PYTHON_HEADS = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec'[^\n]*\n' '''\n")
# Programs of the environment itself. A sandbox has its own Python.
OWN_NAMES = re.compile(r"python[0-9.]*t?|[Aa]ctivate.*")
SYSTEM = "/usr/"  # Every sandbox has the compiled programs below it.
MAX_HEAD_BYTES = 4096


def write_scripts(source: Path, folder: Path) -> None:
    """Write Python and the programs of `source` to `folder`, open to every user; create `folder` if it is missing.

    Programs that are not Python scripts are hard-linked, or copied if that fails. Raises OSError.
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
