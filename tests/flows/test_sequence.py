"""The sequence flow."""

import math

import pytest

from rlm_batch import (
    CodeCrashed,
    CodeError,
    DeadlineExceeded,
    ExecutionsFailed,
    NotRun,
    StateLost,
    sequence,
)

pytestmark = pytest.mark.anyio

FACTORIALS = ["import math\nbase = 10\nSUBMIT(task=0, value=math.factorial(base))"] + [
    f"SUBMIT(task={i}, value=math.factorial(base + {i}))" for i in range(1, 5)
]


async def test_the_fifth_step_sees_definitions_of_the_first():
    results = await sequence(FACTORIALS)
    assert [result.value for result in results] == [math.factorial(n) for n in range(10, 15)]
    assert [result.task for result in results] == [0, 1, 2, 3, 4]
    assert len({result.meta.sandbox_id for result in results}) == 1
    assert [result.meta.index for result in results] == [0, 1, 2, 3, 4]


async def test_no_step_runs_after_a_failed_one():
    steps = ["x = 1", "raise ValueError('broken')", "open('/dev/null').read(); SUBMIT(x=x)", "SUBMIT(x=x)"]
    with pytest.raises(
        ExecutionsFailed, match="1 of 4 steps failed and 2 did not run, the first is number 1: CodeError"
    ) as ended:
        await sequence(steps)
    first, failed, *rest = ended.value.results
    assert first.meta.index == 0
    assert isinstance(failed.error, CodeError)
    assert [type(failure.error) for failure in rest] == [NotRun, NotRun]
    assert "step 1 failed" in str(rest[0].error)


async def test_without_stop_on_error_the_next_step_continues_with_the_state():
    steps = ["x = [1]", "x.append(2); raise ValueError('broken')", "SUBMIT(x=x)"]
    _, failed, last = await sequence(steps, stop_on_error=False, on_failure="return")
    assert isinstance(failed.error, CodeError)
    assert last.x == [1, 2]


@pytest.mark.parametrize("stop_on_error", [True, False])
async def test_a_step_that_kills_the_interpreter_reports_lost_state(stop_on_error):
    steps = ["x = 1", "import os; os._exit(3)", "SUBMIT(x=x)", "SUBMIT(x=x)"]
    outcomes = await sequence(steps, stop_on_error=stop_on_error, on_failure="return")
    assert isinstance(outcomes[1].error, CodeCrashed)
    assert "The state of earlier executions is lost" in str(outcomes[1].error)
    rest = [type(outcome.error) for outcome in outcomes[2:]]
    assert rest == ([NotRun, NotRun] if stop_on_error else [StateLost, StateLost])


@pytest.mark.usefixtures("short_delays")
async def test_no_later_step_runs_after_the_sandbox_is_lost():
    kill = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)"
    _, lost, after = await sequence(
        ["x = 1", kill, "SUBMIT(y=2)"],
        provider="local:none",
        idempotent=True,
        stop_on_error=False,
        on_failure="return",
    )
    assert isinstance(lost.error, StateLost)
    assert isinstance(after.error, StateLost)


async def test_a_deadline_applies_to_the_whole_sequence():
    late = await sequence(["import time; time.sleep(1000)", "SUBMIT(x=3)"], deadline=1, on_failure="return")
    assert [type(failure.error) for failure in late] == [DeadlineExceeded, DeadlineExceeded]


@pytest.mark.full
async def test_a_failed_step_is_retried_on_the_same_state_only_on_request():
    steps = ["tries = []", "tries.append(1)\nassert len(tries) == 2\nSUBMIT(tries=len(tries))"]
    _, failed = await sequence(steps, on_failure="return")
    assert isinstance(failed.error, CodeError)
    _, again = await sequence(steps, retry_code_errors=True)
    assert (again.tries, again.meta.attempt) == (2, 2)


@pytest.mark.full
async def test_a_resumed_sequence_restarts_unless_it_is_complete(tmp_path):
    ledger, mark = str(tmp_path / "ledger"), tmp_path / "mark"
    steps = [
        "import os; name = os.urandom(8).hex(); SUBMIT(name=name)",
        f"import pathlib; assert pathlib.Path({str(mark)!r}).exists()",
        "SUBMIT(name=name)",
    ]
    first = await sequence(steps, provider="local:none", results_path=ledger, on_failure="return")
    assert isinstance(first[2].error, NotRun)
    mark.touch()
    whole = await sequence(steps, provider="local:none", results_path=ledger)
    assert whole[0].name == whole[2].name != first[0].name
    mark.unlink()
    again = await sequence(steps, provider="local:none", results_path=ledger)
    assert [again[0].name, again[2].name] == [whole[0].name, whole[2].name]
