"""Programs of packages (`pytest`, `black`) as a sandbox has them: they start its own Python, not that of the host."""

import os
import re
import shutil
from pathlib import Path

# The script is `scripts/NAME` beside the Python's `bin`, which the text alone says: `scripts` may be a link. To Python
# these lines are a text.
HEAD = b"""#!/bin/sh
'''exec' "${0%/*/*}/bin/python" "$0" "$@"
' '''
"""
# What installers begin a script with: the path of a Python, or a shell's way to one whose path is long or has blanks.
PYTHON_HEADS = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec'[^\n]*\n' '''\n")
OWN_NAMES = re.compile(r"python[0-9.]*t?|[Aa]ctivate.*")  # of an environment, which a sandbox's is not
SYSTEM = "/usr/"  # whose other programs a sandbox has anyway
MAX_HEAD_BYTES = 4096


def write_scripts(source: Path, folder: Path) -> None:
    """Writes the programs of one directory to another, which is made where it is missing, open to every user.

    What is no script of Python is the same file under another name, or a copy of it. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
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
