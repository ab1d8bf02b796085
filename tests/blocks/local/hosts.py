"""Host processes of local sandboxes, run as root or an ordinary user, and a Python that an ordinary user can start."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from ...infra.requirements import ORDINARY_UID

HOST = Path(__file__).with_name("local_host.py")
ENVIRONMENT_SECRET = "of the environment"


def start_as_ordinary(python: str) -> str | None:
    """Return this Python's prefix if an ordinary user can start it and its bytecode version matches, else None."""
    program = "import _ctypes, sqlite3, sys, importlib.util as u; print(u.MAGIC_NUMBER.hex(), sys.base_prefix)"
    who: dict[str, Any] = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
    command = [python, "-I", "-S", "-c", program]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", env={}, **who)
    except OSError:
        return None
    magic, _, prefix = done.stdout.strip().partition(" ")
    return prefix if done.returncode == 0 and magic == MAGIC_NUMBER.hex() else None


def link(source: str, target: str) -> None:
    """Create a hard link to a file, or a copy where links fail."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_python(base: str, folder: Path) -> str:
    """Copy the base Python to a folder where it finds its shared library next to itself, and return its path."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir()
    library = Path(sys.base_prefix) / "lib"
    program, searched, beside = Path(base).read_bytes(), os.fsencode(library) + b"\0", b"$ORIGIN/../lib\0"
    if len(beside) <= len(searched):  # replace the library path in the program's dynamic section, if it has one
        program = program.replace(searched, beside.ljust(len(searched), b"\0"))
    (folder / "bin" / version).write_bytes(program)
    (folder / "bin" / version).chmod(0o755)
    leave = shutil.ignore_patterns("test", "site-packages", "idlelib", "tkinter", "ensurepip", "config-*")
    shutil.copytree(library / version, folder / "lib" / version, ignore=leave, copy_function=link)
    for shared in library.glob("libpython*.so*"):
        link(str(shared.resolve()), str(folder / "lib" / shared.name))
    return str(folder / "bin" / version)


class Host:
    """A host process that answers requests."""

    def __init__(self, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self.uid: int = settings.get("uid", os.getuid())
        self.home = Path(environment["HOME"])
        self.folders = Path(environment["TMPDIR"])
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(HOST), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.pid: int = self.wait(0)["pid"]

    def ask(self, request: dict[str, Any]) -> int:
        """Send a request and return its number."""
        number = next(self._ids)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request | {"id": number}) + "\n")
        self.process.stdin.flush()
        return number

    def wait(self, number: int) -> dict[str, Any]:
        """Return the answer to a request."""
        return self.wait_for_any([number])

    def wait_for_any(self, numbers: list[int]) -> dict[str, Any]:
        """Return the first answer to any of these requests; its `id` is the request's number."""
        assert self.process.stdout is not None
        while not (answered := self._answers.keys() & {*numbers}):
            line = self.process.stdout.readline()
            assert line, "the host has ended"
            answer = json.loads(line)
            self._answers[answer["id"]] = answer
        return self._answers.pop(answered.pop())

    def list_sandboxes(self) -> dict[str, dict[str, str]]:
        """Return the labels of the provider's sandboxes by id."""
        return self.wait(self.ask({"op": "list"}))["found"]

    def delete_sandbox(self, sandbox: str) -> None:
        """Delete a sandbox through its provider."""
        answer = self.wait(self.ask({"op": "delete", "sandbox": sandbox}))
        assert "broken" not in answer, answer["broken"]

    def as_user(self) -> dict[str, Any]:
        """Return the options that start a process as the host's user."""
        return {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid != os.getuid() else {}

    def end(self) -> None:
        """Remove the host's sandboxes and end the host."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


Hosts = Callable[..., Host]
