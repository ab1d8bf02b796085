"""What the sandboxes of one flow run or interpreter get of the host's files."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...sandbox.errors import ConfigurationError
from .mounts import HostMount, read_mounts
from .python_path import PythonPath, read_python_path

UPLOADED_PYTHON_PATH = "/tmp/rlm-batch-python-path"  # where sandboxes on other machines have one's own modules
UPLOADED_PYTHON = "/tmp/rlm-batch-python/bin/python"  # and, where there are some, a Python that imports them
ARCHIVE_PATH = "/tmp/rlm-batch-files.zip"  # until it is unpacked there
# A program for `sh -c`, with an archive and a Python. A second time, when the answer was lost, there is none any more.
UNPACK_ARCHIVE = 'if [ -e "$1" ]; then "$2" -I -m zipfile -e "$1" / && rm -f "$1"; fi'


@dataclass(frozen=True)
class HostFiles:
    """Files of the host: one's own modules, and data.

    `archive` has what is uploaded to sandboxes of other machines, None where nothing is.
    """

    python_path: PythonPath | None = None
    mounts: tuple[HostMount, ...] = ()
    archive: bytes | None = None

    def pack(self) -> "HostFiles":
        """The same with the archive."""
        if self.python_path is None and all(mount.files is None for mount in self.mounts):
            return self
        return replace(self, archive=_build_archive(self))

    def build_fingerprint(self) -> dict[str, Any]:
        """What a result depends on of them: JSON."""
        modules = {} if self.python_path is None else {"python_path": self.python_path.digest}
        mounts = {mount.target: mount.digest for mount in self.mounts}
        return {**modules, **({"mounts": mounts} if mounts else {})}

    def list_uploaded_directories(self) -> list[str]:
        """Where the code imports from, in a sandbox with the unpacked archive."""
        return [] if self.python_path is None else self.python_path.list_directories(UPLOADED_PYTHON_PATH)

    def find_uploaded_python(self) -> str | None:
        """The Python of the code's processes there, where it is not the sandbox's own."""
        return None if self.python_path is None else UPLOADED_PYTHON


def read_host_files(
    python_path: Sequence[str] | None, mounts: Mapping[str, Any] | None, *, is_uploaded: bool, is_bound: bool
) -> HostFiles:
    """The files that these parameters name, as they are now; with `is_uploaded` also as an archive.

    Where it `is_bound`, data is not uploaded all the same. Raises ConfigurationError.
    """
    modules = read_python_path(python_path) if python_path else None
    files = HostFiles(modules, read_mounts(mounts, is_uploaded=not is_bound) if mounts is not None else ())
    return files.pack() if is_uploaded else files


def _build_archive(files: HostFiles) -> bytes:
    """A zip file of all, whose paths are those below the root of a sandbox."""
    import zipfile  # which takes longer to import than the rest of this

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for directory in files.list_uploaded_directories():
            file.writestr(f"{directory[1:]}/", b"")
        for path, data in ({} if files.python_path is None else files.python_path.files).items():
            file.writestr(f"{UPLOADED_PYTHON_PATH[1:]}/{path}", data)
        for mount in files.mounts:
            for path, data in mount.list_uploaded_files():
                file.writestr(path[1:], data)
    return archive.getvalue()


def describe_unpacking_failure(output: str) -> ConfigurationError:
    """The error where a sandbox on another machine could not unpack the archive, of what the command wrote."""
    lines = output.strip().splitlines() or ["its command wrote nothing"]
    return ConfigurationError(
        f"the files of python_path and mounts could not be unpacked in a sandbox: {lines[-1][-1000:]}. See to room on "
        "its disk, and name places for mounts that its user may write"
    )
