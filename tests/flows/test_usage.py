"""CPU seconds and peak memory of executions in tables, reports and exports."""

from pathlib import Path
from typing import Any

import pytest

from rlm_batch import chunks, sweep
from rlm_batch.flows.reporting.export import write_csv
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.flows.reporting.report import build_summary_rows

pytestmark = pytest.mark.anyio

FILL = "data = bytearray(x * 100 * 1024 * 1024)\ndata[::4096] = b'x' * len(data[::4096])\nSUBMIT(loss=x)"


async def test_the_table_the_report_and_the_exports_have_the_usage(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    report: Any = await sweep(FILL, {"x": [0, 2]}, objective="loss", repeats=2, results_path=run)
    peaks = [trial.meta.peak_mib for trial in report.trials]
    assert max(peaks[:2]) < 100 < 200 <= min(peaks[2:])
    header, first, last = report.rows(shows_usage=True)
    assert header[-3:-1] == ["CPU seconds", "peak MiB"]
    assert "CPU seconds" not in report.rows()[0]
    assert [first[-2], last[-2]] == [f"{max(peaks[:2]):,.1f}", f"{max(peaks[2:]):,.1f}"]
    assert report.groups[1].meta.cpu_seconds == pytest.approx(sum(t.meta.cpu_seconds for t in report.trials[2:]) / 2)
    reader = open_run_ledger(run)
    summary = reader.summarize()
    text = {row[0]: row[1] for row in build_summary_rows(summary, reader.records)}["CPU and memory"]
    assert f"at most {max(peaks):,.1f} MiB, in trial {peaks.index(max(peaks))}" in text
    assert summary.build_rows(shows_usage=True)[1][-2] == first[-2]
    write_csv(reader, tmp_path / "run.csv")
    names, *lines = [line.split(",") for line in (tmp_path / "run.csv").read_text("utf-8-sig").splitlines()]
    assert [float(line[names.index("peak_mib")]) for line in lines] == peaks


async def test_chunks_have_the_usage_too() -> None:
    report = await chunks("SUBMIT(y=len(data))", data=[1, 2, 3], chunk_size=2)
    assert all(float(cell) > 0 for row in report.rows(shows_usage=True)[1:] for cell in row[-3:-1])
