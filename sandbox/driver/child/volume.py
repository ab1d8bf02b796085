"""The volume, with the functions that code in a sandbox calls."""

from __future__ import annotations

import errno
import os
import stat
import sys

from ...wire.names import MAX_REPORTED_FILES, OWN_FILE_PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .channel import InterruptShield


class VolumeError(OSError):
    """An invalid path, a missing file, a failed write, or a sandbox without a volume."""

    __module__ = "builtins"  # the name that code sees in tracebacks


class Volume:
    """The volume of a sandbox. `root` is its mount point; None if the sandbox has no volume.

    It requires little of the volume's file system: a file is written once, from first to last byte, and closed. If
    renaming works, a file gets its name when complete. Otherwise (S3 behind FUSE) an incomplete file is removed.
    """

    def __init__(self, root: str | None, is_shared: bool, shield: InterruptShield) -> None:
        self.root = root
        self._is_shared = is_shared  # executions run as different users with a common group
        self._real_root: str | None = None  # None until needed
        self._shield = shield
        self._renames_files: bool | None = None  # None: not tried yet
        self._written: dict[str, None] = {}  # paths in the order of writing
        if root is not None and hasattr(sys, "addaudithook"):
            sys.addaudithook(self._on_audit_event)

    def begin_execution(self) -> None:
        self._written = {}

    def list_written(self) -> list[str]:
        """Return the existing files on the volume that Python code of this process has opened for writing.

        On a shared volume, also let the group read and write them, because tempfile makes files private.
        """
        files: list[str] = []
        for path in list(self._written):  # a thread of the code may still write
            file = f"{self.root}/{path}"
            try:
                entry = os.lstat(file)
                if not stat.S_ISREG(entry.st_mode):
                    continue  # tempfile opens the directory in which it makes a file
                files.append(path)
                if self._is_shared and entry.st_mode & 0o060 != 0o060:
                    os.chmod(file, stat.S_IMODE(entry.st_mode) | 0o060)
            except OSError:
                continue  # removed, or owned by another user
        return files

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record files that are opened, renamed or removed. Python calls this before each such event."""
        try:
            if event == "open":
                if arguments[2] & os.O_ACCMODE != os.O_RDONLY:
                    self._record_path(arguments[0])
            elif event == "os.remove":
                self._forget_path(arguments[0])
            elif event == "os.rename":
                self._forget_path(arguments[0])
                self._record_path(arguments[1])
        except Exception:
            pass  # A missing working directory or wrong arguments: the code would get this error.

    def _record_path(self, path: Any) -> None:
        inside = self._find_path_inside(path)
        if inside is not None and len(self._written) < MAX_REPORTED_FILES:
            self._written[inside] = None

    def _forget_path(self, path: Any) -> None:
        inside = self._find_path_inside(path)
        if inside is not None:
            self._written.pop(inside, None)

    def _find_path_inside(self, path: Any) -> str | None:
        """Return a file's path relative to the volume; None for files elsewhere, the driver's files and non-paths."""
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return None
        path = os.path.abspath(path)
        for root in (self.root, self._real_root):
            if root is not None and path.startswith(root + "/"):
                is_own = os.path.basename(path).startswith(OWN_FILE_PREFIX)
                return None if is_own else path[len(root) + 1 :]
        return None

    def make_names(self) -> dict[str, Any]:
        def save_to_volume(path: str | os.PathLike[str], data: str | bytes) -> str:
            """Save text (as UTF-8) or bytes in a file and return its path relative to the volume.

            Missing directories are created, and an existing file is replaced. A file that could not be written
            completely is removed.

            Args:
                path: Path relative to the volume, or an absolute path on it.
                data: Content of the file.

            Raises:
                VolumeError: The path leaves the volume, or the file could not be written.
                TypeError: `data` is neither text nor bytes.
            """
            return self._save(path, data)

        def load_from_volume(path: str | os.PathLike[str], *, binary: bool | None = None) -> str | bytes:
            """Return the content of a file: text if it is UTF-8, else bytes.

            Args:
                path: Path relative to the volume, or an absolute path on it.
                binary: True returns bytes, False returns text. By default the content decides, because a file does
                    not record which type was saved.

            Raises:
                VolumeError: The file is missing or unreadable, or not UTF-8 with `binary=False`.
            """
            return self._load(path, binary)

        def list_volume(path: str | os.PathLike[str] = "") -> list[str]:
            """Return the sorted paths of all files at or below `path`, except the driver's. Raises VolumeError."""
            return self._list(path)

        names: dict[str, Any] = {"VOLUME": self.root, "VolumeError": VolumeError}
        for function in (save_to_volume, load_from_volume, list_volume):
            function.__qualname__ = function.__name__
            names[function.__name__] = function
        return names

    def _resolve(self, path: str | os.PathLike[str], function: str) -> tuple[str, str]:
        """Return a path relative to the volume, and its real absolute path. Raises VolumeError for paths outside."""
        if self.root is None:
            raise VolumeError(f"{function} needs a volume: set `volume_name`")
        if self._real_root is None:
            if not os.path.isdir(self.root):
                raise VolumeError(f"the volume is missing: nothing is mounted at {self.root}")
            self._real_root = os.path.realpath(self.root)
        absolute = os.path.normpath(os.path.join(self.root, path))
        real = os.path.realpath(absolute)
        if not _is_below(absolute, self.root) or not _is_below(real, self._real_root):
            raise VolumeError(f"{path!r} leaves the volume at {self.root}: use a path in it, also in symbolic links")
        return absolute[len(self.root) + 1 :], real

    def _save(self, path: str | os.PathLike[str], data: str | bytes) -> str:
        inside, real = self._resolve(path, "save_to_volume")
        if isinstance(data, str):
            data = data.encode("utf-8")
        elif not isinstance(data, (bytes, bytearray, memoryview)):  # type: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"save_to_volume takes text or bytes, not {type(data).__name__}: convert it, for example "
                "with json.dumps"
            )
        try:
            if os.path.isdir(real):
                raise IsADirectoryError("it is a directory")
            folder = os.path.dirname(real)
            os.makedirs(folder, exist_ok=True)
            if self._can_rename(folder):
                self._write(_make_partial_path(folder), "xb", data, real)
            else:
                self._write(real, "wb", data, real)
        except OSError as error:
            remedy = ": split it, or raise file_size_mib" if error.errno == errno.EFBIG else ""
            raise VolumeError(f"{inside!r} could not be saved: {error.strerror or error}{remedy}") from None
        return inside

    def _can_rename(self, folder: str) -> bool:
        """Return whether renaming works on the volume; try it once with an empty file in `folder`."""
        if self._renames_files is None:
            path, new_path = _make_partial_path(folder), _make_partial_path(folder)
            self._write(path, "xb", b"", path)
            try:
                os.rename(path, new_path)
                path = new_path
                self._renames_files = True
            except OSError:
                self._renames_files = False
            finally:
                os.unlink(path)
        return self._renames_files

    def _write(self, path: str, mode: str, data: Any, final_path: str) -> None:
        """Write a file without a buffer, and rename it to its final path. Remove the file if either step fails."""
        file: Any = None
        try:
            with self._shield:
                file = open(path, mode, buffering=0)  # noqa: SIM115
            unwritten = memoryview(data).cast("B")
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            file.close()  # some file systems report a full disk only here
            if path != final_path:
                os.rename(path, final_path)
        except BaseException:
            if file is not None:
                file.close()
                try:
                    os.unlink(path)
                except OSError:
                    pass
            raise

    def _load(self, path: str | os.PathLike[str], binary: bool | None) -> str | bytes:
        inside, real = self._resolve(path, "load_from_volume")
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its other end.
            with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError("it is no file: list_volume() lists the files")
                data = file.read()
        except OSError as error:
            raise _build_error(error, inside) from None
        if binary:
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if binary is None:
                return data
            raise VolumeError(f"{inside!r} is not UTF-8 ({error.reason}): load it with binary=True") from None

    def _list(self, path: str | os.PathLike[str]) -> list[str]:
        inside, real = self._resolve(path, "list_volume")
        paths: list[str] = []
        folders = [real]
        try:
            if not stat.S_ISDIR(os.stat(real).st_mode):
                return [inside]
            while folders:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        if entry.name.startswith(OWN_FILE_PREFIX):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            paths.append(os.path.join(inside, entry.path[len(real) + 1 :]))
        except OSError as error:
            raise _build_error(error, inside) from None
        return sorted(paths)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _make_partial_path(folder: str) -> str:
    return os.path.join(folder, f"{OWN_FILE_PREFIX}-{os.urandom(8).hex()}.partial")


def _build_error(error: OSError, path: str) -> VolumeError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return VolumeError(f"there is no {path!r} on the volume: list_volume() lists the files")
    return VolumeError(f"{path!r} could not be read: {error.strerror or error}")
