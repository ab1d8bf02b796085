"""The log of a failed flow run."""

import pytest

from rlm_batch import ConfigurationError, ExecutionsFailed, batch, sweep


def read_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        logged.getMessage() + (logged.exc_text or "") + str(logged.exc_info or "")
        for logged in caplog.records
        if logged.name == "prefect.flow_runs" and logged.levelname == "ERROR"
    ]


def test_a_user_error_is_a_sentence_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError):
        sweep.sync("SUBMIT(x=x)", grid={"x": [1]}, objective="loss", on_failure="return")
    with pytest.raises(ExecutionsFailed):
        batch.sync(["1 / 0"])
    wrong, failed = read_log(caplog)
    assert wrong.startswith(
        "ConfigurationError: no trial submitted 'loss', they submitted x: pass objective='x'; the results are in "
    )
    assert failed.startswith("ExecutionsFailed: 1 of 1 executions failed")
    assert "Traceback" not in wrong + failed


def test_refused_parameters_start_no_flow_run(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="the space is given twice: pass only one of grid and points"):
        sweep.sync("SUBMIT(x=x)", grid={"x": [1]}, points=[{"x": 1}])
    assert [logged for logged in caplog.records if logged.name.startswith("prefect.flow_runs")] == []


def test_a_defect_keeps_its_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_batch.flows.batch.BatchParameters.build_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.sync(["pass"])
    assert "traceback" in read_log(caplog)[0]
