"""What the sandboxes of one flow run or interpreter get of the host's files."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...sandbox.errors import ConfigurationError
from .python_path import PythonPath, read_python_path

UPLOADED_PYTHON_PATH = "/tmp/rlm-batch-python-path"  # where sandboxes on other machines have one's own modules
ARCHIVE_PATH = "/tmp/rlm-batch-files.zip"  # until it is unpacked there
# A program for `sh -c`, with an archive and a Python. A second time, when the answer was lost, there is none any more.
UNPACK_ARCHIVE = 'if [ -e "$1" ]; then "$2" -m zipfile -e "$1" / && rm -f "$1"; fi'


@dataclass(frozen=True)
class HostFiles:
    """Files of the host: one's own modules. `archive` has them for sandboxes on other machines, None without any."""

    python_path: PythonPath | None = None
    archive: bytes | None = None

    def pack(self) -> "HostFiles":
        """The same with the archive."""
        return self if self.python_path is None else HostFiles(self.python_path, _build_archive(self.python_path))

    def build_fingerprint(self) -> dict[str, Any]:
        """What a result depends on of them: JSON."""
        return {} if self.python_path is None else {"python_path": self.python_path.digest}

    def list_uploaded_directories(self) -> list[str]:
        """Where the code imports from, in a sandbox with the unpacked archive."""
        return [] if self.python_path is None else self.python_path.list_directories(UPLOADED_PYTHON_PATH)


def read_host_files(python_path: Sequence[str] | None, *, is_uploaded: bool) -> HostFiles:
    """The files that these parameters name, as they are now; with `is_uploaded` also as an archive.

    Raises ConfigurationError.
    """
    files = HostFiles(read_python_path(python_path) if python_path else None)
    return files.pack() if is_uploaded else files


def _build_archive(modules: PythonPath) -> bytes:
    """A zip file of all, whose paths are those below the root of a sandbox."""
    import zipfile  # which takes longer to import than the rest of this

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for directory in modules.list_directories(UPLOADED_PYTHON_PATH):
            file.writestr(f"{directory[1:]}/", b"")
        for path, data in modules.files.items():
            file.writestr(f"{UPLOADED_PYTHON_PATH[1:]}/{path}", data)
    return archive.getvalue()


def describe_unpacking_failure(output: str) -> ConfigurationError:
    """The error where a sandbox on another machine could not unpack the archive, of what the command wrote."""
    lines = output.strip().splitlines() or ["its command wrote nothing"]
    return ConfigurationError(
        f"the files of python_path could not be unpacked in a sandbox: {lines[-1][-1000:]}. See to room on its disk"
    )
