"""Tests of reports: code reports its progress, and a search may end the execution."""

import math
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.intake.reports import Reports

from ...infra.waiting import HANG_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def run(provider: SandboxProvider, code: str, should_prune: Any = None, **more: Any) -> Any:
    async with provider.interpreter(timeout=HANG_SECONDS, **more) as interpreter:
        return await interpreter.execute(dedent(code), should_prune=should_prune)


async def test_reports_are_recorded_and_a_search_can_prune_the_execution(provider: SandboxProvider) -> None:
    code = "for step in range(5):\n    report(step / 2, step)\nSUBMIT(done=True)"
    result = await run(provider, code)
    assert result.done
    assert result.meta.reports == tuple((step, step / 2) for step in range(5))
    asked: list[tuple[int, float]] = []
    result = await run(provider, code, lambda step, value: asked.append((step, value)) or step == 2)
    assert asked == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert (result.outputs, result.meta.reports, result.meta.pruned) == ({}, tuple(asked), True)
    assert not result.meta.submitted


async def test_any_number_can_be_reported_and_the_first_per_step_counts(provider: SandboxProvider) -> None:
    code = """
    import decimal
    report(True, 0); report(decimal.Decimal("0.5"), 1.0); report(9, 1)
    report(float("nan"), 2); report(float("-inf"), 3)
    """
    first, second, third, fourth = (await run(provider, code)).meta.reports
    assert (first, second, fourth) == ((0, 1.0), (1, 0.5), (3, -math.inf))
    assert third[0] == 2
    assert math.isnan(third[1])


REFUSED = (
    ("report('high', 1)", "value is a str: it is a number"),
    ("report([1], 1)", "value is a list: it is a number"),
    ("report(10 ** 400, 1)", "int too large to convert to float"),
    ("report(1, -1)", "step is -1: use a whole number of at least 0"),
    ("report(1, 0.5)", "step is 0.5: use a whole number of at least 0"),
    ("report(1, float('nan'))", "step is nan: use a whole number of at least 0"),
    ("report(1, 2 ** 53 + 1)", r"from 0 to 2\*\*53"),
    ("report(1, 'a')", "step is a str: it is a number"),
    ("report(1)", "step"),
)


async def test_an_invalid_report_raises_a_code_error(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        for call, message in REFUSED:
            with pytest.raises(CodeError, match=message):
                await interpreter.execute(call)


async def test_ten_thousand_steps_are_recorded_and_one_more_is_refused() -> None:
    """Check the host's count alone, because code that sends all of these reports takes ten seconds."""
    reports = Reports()
    for step in range(10_000):
        await reports.add(step, step)
    with pytest.raises(ValueError, match="this execution already made 10,000 reports: report less often, such"):
        await reports.add(0, 10_000)
    assert not await reports.add(0, 3)
    assert len(reports.values) == 10_000


ENDINGS = {
    "a bare except": "for step in range(9):\n    try:\n        report(1, step)\n    except:\n        pass\nSUBMIT(x=1)",
    "a thread": """
    import threading, time
    thread = threading.Thread(target=lambda: [report(1, step) for step in range(99)])
    thread.start()
    time.sleep(1000)
    SUBMIT(x=1)
    """,
    "an event loop": """
    import asyncio
    async def train():
        for step in range(99):
            report(1, step)
            await asyncio.sleep(0)
    asyncio.run(train())
    """,
}


async def test_pruning_ends_the_execution_wherever_it_reports(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        for name, code in ENDINGS.items():
            result = await interpreter.execute(dedent(code), should_prune=lambda step, _value: step == 3)
            assert (result.outputs, result.meta.pruned, len(result.meta.reports)) == ({}, True, 4), name


async def test_a_prepared_context_survives_pruning_and_reports_again(provider: SandboxProvider) -> None:
    prepare = Preparation("def train(call):\n    for step in range(9):\n        call(1, step)", 60, None)
    async with provider.interpreter(timeout=HANG_SECONDS, prepare=prepare) as interpreter:
        first = await interpreter.execute(
            "x = 7\ntrain(report)", context="c", should_prune=lambda step, _value: step == 1
        )
        second = await interpreter.execute("report(2, 0)\nSUBMIT(x=x)", context="c")
    assert first.meta.pruned
    assert (second.x, second.meta.reports, second.meta.pruned) == (7, ((0, 2.0),), False)


async def test_a_tool_or_variable_named_report_replaces_ours(provider: SandboxProvider) -> None:
    calls: list[str] = []
    result = await run(provider, "report('of mine')\nSUBMIT()", tools={"report": calls.append})
    assert (calls, result.meta.reports) == (["of mine"], ())
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        assert (await interpreter.execute("SUBMIT(y=report)", {"report": 3})).y == 3


@pytest.mark.full
async def test_an_execution_that_ignores_pruning_is_killed(provider: SandboxProvider) -> None:
    code = "try:\n    report(1, 0)\nfinally:\n    import time; time.sleep(1000)"
    assert (await run(provider, code, lambda _step, _value: True)).meta.pruned
