"""The host's files that the sandboxes of one flow run or interpreter can use."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .mounts import HostMount, read_mounts
from .python_path import PythonPath, read_python_path

UPLOADED_PYTHON_PATH = "/tmp/rlm-batch-python-path"  # The directory of uploaded modules in a sandbox.
UPLOADED_PYTHON = "/tmp/rlm-batch-python/bin/python"  # A Python that imports the uploaded modules.
ARCHIVE_PATH = "/tmp/rlm-batch-files.zip"  # The uploaded archive, until it is unpacked.
# A program for `sh -c` with an archive and a Python. After a lost answer it runs again, maybe without the archive.
UNPACK_ARCHIVE = 'if [ -e "$1" ]; then "$2" -I -m zipfile -e "$1" / && rm -f "$1"; fi'


@dataclass(frozen=True)
class HostFiles:
    """Files of the host: modules and data.

    `archive` is the zip file to upload to sandboxes, or None if there is nothing to upload.
    """

    python_path: PythonPath | None = None
    mounts: tuple[HostMount, ...] = ()
    archive: bytes | None = None

    def build_fingerprint(self) -> dict[str, Any]:
        """Return digests of the files, as JSON, because a result depends on the files."""
        digests: dict[str, Any] = {}
        if self.python_path is not None:
            digests["python_path"] = self.python_path.digest
        if self.mounts:
            digests["mounts"] = {mount.target: mount.digest for mount in self.mounts}
        return digests

    def list_uploaded_directories(self) -> list[str]:
        """Return the directories that code imports from, in a sandbox with the unpacked archive."""
        return [] if self.python_path is None else self.python_path.list_directories(UPLOADED_PYTHON_PATH)

    def find_uploaded_python(self) -> str | None:
        """Return the Python for code in a sandbox with uploaded modules, or None for the sandbox's own Python."""
        return None if self.python_path is None else UPLOADED_PYTHON


def read_host_files(
    python_path: Sequence[str] | None, mounts: Mapping[str, Any] | None, *, is_uploaded: bool, is_bound: bool
) -> HostFiles:
    """Read the files that these parameters name.

    Args:
        python_path: Directories that code imports from.
        mounts: Files and directories of the host, by their paths in a sandbox.
        is_uploaded: Pack the files into an archive for upload.
        is_bound: Bind mounts from the host and leave them out of the archive.

    Raises:
        ConfigurationError: A file is missing, not allowed, too large, or cannot be read.
    """
    modules = read_python_path(python_path) if python_path else None
    host_mounts = read_mounts(mounts or {}, is_uploaded=not is_bound)
    files = HostFiles(modules, host_mounts)
    has_uploads = modules is not None or any(mount.files is not None for mount in host_mounts)
    return replace(files, archive=_build_archive(files)) if is_uploaded and has_uploads else files


def _build_archive(files: HostFiles) -> bytes:
    """Return a zip file of all files, with paths relative to the root of a sandbox."""
    import zipfile  # Its import takes longer than the rest of this module.

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        if files.python_path is not None:
            for directory in files.list_uploaded_directories():
                file.writestr(f"{directory[1:]}/", b"")
            for path, data in files.python_path.files.items():
                file.writestr(f"{UPLOADED_PYTHON_PATH[1:]}/{path}", data)
        for mount in files.mounts:
            if mount.files is None:
                continue
            if mount.is_directory:
                file.writestr(f"{mount.target[1:]}/", b"")
            for path, data in mount.files.items():
                name = f"{mount.target}/{path}" if path else mount.target  # The path of a mounted file is empty.
                file.writestr(name[1:], data)
    return archive.getvalue()
