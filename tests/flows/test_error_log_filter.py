"""What a flow run that failed says in its log."""

import pytest

from rlm_batch import ConfigurationError, ExecutionsFailed, batch, sweep


def read_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        logged.getMessage() + (logged.exc_text or "") + str(logged.exc_info or "")
        for logged in caplog.records
        if logged.name == "prefect.flow_runs" and logged.levelname == "ERROR"
    ]


def test_what_a_person_can_mend_is_a_sentence_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError):
        sweep.sync("SUBMIT(x=x)", grid={"x": [1]}, points=[{"x": 1}])
    with pytest.raises(ExecutionsFailed):
        batch.sync(["1 / 0"])
    wrong, wrong_state, failed, _ = read_log(caplog)
    assert wrong == "ConfigurationError: the space was given twice: pass grid or points, not both"
    assert failed.startswith("ExecutionsFailed: 1 of 1 executions failed")
    assert "Traceback" not in wrong_state + failed


def test_a_defect_keeps_its_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_batch.flows.batch.executions", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.sync(["pass"])
    assert "traceback" in read_log(caplog)[0]
