"""Packages for local sandboxes: wheels from the index, installed on the host, or the running environment's packages.

Building a package runs its code, here with all rights of this process. So requirements with an address, a path or a
repository are refused. A wheel's dependencies may still contain one, so the installer may not start the programs that
a build needs. The environment's packages are already installed.

The programs of packages (`pytest`, `black`) start the sandbox's Python, not the host's.
"""

import asyncio
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ...sandbox.errors import ConfigurationError
from ...sandbox.wire.python_directory import link_python
from ..host_files.cache import make_once, resolve_cache_root
from ..subprocess_runner import run_command
from ..worker_consent import check_path
from .launch.driver_process import find_python

INSTALL_TIMEOUT_SECONDS = 900.0
SCRIPTS = ".bin"  # directory beside installed packages, with Python and their programs
# The environment variables that an installer gets: its own settings (index, sign-in), the network's, and the user's
# directories. The settings of builds are left out.
INSTALLER_VARIABLES = re.compile(
    "(PIP|UV)_.+|(HTTP|HTTPS|ALL|NO)_PROXY|(http|https|all|no)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NETRC"
    "|PATH|HOME|USER|LOGNAME|LANG|LC_ALL|TMPDIR|XDG_(CONFIG_HOME|CONFIG_DIRS|CACHE_HOME|DATA_HOME)"
)
BUILD_VARIABLES = re.compile(
    "(PIP|UV)_(NO_BINARY.*|REQUIREMENT|EDITABLE|CONFIG_SETTINGS.*|NO_BUILD_ISOLATION.*|PYTHON.*|PLATFORM)"
)
# The user's settings, also those in pip's files, must not decide where or whether pip installs.
PIP_VARIABLES = {"PIP_DRY_RUN": "0", "PIP_NO_DEPS": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
PIP_OPTIONS = ["--no-user", "--root=/", "--prefix="]
# A pip that may start only `keyring`, for passwords. Normally pip also asks some programs for their versions, which it
# does not need.
PIP_PROGRAM = """
import os, runpy, sys

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"):
        if event != "subprocess.Popen" or os.path.basename(os.fsdecode(arguments[0])) != "keyring":
            raise PermissionError(1, "a program was to be started, as to build a package takes")

sys.addaudithook(refuse)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# This head starts the Python in the script's own directory, which may be a link. Python reads these lines as a string.
SCRIPT_HEAD = b"""#!/bin/sh
'''exec' "${0%/*}/python" "$0" "$@"
' '''
"""
# An installer starts a script with a Python's path, or with shell lines if the path is long or has blanks.
PYTHON_HEADS = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec'[^\n]*\n' '''\n")
# Programs of the environment itself. A sandbox has its own Python.
OWN_NAMES = re.compile(r"python[0-9.]*t?|[Aa]ctivate.*")
SYSTEM_DIRECTORY = "/usr/"  # Every sandbox has the compiled programs below it.
MAX_HEAD_BYTES = 4096


async def install_packages(requirements: list[str]) -> Path:
    """Install wheels and their dependencies once for this Python, and return their directory."""

    async def install(folder: Path) -> None:
        await _run_installer(requirements, folder)
        await run_command("chmod", "-R", "a+rX", str(folder))  # Code may run as another user.
        await asyncio.to_thread(write_scripts, folder / "bin", folder / SCRIPTS)

    return await make_once(locate_packages(requirements), install)


def locate_packages(requirements: list[str]) -> Path:
    """Return the directory in which these packages and their dependencies are installed for this Python."""
    parts = [sys.version, platform.machine(), SCRIPTS, find_python(), *PIP_VARIABLES, *sorted(requirements)]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return resolve_cache_root() / "packages" / name


async def _run_installer(requirements: list[str], folder: Path) -> None:
    """Install wheels and their dependencies in an empty folder. Raises ConfigurationError."""
    if importlib.util.find_spec("pip") is not None:
        options = ["--quiet", "--disable-pip-version-check", "--no-input"]
        installer = [sys.executable, "-P", "-c", PIP_PROGRAM, "install", *options, *PIP_OPTIONS]
    elif shutil.which("uv") is not None:  # For uv, `--only-binary` alone prevents builds.
        installer = ["uv", "pip", "install", "--quiet", "--deps", "--python", sys.executable]
    else:
        raise ConfigurationError(f"`packages` needs pip or uv: install one beside {sys.executable}")
    environment = {
        name: value
        for name, value in os.environ.items()
        if INSTALLER_VARIABLES.fullmatch(name) and not BUILD_VARIABLES.fullmatch(name)
    }
    try:
        done = await run_command(
            *installer,
            *("--only-binary", ":all:", "--target", str(folder), "--", *sorted(requirements)),
            timeout=INSTALL_TIMEOUT_SECONDS,
            environment={**environment, **PIP_VARIABLES},
            merge_stderr=True,
            cwd=folder,  # In a folder that is not empty, a file could have a package's name.
        )
    except TimeoutError:
        raise ConfigurationError(f"the packages were not installed in {INSTALL_TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-10:])
        raise ConfigurationError(
            "the packages could not be installed. Local sandboxes install only wheels, because building a package "
            f"would run its code on this machine:\n{last_lines}"
        )


def find_environment_packages() -> list[Path]:
    """Return the directories of the running environment's packages: two if compiled packages are separate."""
    directories: list[Path] = []
    for name in ("purelib", "platlib"):
        path = Path(os.path.realpath(sysconfig.get_path(name)))
        if path.is_dir() and path not in directories:
            directories.append(check_path(path))
    return directories


async def find_environment_scripts(packages: list[Path]) -> Path:
    """Return a cached directory with the environment's programs, changed so that they start a sandbox's Python."""
    own = Path(sysconfig.get_path("scripts"))
    digest = await asyncio.to_thread(digest_installed_versions, tuple(packages))

    async def write(folder: Path) -> None:
        await asyncio.to_thread(write_scripts, own, folder)

    name = hashlib.sha256(f"{own}\0{find_python()}\0{digest}".encode()).hexdigest()[:24]
    return await make_once(resolve_cache_root() / "bin" / name, write)


@cache
def digest_installed_versions(directories: tuple[Path, ...]) -> str:
    """Return a hash of the names and versions of the packages in these directories, as of the first call."""
    return hashlib.sha256("\n".join(list_installed_versions(directories)).encode()).hexdigest()[:24]


def list_installed_versions(directories: Iterable[Path]) -> list[str]:
    """Return the names and versions of the packages in these directories, sorted."""
    installed = importlib.metadata.distributions(path=[str(path) for path in directories])
    return sorted(f"{package.metadata['Name']}=={package.version}" for package in installed)


def write_scripts(source: Path, folder: Path) -> None:
    """Write Python and the programs of `source` to `folder`, open to every user; create `folder` if it is missing.

    Programs that are not Python scripts are hard-linked, or copied if that fails. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    link_python(str(folder), find_python())
    if not source.is_dir():
        return
    for path in sorted(source.iterdir()):
        is_program = path.is_file() and not path.is_symlink() and os.access(path, os.X_OK)
        if is_program and not OWN_NAMES.fullmatch(path.name):
            _write_script(path, folder / path.name)


def _write_script(path: Path, target: Path) -> None:
    with path.open("rb") as file:
        start = file.read(MAX_HEAD_BYTES)
        head = PYTHON_HEADS.match(start)
        if head is not None:
            target.write_bytes(SCRIPT_HEAD + start[head.end() :] + file.read())
            target.chmod(0o755)
            return
    if str(path).startswith(SYSTEM_DIRECTORY):
        return
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
        target.chmod(0o755)
