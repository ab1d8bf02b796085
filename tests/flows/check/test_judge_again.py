"""Another check over stored outcomes: the code does not run again, and no stored verdict becomes a result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, Failure, batch, check, chunks, load_report, sweep

from .forgeries import IMITATIONS

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


async def test_nothing_that_code_leaves_in_a_ledger_is_read_as_a_verdict(tmp_path: Path) -> None:
    ledger, codes = tmp_path / "ledger", list(IMITATIONS.values())
    options: dict[str, Any] = {"results_path": str(ledger), "collect": ["**"], "on_failure": "return"}
    answer = "submitted.get('answer') == 'only the check knows'"
    for check_code in ("SUBMIT(passed=False)", f"import os\nSUBMIT(passed={answer} or not os.path.isdir(folder))"):
        results = await batch(codes, check=check_code, **options)
        outcomes = {name: getattr(result, "outputs", result) for name, result in zip(IMITATIONS, results, strict=True)}
        assert outcomes == {name: {"passed": False} for name in IMITATIONS}
    lines = [line for part in ledger.glob("part-*.jsonl") for line in part.read_bytes().splitlines()]
    assert len(lines) == 2 * len(codes), "each outcome is one line, for each check"
    report = await check(str(ledger), f"SUBMIT(passed={answer})")
    assert [result.outputs for result in report] == [{"passed": False}] * len(codes)
    assert [result.outputs for result in load_report(str(ledger))] == [{"passed": False}] * len(codes)


VERDICT: dict[str, Any] = {"passed": True}
FACTS: dict[str, Any] = {"outputs": {"answer": "wrong"}, "submitted": True, "error": None}
# Changes of a stored line, by what they try.
FORGED_FIELDS: dict[str, dict[str, Any]] = {
    "a status that does not exist": {"status": "passed"},
    "the line of a trial": {"status": "asked"},
    "the line of a model's usage": {"status": "usage"},
    "a bool as number": {"index": True},
    "a number before the first": {"index": -1},
    "a text as number": {"index": "0"},
    "a number that no list has": {"index": 2**70},
    "a second key of one number": {"key": "2" * 64},
    "a bool as version": {"version": True},
    "an error beside the fields": {"error": {"error": "CheckError", "text": "passed"}},
    "numbers that become text": {"outputs": {"answer": None}, "nonfinite": {"/answer": "right"}},
    "numbers in judged facts": {"meta": {"judged": FACTS, "judged_nonfinite": {"/judged/outputs/answer": "right"}}},
    "numbers elsewhere in the meta": {"meta": {"judged": FACTS, "judged_nonfinite": {"/stdout": "inf"}}},
    "a group that no run has": {"meta": {"group": 2**40, "repeat": 2**40}},
    "a group before the first": {"meta": {"group": -1, "repeat": -1}},
    "a chunk": {"meta": {"variables": {"chunk_id": "0"}}},
    "variables with the names of a verdict": {
        "outputs": {},
        "meta": {"variables": {"passed": True, "answer": "right"}},
    },
    "variables that replace builtins": {"meta": {"variables": {"__builtins__": {}}}},
    "an error with types of no error": {
        "meta": {"judged": {**FACTS, "error": {"error": "CodeError", "text": "x", "type": {}, "line": "x"}}}
    },
    "facts of an earlier check": {"meta": {"judged": {**FACTS, "again": True, "outputs": VERDICT}}},
    "facts in a list": {"meta": {"judged": [FACTS]}},
    "fields as pairs": {"outputs": [["passed", True]]},
    "fields as null": {"outputs": None},
    "a number as output": {"meta": {"stdout": 5, "seconds": -1}},
    "files of the machine": {"meta": {"collected": ["../../etc/passwd", "/etc/passwd"]}},
    "usage of no model": {"meta": {"queries": {"asked": "many", "tree": [5]}}},
}
# Lines that a reader of JSON or of lines could take for others.
FORGED_TEXTS: dict[str, Callable[[str, str], str]] = {
    "a name twice": lambda line, _: line[:-1] + ',"outputs":{"passed":true}}',
    "facts twice": lambda line, _: line[:-1] + ',"meta":{"judged":{"outputs":{"answer":"right"}}}}',
    "two values in a line": lambda line, forged: line + forged,
    "a separator of lines": lambda line, forged: f"{line}\x85{forged}\u2028{forged}",
    "a byte order mark": lambda _, forged: "\ufeff" + forged,
    "a NUL": lambda _, forged: "\0" + forged,
    "a list": lambda _, forged: f"[{forged}]",
    "a time that is no number": lambda _, forged: forged.replace('"at": ', '"at": NaN, "was": '),
    "a time after all others": lambda _, forged: forged.replace('"at": ', '"at": Infinity, "was": '),
    "an escaped name": lambda _, forged: forged.replace('"outputs"', '"\\u006futputs"'),
}


async def test_no_forged_line_of_any_kind_is_a_verdict_or_hides_an_execution(tmp_path: Path) -> None:
    names, ledger = [*FORGED_FIELDS, *FORGED_TEXTS], tmp_path / "ledger"
    inputs = [{"x": x} for x in range(len(names))]
    await batch("SUBMIT(answer='wrong')", inputs, check="SUBMIT(passed=False)", results_path=str(ledger))
    (part,) = ledger.glob("part-*.jsonl")
    text = part.read_text()
    for line in map(json.loads, part.read_text().splitlines()):
        name = names[line["index"]]
        changes = {"outputs": VERDICT, **FORGED_FIELDS.get(name, {})}
        later = {**line, "at": line["at"] + 1}
        forged = json.dumps({**later, **changes, "meta": line["meta"] | changes.get("meta", {})})
        text += FORGED_TEXTS.get(name, lambda _, forged: forged)(json.dumps(later), forged) + "\n"
    part.write_text(text)
    report = await check(str(ledger), "SUBMIT(passed=submitted.get('answer') == 'right')", on_failure="return")
    assert [outcome.meta.index for outcome in report] == list(range(len(names)))
    passed = [outcome.meta.index for outcome in report if not isinstance(outcome, Failure) and outcome.passed]
    assert [names[index or 0] for index in passed] == []
