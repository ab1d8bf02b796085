"""Host tools: functions of the host that a flow's code calls."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, batch, load_report, sequence
from rlm_batch.sandbox.outcomes.outcome_json import outcome_to_json
from rlm_batch.tasks import host_tools

pytestmark = pytest.mark.anyio


async def look_up(city: str, *, scale: int = 1) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"people": 265_000 * scale, "process": os.getpid()}


def count(city: str) -> Any:
    found = look_up(city, scale=2)  # type: ignore[name-defined]  # noqa: F821
    return {**found, "size": get_size("/")}  # type: ignore[name-defined]  # noqa: F821


look_up_on_host = look_up
del look_up


async def test_code_calls_host_tools_and_the_calls_are_counted(tmp_path: Path):
    ledger = tmp_path / "ledger"
    tools = {"look_up": look_up_on_host, "get_size": "os.path:basename"}
    inputs = [{"city": "Ghent"}, {"city": "Bruges"}]
    first = await batch(count, inputs, tools=tools, results_path=ledger)
    assert [result.outputs for result in first] == [{"people": 530_000, "process": os.getpid(), "size": ""}] * 2
    assert {tuple(result.meta.tool_calls.items()) for result in first} == {(("look_up", 1), ("get_size", 1))}
    kept = load_report(str(ledger))
    assert [outcome.meta.tool_calls for outcome in kept.results] == [{"look_up": 1, "get_size": 1}] * 2
    again = await batch(count, inputs, tools=tools, results_path=ledger)
    assert [result.meta.sandbox_id for result in again] == [result.meta.sandbox_id for result in first]
    steps = await sequence(["x = look_up('Ghent')", "SUBMIT(x['people'])"], tools={"look_up": look_up_on_host})
    assert (steps[1].output, steps[0].meta.tool_calls, steps[1].meta.tool_calls) == (265_000, {"look_up": 1}, {})
    assert "tool_calls" not in outcome_to_json(steps[1])["meta"]


async def test_a_tool_timeout_raises_in_the_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_tools, "TOOL_TIMEOUT_SECONDS", 0.1)
    code = "try:\n    wait()\nexcept TimeoutError as error:\n    SUBMIT(str(error))"
    (result,) = await batch([code], tools={"wait": asyncio.Event().wait})
    assert result.output == "wait took more than 0.1 s: ask it for less"


async def test_invalid_tools_are_refused_before_a_sandbox_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
):
    wrong: list[tuple[dict[Any, Any], str]] = [
        ({"look up": len}, "has a name that code cannot use"),
        ({"SUBMIT": len}, "a name that code .* has already"),
        ({"size": 3}, "is 3: pass a function, or its import path"),
        ({"size": "os.path"}, "is 'os.path': pass a function"),
        ({"size": "no.such:function"}, "no.such:function, cannot be imported on this host"),
        ({"size": "os.path:nothing"}, "cannot be imported on this host"),
        ({"size": "os.path:sep"}, "is no function but str"),
    ]
    for tools, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            await batch(["SUBMIT(1)"], tools=tools, results_path=tmp_path / "ledger")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "as a worker has it")
    allow(allowed_paths=[str(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"does not let deployments call os\.path:basename"):
        await batch(["SUBMIT(1)"], tools={"size": "os.path:basename"})
    allow(allowed_tools=["os.path:basename", "json:dumps"])
    assert (await batch(["SUBMIT(size('/a'))"], tools={"size": "os.path:basename"}))[0].output == "a"
