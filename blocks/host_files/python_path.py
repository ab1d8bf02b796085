"""The user's modules: directories that code imports from, read when the flow run or the interpreter starts.

They are read once, so a later edit has no effect on running sandboxes. The key of a result includes a hash of the
modules.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...sandbox.errors import ConfigurationError
from .source_tree import ReadBudget, locate_source, open_source

# Names to skip. Those with a leading dot are not modules and may hold secrets (.env, .git).
LEFT_OUT = (".*", "*.pyc", "__pycache__", "node_modules", "venv")


@dataclass(frozen=True)
class PythonPath:
    """The files of directories that code imports from. Their keys are NUMBER/PATH, with the directory's number."""

    count: int  # The number of directories.
    files: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """Return a hash of the number of directories, and of the paths and bytes of all files."""
        digests = {path: hashlib.sha256(data).hexdigest() for path, data in sorted(self.files.items())}
        return hashlib.sha256(json.dumps([self.count, digests]).encode()).hexdigest()

    def list_directories(self, root: str) -> list[str]:
        """Return the directories in import order, for files that are written below `root`."""
        return [f"{root}/{number}" for number in range(self.count)]

    def write(self, folder: Path) -> None:
        """Write the files below a new folder. Raises OSError."""
        for directory in self.list_directories(str(folder)):
            os.mkdir(directory)
        for path, data in self.files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


def locate_directories(paths: Sequence[str]) -> list[Path]:
    """Return the directories with links resolved. Raises ConfigurationError for a missing or forbidden directory."""
    if isinstance(paths, str):
        raise ConfigurationError(f"python_path is a text: pass a list, [{paths!r}]")
    return [locate_source(os.fspath(path), "python_path") for path in paths]


def read_python_path(paths: Sequence[str]) -> PythonPath:
    """Read the files of these directories, which are in import order.

    Raises:
        ConfigurationError: A directory cannot be read, or the files together exceed the limits of `ReadBudget`.
    """
    files: dict[str, bytes] = {}
    budget = ReadBudget("python_path")
    for number, (text, root) in enumerate(zip(paths, locate_directories(paths), strict=True)):
        try:
            with open_source(root) as directory:
                found = budget.read_files(directory, root, LEFT_OUT)
        except OSError as error:
            raise ConfigurationError(f"python_path: {text} cannot be read: {error.strerror or error}") from None
        files |= {f"{number}/{path}": data for path, data in found.items()}
    return PythonPath(len(paths), files)
