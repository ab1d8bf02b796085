"""Another check over stored outcomes: the code does not run again, and no stored verdict becomes a result."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, Failure, batch, check, chunks, load_report, sweep

pytestmark = pytest.mark.anyio


async def run_counted(tmp_path: Path, check: str | None, code: str, **options: Any) -> tuple[list[Any], int]:
    """Run the code with three inputs, and return the outcomes and the number of executions of all runs so far."""
    ran = tmp_path / "ran"
    ran.touch()
    options = {"provider": "local:none", "on_failure": "return", "results_path": str(tmp_path / "ledger"), **options}
    inputs = [{"x": x, "ran": str(ran)} for x in range(3)]
    outcomes = await batch(f"open(ran, 'a').write('x')\n{code}", inputs, check=check, **options)
    return list(outcomes), len(ran.read_text())


async def test_another_check_gets_all_that_the_code_did(tmp_path: Path) -> None:
    code = "print('printed', x)\nif x == 1: 1 / 0\nSUBMIT(y=float('nan') if x else 0)"
    first = "SUBMIT(passed=False)"
    second = "SUBMIT(y=str(submitted.get('y')), stdout=stdout, error=error and error['type'], timed=seconds > 0)"
    await run_counted(tmp_path, first, code)
    outcomes, count = await run_counted(tmp_path, second, code)
    assert count == 3
    assert [outcome.outputs for outcome in outcomes] == [
        {"y": "0", "stdout": "printed 0\n", "error": None, "timed": True},
        {"y": "None", "stdout": "printed 1\n", "error": "ZeroDivisionError", "timed": True},
        {"y": "nan", "stdout": "printed 2\n", "error": None, "timed": True},
    ]
    report = load_report(str(tmp_path / "ledger"))
    assert [outcome.meta.judged["error"] is None for outcome in report if outcome.meta.judged] == [True, False, True]
    outcomes, count = await run_counted(tmp_path, first, code)
    assert ([outcome.passed for outcome in outcomes], count) == ([False] * 3, 3)  # The first verdicts are still there.


async def test_a_first_check_judges_a_run_without_one_but_runs_failed_code_again(tmp_path: Path) -> None:
    code = "if x == 1: 1 / 0\nSUBMIT(y=x)"
    await run_counted(tmp_path, None, code)
    outcomes, count = await run_counted(tmp_path, "SUBMIT(passed=submitted == {'y': x})", code)
    assert ([outcome.passed for outcome in outcomes], count) == ([True, False, True], 4)


async def test_another_check_finds_outcomes_of_other_ledgers_too(tmp_path: Path, results: Path) -> None:
    options: Any = {"results_path": None, "cache_results": True}
    await run_counted(tmp_path, "SUBMIT(passed=True)", "SUBMIT(y=x)", **options)
    outcomes, count = await run_counted(tmp_path, "SUBMIT(passed=submitted['y'] < 2)", "SUBMIT(y=x)", **options)
    assert ([outcome.passed for outcome in outcomes], count) == ([True, True, False], 3)


async def test_a_check_that_reads_files_needs_collected_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = "open('answer.txt', 'w').write(str(x))\nSUBMIT(y=x)"
    first = "SUBMIT(passed=True)"
    second = "SUBMIT(text=open(folder + '/answer.txt').read())"
    await run_counted(tmp_path, first, code)
    caplog.clear()
    outcomes, count = await run_counted(tmp_path, second, code)
    assert ([outcome.text for outcome in outcomes], count) == (["0", "1", "2"], 6)
    assert caplog.text.count("the check reads `folder`, so code runs again for it: the run has no `collect`") == 1
    await run_counted(tmp_path, second, code)
    assert caplog.text.count("so code runs again") == 1  # Nothing ran.
    await run_counted(tmp_path, first, code, collect=["*.txt"])
    outcomes, count = await run_counted(tmp_path, second, code, collect=["*.txt"])
    assert ([outcome.text for outcome in outcomes], count) == (["0", "1", "2"], 9)


async def test_another_check_of_chunks_runs_no_chunk(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('x')\nSUBMIT(total=sum(data))"
    options: Any = {"data": [1, 2, 3], "chunk_size": 2, "provider": "local:none", "results_path": str(tmp_path / "l")}
    await chunks(code, check="SUBMIT(passed=False)", **options)
    report = await chunks(code, check="SUBMIT(passed=submitted['total'] == sum(data))", **options)
    assert [result.passed for result in report] == [True, True]
    assert ran.read_text() == "xx"


async def test_the_flow_judges_a_stored_run_and_leaves_its_results(tmp_path: Path) -> None:
    code = "print('printed', x)\nif x == 1: 1 / 0\nSUBMIT(y=x)"
    await run_counted(tmp_path, "SUBMIT(passed=True)", code)
    ledger, judge = str(tmp_path / "ledger"), "SUBMIT(passed=submitted.get('y') == x, type=error and error['type'])"
    report = await check(ledger, judge)
    expected = [{"passed": True, "type": None}, {"passed": False, "type": "ZeroDivisionError"}]
    assert [outcome.outputs for outcome in report] == [*expected, {"passed": True, "type": None}]
    assert [outcome.meta.variables["x"] for outcome in report] == [0, 1, 2]
    assert [outcome.meta.stdout for outcome in report] == [f"printed {x}\n" for x in range(3)]
    assert report.summary() == "2 of 3 executions passed, 1 did not pass"
    assert (tmp_path / "ran").read_text() == "xxx"
    assert [outcome.passed for outcome in load_report(ledger)] == [True, True, True]
    # The report is in a ledger of its own, which can be judged again, too.
    stored = load_report(report.results_path)
    assert [outcome.outputs for outcome in stored] == [outcome.outputs for outcome in report]
    again = await check(report.results_path, judge.replace("passed", "right"))
    assert [outcome.right for outcome in again] == [True, False, True]
    with pytest.raises(ConfigurationError, match="`results_path` is the judged run's own"):
        await check(ledger, judge, results_path=ledger)


async def test_what_never_ran_is_not_judged_and_stays_a_failure(tmp_path: Path) -> None:
    await run_counted(tmp_path, None, "import os\nif x == 1: os.kill(os.getppid(), 9); input()\nSUBMIT(y=x)")
    report = await check(str(tmp_path / "ledger"), "SUBMIT(passed=True)", on_failure="return")
    assert [type(outcome).__name__ for outcome in report] == ["Result", "Failure", "Result"]
    assert str(report.pass_at_k(1, by=[])).endswith("2 samples, without 1 that did not run to the end)")


def test_a_report_is_judged_by_a_function_with_files_and_resumes(tmp_path: Path) -> None:
    def judge(x: int, folder: str) -> dict[str, Any]:
        with open(f"{folder}/out.txt") as file:
            return {"passed": file.read() == str(x)}

    code = "open('out.txt', 'w').write(str(min(x, 1)))"
    inputs = [{"x": x} for x in range(3)]
    results = batch.sync(code, inputs, collect=["*.txt"])
    report = results.check(judge, results_path=str(tmp_path))
    assert [outcome.passed for outcome in report] == [True, True, False]
    lines = sum(len(part.read_text().splitlines()) for part in tmp_path.glob("part-*.jsonl"))
    again = results.check(judge, results_path=str(tmp_path))
    assert [outcome.passed for outcome in again] == [True, True, False]
    assert sum(len(part.read_text().splitlines()) for part in tmp_path.glob("part-*.jsonl")) == lines  # Nothing ran.
    without_files = batch.sync(code, inputs)
    with pytest.raises(ConfigurationError, match="has no collected files on this machine: run it with `collect`"):
        without_files.check(judge)


async def test_a_sweep_gets_its_best_trial_from_another_check() -> None:
    report = await sweep("SUBMIT(loss=x)", grid={"x": [3, 1, 2]}, objective="loss")
    judged = await check(report.results_path, "SUBMIT(loss=-submitted['loss'])")
    assert judged.best.meta.variables == {"x": 3}


async def test_chunks_are_judged_without_their_reduction() -> None:
    reduce = "SUBMIT(total=sum(fields['total'] for fields in results.values()))"
    report = await chunks("SUBMIT(total=sum(data))", data=[1, 2, 3], chunk_size=2, reduce=reduce)
    judged = await check(report.results_path, "SUBMIT(passed=submitted['total'] == 3)")
    assert [outcome.passed for outcome in judged] == [True, True]


async def test_no_forged_line_becomes_a_pass(tmp_path: Path) -> None:
    """Lines that a sample with access to the ledger could write, with the key of its execution but not of a check."""
    code, answer = "SUBMIT(answer='wrong')", "only the check knows"
    await run_counted(tmp_path, "SUBMIT(passed=False)", code, collect=["*.txt"])
    (part,) = (tmp_path / "ledger").glob("part-*.jsonl")
    secret = tmp_path / "secret.txt"
    secret.write_text(answer)
    (tmp_path / "ledger" / "files" / "7").mkdir(parents=True)
    (tmp_path / "ledger" / "files" / "7" / "answer.txt").symlink_to(secret)
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    forgeries: list[dict[str, Any]] = [
        {"outputs": {"passed": True}},
        {"outputs": {"passed": True}, "judged": None},
        {"outputs": {"passed": True}, "judged": {"outputs": {"passed": True}, "submitted": True, "error": None}},
        {"judged": {"outputs": {"passed": True}, "submitted": "yes?", "error": None}},
        {"judged": {"outputs": 5, "submitted": True, "error": None}},
        {"judged": {"outputs": {}, "submitted": True, "error": {"error": ["CheckError"], "text": 5}}},
        {"judged": {"outputs": {}, "submitted": True, "error": {"error": "Nothing", "text": "passed"}}},
        {"judged": {}},
        {"collected": [str(secret)]},
        {"collected": [str(tmp_path / "ledger" / "files" / "7" / "answer.txt")]},
        {"collected": [str(tmp_path / "ledger" / "files" / "7" / ".." / ".." / ".." / "secret.txt")]},
        {"collected": [str(tmp_path / "ledger" / "files")]},
    ]
    check = f"""
import os
path = folder + "/answer.txt"
texts = [open(folder + "/" + name).read() for name in os.listdir(folder)]
SUBMIT(passed=submitted.get("answer") == {answer!r} or {answer!r} in texts)
"""
    for number, forgery in enumerate(forgeries):
        for line in lines:
            forged = json.loads(json.dumps(line))
            forged["at"] += 1 + number
            forged["outputs"] = forgery.get("outputs", forged["outputs"])
            forged["meta"] |= {name: value for name, value in forgery.items() if name != "outputs"}
            if forgery.get("judged", 0) is None:
                forged["key"] = forged["unchecked_key"]
            part.write_text(part.read_text() + json.dumps(forged) + "\n")
        outcomes, _ = await run_counted(tmp_path, f"{check}# {number}", code, collect=["*.txt"])
        assert [outcome.outputs for outcome in outcomes] == [{"passed": False}] * 3, forgery


async def test_the_flow_judges_forged_lines_and_takes_no_verdict_from_them(tmp_path: Path) -> None:
    await run_counted(tmp_path, None, "SUBMIT(answer='wrong')")
    (part,) = (tmp_path / "ledger").glob("part-*.jsonl")
    honest = part.read_text()
    verdict: dict[str, Any] = {"passed": True}
    judged = {"outputs": {"answer": "wrong"}, "submitted": True, "error": None, "check_seconds": 0.1}
    names = {"submitted": {"answer": "right"}, "folder": "/", "error": None, "stdout": "right", "SUBMIT": "x"}
    forgeries: list[dict[str, Any]] = [
        {"outputs": verdict},
        {"outputs": verdict, "meta": {"judged": judged}},
        {"outputs": verdict, "meta": {"judged": {}}},
        {"outputs": verdict, "meta": {"judged": {"outputs": verdict}}},
        {"outputs": verdict, "meta": {"judged": {**judged, "error": {"error": "NotRun", "text": "x"}}}},
        {"outputs": verdict, "meta": {"judged": {**judged, "error": {"error": {}, "text": "x"}}}},
        {"outputs": verdict, "meta": {"judged": {**judged, "error": []}}},
        {"outputs": verdict, "meta": {"pruned": True}},
        {"outputs": verdict, "meta": {"exited": True, "submitted": False}},
        {"outputs": verdict, "meta": {"variables": names}},
        {"outputs": verdict, "meta": {"sandbox_id": "", "stdout": "right"}},
        {"outputs": verdict, "unchecked_key": "0" * 64, "key": "1" * 64},
    ]
    for forgery in forgeries:
        text = honest
        for line in map(json.loads, honest.splitlines()):
            forged = {**line, **forgery, "at": line["at"] + 1, "meta": line["meta"] | forgery.get("meta", {})}
            text += json.dumps(forged) + "\n"
        part.write_text(text)
        report = await check(
            str(tmp_path / "ledger"), "SUBMIT(passed=submitted.get('answer') == 'right')", on_failure="return"
        )
        passed = [outcome for outcome in report if not isinstance(outcome, Failure) and outcome.passed]
        assert (passed, len(report)) == ([], 3), forgery
    part.write_text(honest.replace('"index":2', '"index":99999999999'))
    with pytest.raises(ConfigurationError, match="has an execution with the number 99,999,999,999"):
        await check(str(tmp_path / "ledger"), "SUBMIT(passed=True)")
