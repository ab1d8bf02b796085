"""A local sandbox of a host process to attack: what is sent to it, what came of the attempts, and its kinds."""

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
# Calls that the policy need not know by name.
MORE_CALLS = {
    "capget": (125, 90), "pidfd_open": (434, 434),
    "listmount": (458, 458), "setxattrat": (463, 463), "getxattrat": (464, 464), "removexattrat": (466, 466),
    "open_tree_attr": (467, 467), "file_setattr": (469, 469), "ioprio_set": (251, 30), "sched_setattr": (314, 274),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "process_mrelease": (448, 448),
}  # fmt: skip


def wait_for_file(name: str = "go") -> str:
    """Code that waits until its host lets it go on by that name."""
    return f"while not os.path.exists({name!r}):\n    time.sleep(0.01)\n"


def numbers() -> dict[str, int]:
    """This machine's numbers of the system calls that the attacks use."""
    column = MACHINES.get(platform.machine(), (0, 0))[0]
    found = {name: pair[column] for name, pair in (CALLS | MORE_CALLS).items()}
    return {name: number for name, number in found.items() if number is not None}


@dataclass(frozen=True)
class Tried:
    """What attempts came to: those that were done, with what they gave, and those that were refused, with the error."""

    done: dict[str, str]
    refused: dict[str, str]

    def __str__(self) -> str:
        return f"done: {self.done}; refused: {self.refused}"


@dataclass
class Box:
    """One sandbox of a host's. `abi` is the version of Landlock that it is made for, None for the kernel's own."""

    host: Host
    level: str
    abi: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    sandbox: str = ""  # the id of the sandbox that has last run something

    @property
    def folder(self) -> Path:
        """Where its code runs, as the host sees it."""
        return self.host.folders / self.sandbox / "work"

    @property
    def request(self) -> dict[str, Any]:
        """What names it in a request."""
        fields = {"isolation": self.level, **self.fields}
        return {"box": json.dumps([self.abi, fields]), "fields": fields, "abi": self.abi}

    def send(self, code: str, *, timeout: float = HANG_SECONDS, context: str | None = None, **variables: Any) -> int:
        """Starts an execution, with the names of attack.py if it is more than a line, and returns its number."""
        code = f"{ATTACK}\n{code}" if "\n" in code or "(" in code else code
        execution = {"code": code, "timeout": timeout, "context": context}
        variables = {"numbers": numbers(), **variables}
        return self.host.ask({**self.request, "op": "execute", **execution, "variables": variables})

    def run(self, code: str, **more: Any) -> dict[str, Any]:
        """The whole answer to an execution."""
        answer = self.host.wait(self.send(code, **more))
        assert "broken" not in answer, answer["broken"]
        self.sandbox = answer.get("sandbox", self.sandbox)
        return answer

    def outputs(self, code: str, **more: Any) -> dict[str, Any]:
        """What the code submitted."""
        answer = self.run(code, **more)
        assert "outputs" in answer, answer
        return answer["outputs"]

    def tried(self, code: str, **more: Any) -> Tried:
        """What the attempts in the code came to; there must be some."""
        found = self.outputs(f"{code}\nSUBMIT(done=done, refused=refused)", **more)
        assert found["done"] or found["refused"]
        return Tried(found["done"], found["refused"])

    def let_go(self, name: str = "go") -> None:
        """Let the executions go on that wait by `wait_for_file`; no new execution is needed for it."""
        (self.folder / name).touch()

    def close(self) -> None:
        """Removes the sandbox."""
        answer = self.host.wait(self.host.ask({**self.request, "op": "close"}))
        assert "broken" not in answer, answer["broken"]

    def start(self) -> None:
        """Starts it, anew where an attack has broken it."""
        answer = self.run("pass")
        if "error" in answer and answer["error"]["error"] == "SandboxLost":
            self.close()  # broken by an attack, whose test has said so
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
# What older kernels leave to the filter of system calls. As root too where that decides something else. An attack is
# tried on the first version of Landlock, without any, and on the last one that did not hold off what it tries.
OLDER: list[tuple[str, str, int | None]] = [
    *(("landlock", "user", abi) for abi in range(1, 6)),
    ("landlock", "root", 1),
    ("bubblewrap", "user", 1),
    ("bubblewrap", "user", 0),  # none at all
]


def name_of(kind: tuple[str, str, int | None]) -> str:
    """A kind of sandbox as a test's name has it."""
    level, who, abi = kind
    return f"{level}-{who}" + ("" if abi is None else f"-abi{abi}")


def mark_kind(kind: tuple[str, str, int | None]) -> tuple[pytest.MarkDecorator, ...]:
    """What that kind needs of the machine."""
    level, who, _ = kind
    return (pytest.mark.requires("root", level) if who == "root" else pytest.mark.requires(f"{level} for users"),)


def make_box(hosts: Hosts, kind: tuple[str, str, int | None], **fields: Any) -> Box:
    """A sandbox of that kind."""
    level, who, abi = kind
    box = Box(hosts(who), level, abi, fields)
    box.start()
    return box


LIFETIMES = itertools.count()


def unconfined(box: Box) -> Box:
    """The host's sandbox without isolation: there an attack must succeed, or it proves nothing."""
    return Box(box.host, "none")
