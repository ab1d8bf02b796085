"""Errors are not failures: what a check sees of them, and how rates count them."""

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import Failure, batch, load_report

from ...infra.waiting import wait_until_async

pytestmark = pytest.mark.anyio

# The samples of 12 inputs: + passes, - is wrong, x calls SystemExit, t runs into the timeout, c crashes, l is lost.
SAMPLES = ("+++++", "++++-", "+++-t", "++-tl", "+x-tc", "---x-", "++ltl", "-+-+t", "tt++-", "c+++-", "+-+cl", "++l++")
CODE = """
import os, time
if sample == "t": time.sleep(1000)
if sample == "c": os.abort()
if sample == "x": raise SystemExit
if sample == "l":
    with open(f"{folder_of_lost}/{number}.new", "w") as file: file.write(str(os.getppid()))
    os.rename(f"{folder_of_lost}/{number}.new", f"{folder_of_lost}/{number}")
    time.sleep(1000)
SUBMIT(answer=sample)
"""
CHECK = "SUBMIT(passed=submitted.get('answer') == '+', kind=error and error['type'])"


async def test_sixty_samples_with_time_outs_lost_sandboxes_and_crashes_are_counted_as_by_hand(tmp_path: Path) -> None:
    text = "".join(SAMPLES)
    by_hand = {sample: text.count(sample) for sample in "+-xtcl"}
    assert by_hand == {"+": 30, "-": 13, "x": 2, "t": 7, "c": 3, "l": 5}
    inputs = [{"task": number // 5, "number": number, "sample": sample} for number, sample in enumerate(text)]
    folder = tmp_path / "lost"
    folder.mkdir()
    for variables in inputs:
        variables["folder_of_lost"] = str(folder)
    options: dict[str, Any] = {"provider": "local:none", "max_workers": 8, "timeout": 4, "retries": 0}
    options |= {"check": CHECK, "on_failure": "return", "results_path": str(tmp_path / "results")}
    run = asyncio.create_task(batch(CODE, inputs, **options))
    for number in [number for number, sample in enumerate(text) if sample == "l"]:
        await wait_until_async((folder / str(number)).exists)
        os.kill(int((folder / str(number)).read_text()), signal.SIGKILL)
    outcomes = await run

    lost = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [text[outcome.meta.index or 0] for outcome in lost] == ["l"] * 5
    kinds = {"+": None, "-": None, "x": None, "t": "ExecutionTimeout", "c": "CodeCrashed"}
    for outcome, sample in zip(outcomes, text, strict=True):
        if sample != "l":
            assert outcome.outputs == {"passed": sample == "+", "kind": kinds[sample]}

    report = load_report(str(tmp_path / "results"))
    counts = "30 of 60 executions passed, 25 did not pass, 5 failed (5 did not run to the end)"
    assert report.summary().splitlines()[0] == counts
    for k in (1, 2, 3):
        # The definition: of all choices of k samples of an input, count those with a pass, and those that all pass.
        any_passed: list[float] = []
        all_passed: list[float] = []
        for samples in SAMPLES:
            choices = [*itertools.combinations(samples.replace("l", ""), k)]
            any_passed.append(sum("+" in choice for choice in choices) / len(choices))
            all_passed.append(sum(set(choice) == {"+"} for choice in choices) / len(choices))
        estimate, hat = report.pass_at_k(k, by="task"), report.pass_hat_k(k, by="task")
        assert estimate.value == pytest.approx(sum(any_passed) / 12)
        assert hat.value == pytest.approx(sum(all_passed) / 12)
        assert (estimate.inputs, estimate.samples, estimate.unfinished) == (12, 55, 5)
        assert str(estimate).endswith("12 inputs, 55 samples, 10 failed, without 5 that did not run to the end)")
    # Of the 12 inputs, these shares of the samples that ran to the end passed.
    shares = [5 / 5, 4 / 5, 3 / 5, 2 / 4, 1 / 5, 0 / 5, 2 / 3, 2 / 5, 2 / 5, 3 / 5, 2 / 4, 4 / 4]
    assert report.pass_at_k(1, by="task").value == pytest.approx(sum(shares) / 12)


async def test_a_check_finds_the_type_of_each_error() -> None:
    codes = ["1 / 0", "x = (", "raise SystemExit(3)", "SUBMIT(x=1j)", "import os; os.abort()", "x = 'a' * 10**12"]
    check = "SUBMIT(error=error['error'], type=error['type'], line=error['line'], has_message=error['message'] != '')"
    results = await batch(codes, check=check)
    found = [(result.error, result.type, result.line) for result in results]
    assert found == [
        ("CodeError", "ZeroDivisionError", 1),
        ("CodeSyntaxError", "SyntaxError", 1),
        ("CodeCrashed", "SystemExit", 1),
        ("SubmitError", "SubmitError", None),
        ("CodeCrashed", "CodeCrashed", None),
        ("CodeCrashed", "OutOfMemory", 1),
    ]
    assert all(result.has_message for result in results)
    assert [result.meta.judged["error"]["type"] for result in results if result.meta.judged] == [
        kind for _, kind, _ in found
    ]


async def test_samples_that_call_system_exit_did_not_pass() -> None:
    codes = ["SUBMIT(passed=True)", "raise SystemExit", "raise SystemExit(3)", "import sys; sys.exit('no')"]
    samples = await batch(codes, on_failure="return")
    assert samples.pass_at_k(1, by=[]).value == 0.25
    judged = await batch(codes, check="SUBMIT(passed=submitted.get('passed', False))")
    assert judged.pass_at_k(1, by=[]).value == 0.25
    assert judged.summary() == "1 of 4 executions passed, 3 did not pass"


async def test_an_exception_that_is_named_like_an_error_keeps_its_class() -> None:
    code = "class ExecutionTimeout(Exception): pass\nraise ExecutionTimeout('no')"
    (result,) = await batch([code], check="SUBMIT(type=error['type'], error=error['error'])")
    assert (result.type, result.error) == ("ExecutionTimeout", "CodeError")
