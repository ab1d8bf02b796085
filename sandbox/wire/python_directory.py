"""A sandbox's own Python: a directory like a virtual environment, for each Python process that code starts.

Python finds ``pyvenv.cfg`` beside its executable however it is started: by its path or by a script's first line, with
``-I``, and with an empty environment. So it ignores the packages of the machine, and imports those that the ``.pth``
file names. Neither environment variables nor options would reach all these processes.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

CONFIGURATION = "home = {home}\ninclude-system-site-packages = false\nexecutable = {python}\n"
# A site directory's own .pth files count, too. The names in a list are looked up in `site`, which runs this. All of it
# is ASCII, as Python 3.11 reads the file in the locale's encoding.
IMPORT_LINE = (
    "import sys; sys.path[:0] = [path for path in {first} if path not in sys.path]; "
    "sys.path += [path for path in {last} if path not in sys.path]; "
    "[sys.modules['site'].addsitedir(path) for path in {sites}]\n"
)
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
EXECUTABLES = ("python", "python3", VERSION)
SITE_DIRECTORIES = ("lib", VERSION + ("t" if "t" in getattr(sys, "abiflags", "") else ""), "site-packages")
IMPORT_FILE = "rlm-batch.pth"


def write_python_directory(
    folder: str,
    python: str,
    *,
    first: list[str] | tuple[str, ...] = (),
    last: list[str] | tuple[str, ...] = (),
    sites: list[str] | tuple[str, ...] = (),
    scripts: str | None = None,
    files: dict[str, bytes] | None = None,
) -> None:
    """Make the directory `folder`, open to every user, for the Python version that calls this.

    Args:
        folder: the new directory. Its `bin` has the executables.
        python: the path of the Python that it is for, in the sandbox.
        first: directories that Python imports from ahead of the standard library.
        last: directories that it imports from behind the standard library.
        sites: the same, with the .pth files in them.
        scripts: a directory with the executables (`link_python`) and more programs, which becomes the `bin`.
        files: more files of `folder`, by their names.

    Raises:
        OSError: a file could not be written.
    """
    if scripts is None:
        _make_directories(folder, "bin")
        link_python(f"{folder}/bin", python)
    else:
        _make_directories(folder)
        os.symlink(scripts, f"{folder}/bin")
    configuration = CONFIGURATION.format(home=os.path.dirname(python), python=python)
    _write(f"{folder}/pyvenv.cfg", configuration.encode("utf-8", "surrogateescape"))
    for name, data in (files or {}).items():
        _write(f"{folder}/{name}", data)
    if first or last or sites:
        _make_directories(folder, *SITE_DIRECTORIES)
        line = IMPORT_LINE.format(first=ascii(list(first)), last=ascii(list(last)), sites=ascii(list(sites)))
        _write("/".join([folder, *SITE_DIRECTORIES, IMPORT_FILE]), line.encode())


def remove_python_directory(folder: str, files: Iterable[str] = ()) -> None:
    """Remove what `write_python_directory` has made; `files` are the names of its `files`.

    This opens nothing, so it works also in a process that may open no more files. Raises OSError where more is there.
    """
    directories = ["/".join([folder, *SITE_DIRECTORIES[:depth]]) for depth in (3, 2, 1, 0)]
    paths = [f"{folder}/{name}" for name in ("pyvenv.cfg", *files)] + [f"{directories[0]}/{IMPORT_FILE}"]
    if os.path.islink(f"{folder}/bin"):
        paths.append(f"{folder}/bin")
    else:
        paths += [f"{folder}/bin/{name}" for name in EXECUTABLES]
        directories.insert(0, f"{folder}/bin")
    for remove, group in ((os.unlink, paths), (os.rmdir, directories)):
        for path in group:
            try:
                remove(path)
            except FileNotFoundError:
                pass


def link_python(folder: str, python: str) -> None:
    """Link `python` in the directory `folder` by the names of the Python version that calls this. Raises OSError."""
    for name in EXECUTABLES:
        os.symlink(python, f"{folder}/{name}")


def _make_directories(path: str, *names: str) -> None:
    """Make the missing directories of a path, open to every user whatever this process's umask is."""
    for name in ("", *names):
        path = f"{path}/{name}" if name else path
        if not os.path.isdir(path):
            os.mkdir(path)
            os.chmod(path, 0o755)


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
