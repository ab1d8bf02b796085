"""The `check` parameter: code that judges each execution, and whose fields are the result."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    CheckError,
    ConfigurationError,
    Failure,
    LocalSandbox,
    OutcomeUnknown,
    VolumeError,
    batch,
    chunks,
    load_report,
    sweep,
)
from rlm_batch.blocks.local.handle import LocalSandboxHandle
from rlm_batch.sandbox.outcomes.outcome_json import get_status
from rlm_batch.tasks.ledger.ledger import Ledger

pytestmark = pytest.mark.anyio

SQUARE = "SUBMIT(y=x * x if x < 2 else 0, passed=True)"
IS_SQUARE = "SUBMIT(passed=submitted.get('y') == x * x)"


def inputs(count: int) -> list[dict[str, Any]]:
    return [{"x": x} for x in range(count)]


async def test_the_fields_are_the_checks_and_the_ledger_has_both(tmp_path):
    results = await batch(SQUARE, inputs(3), check=IS_SQUARE, results_path=str(tmp_path))
    assert [result.outputs for result in results] == [{"passed": True}, {"passed": True}, {"passed": False}]
    lines = sorted(Ledger(tmp_path).read_lines(), key=lambda line: line.data["index"])
    assert [line.data["outputs"]["passed"] for line in lines] == [True, True, False]
    assert [line.data["meta"]["judged"]["outputs"] for line in lines] == [
        {"y": 0, "passed": True},
        {"y": 1, "passed": True},
        {"y": 0, "passed": True},
    ]
    report = load_report(str(tmp_path))
    assert report.rows()[0] == ["", "x", "passed", ""]
    assert report.results[2].meta.judged == results[2].meta.judged
    assert str(report.pass_at_k(1, by="x")) == "pass@1 = 0.667 (95 %: 0.159 to 0.955; 3 inputs, 3 samples)"


async def test_a_check_gets_what_the_execution_did_and_its_files():
    code = """
import os, sys
os.makedirs("out")
open("out/data.txt", "w").write(str(x))
print("printed", x)
if x == 1: raise ValueError("no")
if x == 2: sys.exit(0)
SUBMIT(y=float("nan"))
"""

    def check(submitted, stdout, error, seconds, folder, x, missing=7):
        from pathlib import Path

        data = Path(folder, "out", "data.txt")
        data.chmod(0o600)  # Without this line only its owner may not write to it.
        return {
            "fields": {name: str(value) for name, value in submitted.items()},
            "last": stdout.split()[-1],
            "error": None if error is None else (error["error"], error["type"], error["message"], error["line"]),
            "is_timed": seconds > 0,
            "data": data.read_text(),
            "missing": missing,
        }

    results = await batch(code, inputs(3), check=check)
    common = {"is_timed": True, "missing": 7}
    assert [result.outputs for result in results] == [
        {"fields": {"y": "nan"}, "last": "0", "error": None, "data": "0", **common},
        {"fields": {}, "last": "1", "error": ["CodeError", "ValueError", "no", 6], "data": "1", **common},
        {"fields": {}, "last": "2", "error": None, "data": "2", **common},
    ]
    assert [result.meta.collected for result in results] == [()] * 3
    assert [result.meta.judged["submitted"] for result in results if result.meta.judged] == [True, False, False]


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("1 / 0", "the check raised ZeroDivisionError"),
        ("return 1", "the check is not valid Python"),
        ("exit(0)", "the check "),
        ("print('nothing')", "the check ended without fields"),
        ("SUBMIT()", "the check ended without fields"),
        ("SUBMIT(x=1j)", "the check failed: x is a complex"),
        ("import os; os._exit(3)", "the check "),
        ("while True: pass", "the check was still running"),
    ],
)
async def test_a_failing_check_is_a_failure_that_names_the_check(check, reason):
    options: dict[str, Any] = {"timeout": 2} if check.startswith("while") else {}
    (failure,) = await batch(["SUBMIT(y=1)"], check=check, on_failure="return", retries=0, **options)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, CheckError)
    assert str(failure.error).startswith(reason)
    assert failure.meta.judged is not None
    assert failure.meta.judged["outputs"] == {"y": 1}


async def test_a_resumed_run_keeps_the_results_of_the_same_check(tmp_path):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('x')\nSUBMIT(y=x)"
    options: dict[str, Any] = {"results_path": str(tmp_path / "ledger"), "provider": "local:none"}
    check = "assert x or submitted['y']\nSUBMIT(passed=True)"
    first = await batch(code, inputs(3), check=check, on_failure="return", **options)
    assert [type(result).__name__ for result in first] == ["Failure", "Result", "Result"]
    again = await batch(code, inputs(3), check=check, on_failure="return", **options)
    assert [getattr(result, "outputs", None) for result in again] == [None, {"passed": True}, {"passed": True}]
    another = await batch(code, inputs(3), check="SUBMIT(passed=submitted['y'] == x)", **options)
    assert [result.outputs for result in another] == [{"passed": True}] * 3
    assert ran.read_text() == "x" * 3  # No code ran again, not even that of the failed check.
    await batch(f"{code}  # changed", inputs(3), check=check, on_failure="return", **options)
    assert ran.read_text() == "x" * 6


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_lost_sandbox_of_a_check_repeats_only_the_check(tmp_path, short_delays, reuse):
    ran, lost = tmp_path / "ran", tmp_path / "lost"
    code = f"open({str(ran)!r}, 'a').write('x')\nSUBMIT(y=x)"
    check = f"""
import os, signal, time
if x == 1 and not os.path.exists({str(lost)!r}):
    open({str(lost)!r}, "w").close()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
SUBMIT(y=submitted["y"])
"""
    results = await batch(
        code, inputs(3), check=check, provider="local:none", max_workers=1, reuse_sandboxes=reuse, retries=1
    )
    assert [result.y for result in results] == [0, 1, 2]
    assert [result.meta.attempt for result in results] == [1, 2, 1]
    assert results[1].meta.earlier_errors[0].startswith("SandboxLost: the sandbox of the check ended")
    assert ran.read_text() == "xxx"


async def test_executions_and_checks_have_different_sandboxes_also_if_both_are_kept():
    code = "import os\nopen('mark', 'w').close()\nSUBMIT(place=os.getcwd())"
    check = "import os\nSUBMIT(code=submitted['place'], check=os.getcwd(), names=os.listdir('.'))"
    for reuse in (False, True):
        results = await batch([code] * 3, check=check, max_workers=1, reuse_sandboxes=reuse, provider="local:none")
        assert all(result.names == [] for result in results)
        own, judged = ({result[name] for result in results} for name in ("check", "code"))
        assert not own & judged
        assert (len(own), len(judged)) == ((1, 1) if reuse else (3, 3))


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_limit_of_one_sandbox_serves_executions_and_checks_in_turn(reuse):
    await LocalSandbox(isolation="none", max_sandboxes=1).save("one-for-checks", overwrite=True)  # type: ignore[misc]
    results = await batch(
        SQUARE, inputs(4), check=IS_SQUARE, provider="rlm-local-sandbox/one-for-checks", reuse_sandboxes=reuse
    )
    assert [result.passed for result in results] == [True, True, False, False]


async def test_no_execution_passes_with_the_files_of_another(tmp_path):
    for name in "abc":
        (tmp_path / name).touch()
    code = """
import os, shutil
if path == "inputs/a":
    open("answer", "w").close()
    shutil.rmtree("inputs")
    open("inputs", "w").close()
SUBMIT(path=path)
"""
    check = "import os\nSUBMIT(files=sorted(os.listdir(folder)), path=submitted['path'])"
    results = await batch(code, f"{tmp_path}/*", check=check, reuse_sandboxes=True, max_workers=1)
    assert [result.files for result in results] == [["answer", "inputs"], [], []]
    assert [result.path for result in results] == ["inputs/a", "inputs/b", "inputs/c"]


async def test_a_check_judges_no_code_that_did_not_begin(tmp_path, monkeypatch):
    (tmp_path / "a").touch()

    async def fail_to_upload(_self: object, path: str, _data: bytes) -> None:
        raise VolumeError(f"{path} could not be written: the disk is full")

    monkeypatch.setattr(LocalSandboxHandle, "upload", fail_to_upload)
    options: dict[str, Any] = {"check": "SUBMIT(passed=True)", "on_failure": "return"}
    with_file = await batch("SUBMIT(y=1)", f"{tmp_path}/*", **options)
    with_large_variable = await chunks("SUBMIT(y=1)", data=["y" * 1_000_000], chunk_size=1, **options)
    for failure in (with_file[0], with_large_variable["0"]):
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, VolumeError)
        assert get_status(failure) == "unfinished"
        assert failure.meta.judged is None


async def test_a_retry_whose_sandbox_is_lost_is_not_judged_by_the_attempt_before(tmp_path, short_delays):
    code = f"""
import os, signal
if os.path.exists({str(tmp_path / "ran")!r}): os.kill(os.getppid(), signal.SIGKILL)
open({str(tmp_path / "ran")!r}, "w").close()
open("answer", "w").close()
raise ValueError
"""
    check = "import os\nSUBMIT(files=os.listdir(folder))"
    options: dict[str, Any] = {"provider": "local:none", "retry_code_errors": True, "retries": 1}
    (failure,) = await batch([code], check=check, on_failure="return", **options)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, OutcomeUnknown)
    assert failure.meta.judged is None


async def test_a_sweeps_objective_is_the_checks(tmp_path):
    report = await sweep(
        "SUBMIT(loss=-100)", grid={"x": [3, 1, 2]}, objective="loss", check="SUBMIT(loss=x + submitted['loss'] * 0)"
    )
    assert report.best is not None
    assert report.best.meta.variables == {"x": 1}
    with pytest.raises(ConfigurationError, match="only the check judges"):
        await sweep("1", space={"x": [1]}, trials=1, objective="loss", pruner="median", check="SUBMIT(loss=x)")


async def test_a_check_judges_each_chunk_without_the_volume_and_not_the_reduction(volumes):
    code = "open(f'{VOLUME}/expected', 'w').write('forged')\nSUBMIT(total=sum(data) + (chunk_id == '1'))"
    check = "SUBMIT(passed=submitted['total'] == sum(data), chunk=chunk_id, volume=VOLUME)"
    reduce = "SUBMIT(passed=sum(fields['passed'] for fields in results.values()))"
    report = await chunks(code, data=[1, 2, 3], chunk_size=2, check=check, reduce=reduce, volume_name="v")
    assert report["0"].outputs == {"passed": True, "chunk": "0", "volume": None}
    assert report["1"].outputs == {"passed": False, "chunk": "1", "volume": None}
    assert report.reduction is not None
    assert report.reduction.outputs == {"passed": 1}


async def test_large_fields_and_output_reach_the_check():
    code = "print('x' * 500_000)\nSUBMIT(text='y' * 900_000)"
    (result,) = await batch([code], check="SUBMIT(text=len(submitted['text']), printed=len(stdout))")
    assert result.text == 900_000
    assert result.printed > 100_000


async def test_collected_files_stay_and_the_check_gets_them(tmp_path):
    code = "open('a.txt', 'w').write('a')\nopen('b.txt', 'w').write('b')"
    check = "import os\nSUBMIT(names=os.listdir(folder))"
    (result,) = await batch([code], check=check, collect=["a.*"], results_path=str(tmp_path))
    assert result.names == ["a.txt"]
    (path,) = result.meta.collected
    assert Path(path).read_text() == "a"


async def test_too_many_files_are_named_beside_the_result():
    code = "for n in range(1_002): open(f'{n:04}', 'w').close()"
    (result,) = await batch([code], check="import os\nSUBMIT(count=len(os.listdir(folder)))")
    assert result["count"] == 1_000
    assert result.meta.judged is not None
    assert [problem[:4] for problem in result.meta.judged["missing_files"]] == ["1000", "1001"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"inputs": [{"error": 1}]}, "the variable 'error' has the name of a variable that the check gets"),
        ({"check": "check.py"}, "the name of a file"),
        ({"check": "@/no/such/file"}, "cannot be read"),
    ],
)
async def test_a_wrong_check_is_refused_before_anything_runs(options, reason):
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        await batch("SUBMIT(y=1)", **{"inputs": [{}], "check": "SUBMIT(passed=True)", **options})


async def test_a_function_whose_parameters_nothing_fills_is_refused():
    def check(submitted, expected): ...

    with pytest.raises(ConfigurationError, match="needs a value for 'expected'"):
        await batch(SQUARE, inputs(1), check=check)
