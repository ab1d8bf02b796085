"""A directory like a virtual environment, for the Python processes that code starts in a sandbox.

Python finds the ``pyvenv.cfg`` near its executable after any kind of start: by its path, by a script's first line, with
``-I`` or with an empty environment. With this file, Python ignores the machine's packages and imports the packages that
the ``.pth`` file names. Environment variables or options would not reach all these processes.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CONFIGURATION = "home = {home}\ninclude-system-site-packages = false\nexecutable = {python}\n"
# `addsitedir` also processes the .pth files of a site directory. Names inside the comprehensions resolve in `site`,
# which runs this line. The line is ASCII, because Python 3.11 reads the file in the locale's encoding.
IMPORT_LINE = (
    "import sys; sys.path[:0] = [path for path in {first} if path not in sys.path]; "
    "sys.path += [path for path in {last} if path not in sys.path]; "
    "[sys.modules['site'].addsitedir(path) for path in {sites}]\n"
)
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
EXECUTABLES = ("python", "python3", VERSION)
THREADING_FLAG = "t" if "t" in getattr(sys, "abiflags", "") else ""  # a Python without a global lock has it
SITE_DIRECTORIES = ("lib", VERSION + THREADING_FLAG, "site-packages")
IMPORT_FILE = "rlm-batch.pth"


def write_python_directory(
    folder: str,
    python: str,
    *,
    first: list[str] | tuple[str, ...] = (),
    last: list[str] | tuple[str, ...] = (),
    sites: list[str] | tuple[str, ...] = (),
    scripts: str | None = None,
) -> None:
    """Create the directory `folder`, readable for every user, for the running Python version.

    Args:
        folder: The new directory. Its `bin` contains the executables.
        python: Path in the sandbox of the Python executable.
        first: Import directories that come before the standard library.
        last: Import directories that come after the standard library.
        sites: Like `last`, but Python also processes the .pth files in them.
        scripts: An existing directory to link as `bin`, with the executables (see `link_python`) and other programs.

    Raises:
        OSError: A file could not be written.
    """
    if scripts is None:
        _make_directory(folder)
        _make_directory(f"{folder}/bin")
        link_python(f"{folder}/bin", python)
    else:
        _make_directory(folder)
        os.symlink(scripts, f"{folder}/bin")
    configuration = CONFIGURATION.format(home=os.path.dirname(python), python=python)
    _write(f"{folder}/pyvenv.cfg", configuration.encode("utf-8", "surrogateescape"))
    if first or last or sites:
        directory = folder
        for name in SITE_DIRECTORIES:
            directory = f"{directory}/{name}"
            _make_directory(directory)
        line = IMPORT_LINE.format(first=ascii(list(first)), last=ascii(list(last)), sites=ascii(list(sites)))
        _write(f"{directory}/{IMPORT_FILE}", line.encode())


def remove_python_directory(folder: str) -> None:
    """Remove a directory of `write_python_directory`. Raises OSError if it has other files.

    This opens no file, so it works at the limit of open files.
    """
    library, version, site = SITE_DIRECTORIES
    directories = [folder]
    paths = [f"{folder}/pyvenv.cfg"]
    if os.path.lexists(f"{folder}/{library}"):
        site_directory = f"{folder}/{library}/{version}/{site}"
        directories = [site_directory, f"{folder}/{library}/{version}", f"{folder}/{library}", folder]
        paths.append(f"{site_directory}/{IMPORT_FILE}")
    if os.path.islink(f"{folder}/bin"):
        paths.append(f"{folder}/bin")
    else:
        paths += [f"{folder}/bin/{name}" for name in EXECUTABLES]
        directories.insert(0, f"{folder}/bin")
    for path in paths:
        _remove(os.unlink, path)
    for directory in directories:
        _remove(os.rmdir, directory)


def _remove(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except FileNotFoundError:
        pass


def link_python(folder: str, python: str) -> None:
    """Link `python` in `folder` under the usual names of the running Python version. Raises OSError."""
    first_path, *other_paths = [f"{folder}/{name}" for name in EXECUTABLES]
    os.symlink(python, first_path)
    for path in other_paths:
        try:
            # A hard link to the first link takes a tenth of the time of a new link.
            os.link(first_path, path, follow_symlinks=False)
        except OSError:  # Some file systems have no hard links.
            os.symlink(python, path)


def _make_directory(path: str) -> None:
    """Create a directory if it is missing, readable for every user regardless of the umask."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    os.chmod(path, 0o755)


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fchmod(fd, 0o644)
    finally:
        os.close(fd)
