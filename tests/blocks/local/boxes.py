"""Sandboxes to attack: their kinds, the requests to them, and the outcomes of attempts."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.confinement.policy import MACHINES
from rlm_batch.sandbox.confinement.system_calls import CALLS

from ...infra.waiting import HANG_SECONDS
from .hosts import Host, Hosts

ATTACK = Path(__file__).with_name("attack.py").read_text()
# System calls that the attacks use and the policy does not name.
MORE_CALLS = {
    "capget": (125, 90), "pidfd_open": (434, 434),
    "listmount": (458, 458), "setxattrat": (463, 463), "getxattrat": (464, 464), "removexattrat": (466, 466),
    "open_tree_attr": (467, 467), "file_setattr": (469, 469), "ioprio_set": (251, 30), "sched_setattr": (314, 274),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "process_mrelease": (448, 448),
}  # fmt: skip


def wait_for_file(name: str = "go") -> str:
    """Return code that waits until `Box.let_go` creates the file."""
    return f"while not os.path.exists({name!r}):\n    time.sleep(0.01)\n"


def numbers() -> dict[str, int]:
    """Return this machine's numbers of the system calls that the attacks use."""
    column = MACHINES.get(platform.machine(), (0, 0))[0]
    by_name = {name: pair[column] for name, pair in (CALLS | MORE_CALLS).items()}
    return {name: number for name, number in by_name.items() if number is not None}


@dataclass(frozen=True)
class Tried:
    """The outcomes of attempts by name: the values of those that succeeded, and the errors of the refused ones."""

    done: dict[str, str]
    refused: dict[str, str]

    def __str__(self) -> str:
        return f"done: {self.done}; refused: {self.refused}"


@dataclass
class Box:
    """A sandbox of a host. `abi` is the Landlock version that the sandbox uses, or None for the kernel's version."""

    host: Host
    level: str
    abi: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    sandbox: str = ""  # the id of the sandbox that ran the last execution

    @property
    def folder(self) -> Path:
        """Return the code's working directory, as the host sees it."""
        return self.host.folders / self.sandbox / "work"

    @property
    def request(self) -> dict[str, Any]:
        """Return the fields that identify the sandbox in a request."""
        fields = {"isolation": self.level, **self.fields}
        return {"box": json.dumps([self.abi, fields]), "fields": fields, "abi": self.abi}

    def send(self, code: str, *, timeout: float = HANG_SECONDS, context: str | None = None, **variables: Any) -> int:
        """Start an execution and return its number. Put attack.py before code that has a line break or a call."""
        code = f"{ATTACK}\n{code}" if "\n" in code or "(" in code else code
        execution = {"code": code, "timeout": timeout, "context": context}
        variables = {"numbers": numbers(), **variables}
        return self.host.ask({**self.request, "op": "execute", **execution, "variables": variables})

    def run(self, code: str, **more: Any) -> dict[str, Any]:
        """Run code and return the whole answer."""
        answer = self.host.wait(self.send(code, **more))
        assert "broken" not in answer, answer["broken"]
        self.sandbox = answer.get("sandbox", self.sandbox)
        return answer

    def outputs(self, code: str, **more: Any) -> dict[str, Any]:
        """Run code and return the fields that it submitted."""
        answer = self.run(code, **more)
        assert "outputs" in answer, answer
        return answer["outputs"]

    def run_attempts(self, code: str, **more: Any) -> Tried:
        """Run code and return the outcomes of its attempts. Fail if the code made no attempt."""
        outputs = self.outputs(f"{code}\nSUBMIT(done=done, refused=refused)", **more)
        assert outputs["done"] or outputs["refused"]
        return Tried(outputs["done"], outputs["refused"])

    def let_go(self, name: str = "go") -> None:
        """End the wait of the code from `wait_for_file`. This needs no other execution."""
        (self.folder / name).touch()

    def close(self) -> None:
        """Remove the sandbox."""
        answer = self.host.wait(self.host.ask({**self.request, "op": "close"}))
        assert "broken" not in answer, answer["broken"]

    def start(self) -> None:
        """Start the sandbox, or a new one if an attack has broken it."""
        answer = self.run("pass")
        if "error" in answer and answer["error"]["error"] == "SandboxLost":
            self.close()  # the test with the attack has already failed
            answer = self.run("pass")
        if "error" in answer:
            pytest.fail(f"the sandbox did not start: {answer}")


Boxes = Callable[..., Box]
KINDS: list[tuple[str, str, int | None]] = [
    ("bubblewrap", "root", None),
    ("landlock", "root", None),
    ("bubblewrap", "user", None),
    ("landlock", "user", None),
]
# Older kernels leave some restrictions to the filter of system calls. Root appears only where the user makes a
# difference. The marks of a test choose the Landlock versions: none, the first version, and the last version that does
# not stop the attack.
OLDER: list[tuple[str, str, int | None]] = [
    *(("landlock", "user", abi) for abi in range(1, 6)),
    ("landlock", "root", 1),
    ("bubblewrap", "user", 1),
    ("bubblewrap", "user", 0),  # no Landlock
]


def name_of(kind: tuple[str, str, int | None]) -> str:
    """Return the name of a kind of sandbox in a test's id."""
    level, who, abi = kind
    return f"{level}-{who}" + ("" if abi is None else f"-abi{abi}")


def mark_kind(kind: tuple[str, str, int | None]) -> tuple[pytest.MarkDecorator, ...]:
    """Return marks for the support that the kind needs on this machine."""
    level, who, _ = kind
    return (pytest.mark.requires("root", level) if who == "root" else pytest.mark.requires(f"{level} for users"),)


def make_box(hosts: Hosts, kind: tuple[str, str, int | None], **fields: Any) -> Box:
    """Start a sandbox of a kind."""
    level, who, abi = kind
    box = Box(hosts(who), level, abi, fields)
    box.start()
    return box


LIFETIMES = itertools.count()


def unconfined(box: Box) -> Box:
    """Return the host's sandbox without isolation. If an attack fails even there, its test proves nothing."""
    return Box(box.host, "none")
