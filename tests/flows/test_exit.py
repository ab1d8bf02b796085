"""Code that calls `sys.exit` before `SUBMIT`: its execution says so, and is no silent success."""

from pathlib import Path
from typing import Any

import pytest

from rlm_batch import Result, batch, load_report, sweep
from rlm_batch.flows.reporting.export import write_csv
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_summary_rows

pytestmark = pytest.mark.anyio

NOTE = "ended by sys.exit before SUBMIT"
MAIN = "import sys\ndef main():\n    return 0\nif __name__ == '__main__':\n    sys.exit(main())"
OPTIONS: dict[str, Any] = {"provider": "local", "reuse_sandboxes": True}


@pytest.mark.parametrize("code", ["import sys\nsys.exit()", MAIN, "raise SystemExit(0)", "exit()\nSUBMIT(y=1)"])
async def test_an_execution_that_exits_is_a_result_that_says_so(code: str) -> None:
    (result,) = await batch(code, **OPTIONS)
    assert isinstance(result, Result)
    assert (result.meta.exited, result.meta.submitted, result.outputs) == (True, False, {})
    with pytest.raises(AttributeError, match=r"the code called sys.exit before SUBMIT"):
        _ = result.y


async def test_an_exit_after_submit_or_the_end_of_the_code_is_no_exit() -> None:
    results = await batch(["import sys\ntry:\n    SUBMIT(y=1)\nfinally:\n    sys.exit(0)", "pass"], **OPTIONS)
    assert [(result.meta.exited and not result.meta.submitted) for result in results] == [False, False]


async def test_the_table_the_report_and_the_exports_show_an_exit(tmp_path: Path) -> None:
    code = "import sys\nif x == 1: sys.exit(0)\nSUBMIT(loss=x)"
    run = str(tmp_path / "run")
    report = await sweep(code, {"x": [1, 2]}, objective="loss", results_path=run, **OPTIONS)
    assert [row[-1] for row in report.rows()[1:]] == [NOTE, "best"]
    assert report.list_notes() == ["1 execution called sys.exit before SUBMIT, so it has no fields"]
    assert [line["status"] for line in report.to_json_lines()] == ["exited", "succeeded"]
    assert load_report(run).rows() == report.rows()
    reader = open_run_ledger(run)
    summary = reader.summarize()
    assert build_summary_rows(summary, reader.records)[0][1].endswith("; 1 called sys.exit before SUBMIT")
    assert [row[-1] for row in summary.build_rows(shows_usage=False)[1:]] == ["best", NOTE]
    write_csv(reader, tmp_path / "run.csv")
    assert ",exited," in (tmp_path / "run.csv").read_text("utf-8-sig").splitlines()[1]
