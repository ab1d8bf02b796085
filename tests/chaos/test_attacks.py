"""Tests of batches in which some executions attack their sandboxes: all others succeed, and no process is left."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import LocalSandbox, Result
from rlm_batch.tasks.ledger.ledger import Ledger

from ..blocks.local.targets import Marked
from .attacks import ATTACKS, BOMB_KINDS, BOMB_SECONDS, CODE, START_BOMB, compile_bomb
from .faults import Hosts, Provider, chance
from .stage import Stage

SECONDS = 30  # seconds after which no further batch starts
TIMEOUT = 60.0  # seconds for an execution: a harmless one takes milliseconds, but bombs keep the machine busy
SIZE = 40


def make_inputs(marked: Marked, bomb: str | None, dice: Any) -> list[dict[str, Any]]:
    """Return inputs of which a third attack, each differently, at random places."""
    bombs = [{"text": START_BOMB, "bomb": bomb, "kind": kind} for kind in BOMB_KINDS.values()] if bomb else []
    attacks: list[dict[str, Any]] = [*bombs, *({"text": text} for text in ATTACKS.values())]
    dice.shuffle(attacks)
    inputs: list[dict[str, Any]] = [{"text": ""} for _ in range(SIZE - SIZE // 3)]
    inputs += [dict(attack) for attack in attacks[: SIZE // 3]]
    dice.shuffle(inputs)
    common = {"seconds": BOMB_SECONDS, "mark": marked.mark}
    return [{"x": x, **common, **variables} for x, variables in enumerate(inputs)]


@pytest.mark.chaos
@pytest.mark.parametrize("provider", ["local"], indirect=True)
@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.requires(level)) for level in ("bubblewrap", "landlock")]
)
def test_attacks_harm_no_other_execution_and_leave_nothing(
    stage: Stage, hosts: Hosts, provider: Provider, level: Any, tmp_path: Path
) -> None:
    dice, marked, bomb = chance("attacks", level), Marked(), compile_bomb(tmp_path)
    name = f"attacked-{uuid.uuid4().hex[:8]}"
    disk_mib = 256 if level == "bubblewrap" else None
    LocalSandbox(isolation=level, total_memory_mib=512, disk_mib=disk_mib, processes=64).save(name)
    started_at, batches, ends = time.monotonic(), 0, set[str]()
    while time.monotonic() < started_at + SECONDS:
        inputs, ledger = make_inputs(marked, bomb, dice), Ledger(tmp_path / f"batch-{batches}")
        parameters = {
            "code": CODE,
            "inputs": inputs,
            "provider": f"rlm-local-sandbox/{name}",
            "timeout": TIMEOUT,
            "results_path": str(ledger.path),
            "on_failure": "return",
            "max_workers": dice.choice((2, 4)),
            "reuse_sandboxes": dice.random() < 0.5,
            "executions_per_task": dice.choice((1, 1, 5)),
        }
        host = hosts.start(provider, op="batch", parameters=parameters)
        assert host.wait_for_exit(300) == 0, host.read_output()
        outcomes = {
            outcome.meta.index: outcome
            for outcome in (line.to_outcome() for line in ledger.load_latest_lines().values())
        }
        assert set(outcomes) == set(range(SIZE)), host.read_output()
        for variables in inputs:
            outcome = outcomes[variables["x"]]
            if not variables["text"]:
                assert isinstance(outcome, Result), outcome
                assert outcome.outputs == {"y": variables["x"] ** 2}
            elif not isinstance(outcome, Result):
                ends.add(type(outcome.error).__name__)
        marked.wait_until_gone()
        stage.check_nothing_remains(after_lifetime=False)
        batches += 1
    print(f"{level}: {batches} batches of {SIZE}, a third of them attacks, which ended as {', '.join(sorted(ends))}")
