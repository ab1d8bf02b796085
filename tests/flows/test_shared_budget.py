"""A budget that several flow runs and interpreters share, also in several processes."""

import asyncio
import json
import math
import subprocess
import sys
import time

import pytest

from rlm_batch import Budget, BudgetExceeded, ConfigurationError, LocalInterpreter, batch, rlm
from rlm_batch.sandbox.queries.budget import Usage
from rlm_batch.sandbox.queries.shared_budget import SharedBudget

from ..infra.scripted_turns import MARK, format_turn
from ..infra.waiting import HANG_SECONDS
from ..standins.openai_chat import Reply

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("openai")]

NAME = "openai/gpt-4o-mini"
ASK_ALL = """
count, said = 0, ""
try:
    while True:
        llm_query(f"{n} {count}")
        count += 1
except BudgetExceeded as error:
    said = str(error)
SUBMIT(count=count, said=said)
"""
PROGRAM = f"""
import sys
from rlm_batch import LocalInterpreter
with LocalInterpreter(language_model={NAME!r}, max_llm_calls=None, budget=sys.argv[1]) as interpreter:
    result = interpreter.execute({ASK_ALL!r}, {{"n": int(sys.argv[2])}})
    print(result.count)
"""


def test_a_budget_keeps_what_is_used_and_takes_new_limits(tmp_path):
    path = tmp_path / "team.json"
    budget = Budget(max_cost=1, path=path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "usage": {"calls": 3, "cost": 0.5}}))
    assert (budget.usage.calls, budget.usage.cost) == (3, 0.5)
    assert Budget(max_cost=2, path=path).usage.calls == 3
    Budget(path=path)
    assert json.loads(path.read_text())["max_cost"] == 2
    with pytest.raises(ConfigurationError, match="max_cost"):
        Budget(max_cost=-1)
    with pytest.raises(ConfigurationError, match="max_cost: Input should be a finite number"):
        Budget(max_cost=math.nan)
    with pytest.raises(ConfigurationError, match="No such file"):
        Budget(path=tmp_path / "missing" / "team.json")
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"team\.json is not valid"):
        Budget(path=path)


async def test_flows_and_interpreters_share_the_calls_of_a_budget(chat):
    budget = Budget(max_llm_calls=20)
    inputs = [{"n": 0}, {"n": 1}]
    runs = [batch(ASK_ALL, inputs=inputs, language_model=NAME, max_llm_calls=None, budget=budget) for _ in range(2)]
    results = [result for run in await asyncio.gather(*runs) for result in run]
    assert sum(result.count for result in results) == 20 == chat.stats.requests == budget.usage.calls
    assert all("of the model are used up" in result.said for result in results)
    with LocalInterpreter(language_model=NAME, budget=budget) as interpreter:
        assert interpreter.execute(ASK_ALL, {"n": 2}).count == 0
    Budget(max_llm_calls=22, path=budget.path)
    with LocalInterpreter(language_model=NAME, budget=budget) as interpreter:
        assert interpreter.execute(ASK_ALL, {"n": 2}).count == 2


async def test_questions_of_two_runs_leave_each_other_the_last_turn(chat):
    def script(request):
        if MARK not in request.text:
            return Reply("yes", delay=0.01)
        is_last = "allows one more reply" in request.text
        return format_turn("SUBMIT(1)" if is_last else "for n in range(99): llm_query(str(n))")

    chat.script = script
    budget = Budget(max_llm_calls=30)
    runs = [rlm(f"question {n}", NAME, max_llm_calls=None, budget=budget, on_failure="return") for n in range(3)]
    answers = await asyncio.gather(*runs)
    assert [answer.value for answer in answers] == [1, 1, 1]
    assert chat.stats.requests == budget.usage.calls == 30


def test_processes_share_a_budget_to_the_call(chat, tmp_path):
    budget = Budget(max_llm_calls=40, path=tmp_path / "team.json")
    chat.delay = 0.002
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, budget.path, str(n)], stdout=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    counts = [int(process.communicate(timeout=4 * HANG_SECONDS)[0]) for process in processes]
    print(counts)
    assert sum(counts) == 40 == chat.stats.requests == budget.usage.calls


def test_the_calls_of_a_killed_process_are_free_again(tmp_path):
    budget = Budget(max_llm_calls=1, path=tmp_path / "team.json")
    code = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from rlm_batch.sandbox.queries.shared_budget import SharedBudget\n"
        "asyncio.run(SharedBudget(Path(sys.argv[1])).reserve()); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(budget.path)], check=False, timeout=HANG_SECONDS)
    assert json.loads(budget.path.read_text())["runs"]

    async def reserve() -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await SharedBudget(budget.path).reserve()

    asyncio.run(reserve())


@pytest.mark.parametrize(("age", "is_free"), [(7200, True), (0, False)])
async def test_the_calls_before_a_reboot_are_free_after_an_hour(tmp_path, age, is_free):
    budget = Budget(max_llm_calls=1, path=tmp_path / "team.json")
    run = {"process": f"{'0' * 32}.1.2.3", "changed_at": time.time() - age, "reserved": [[0, 0, 0, 0]], "kept": []}
    budget.path.write_text(json.dumps({**json.loads(budget.path.read_text()), "runs": {"lost": run}}))
    shared = SharedBudget(budget.path)
    reservation = asyncio.create_task(shared.reserve())
    await asyncio.sleep(0)
    assert reservation.done() == is_free
    reservation.cancel()


async def test_a_limit_of_dollars_after_calls_without_a_price_is_refused(tmp_path):
    budget = Budget(path=tmp_path / "team.json")
    settle = await SharedBudget(budget.path).reserve()
    settle(Usage(calls=1, cost=None))
    Budget(max_cost=5, path=budget.path)
    with pytest.raises(BudgetExceeded, match="without a price"):
        await SharedBudget(budget.path).reserve()


async def test_the_answer_of_a_call_is_not_lost_with_the_file(tmp_path):
    budget = Budget(path=tmp_path / "team.json")
    shared = SharedBudget(budget.path)
    settle = await shared.reserve()
    budget.path.unlink()
    settle(Usage(calls=1))
    with pytest.raises(ConfigurationError, match="No such file"):
        await shared.reserve()
