"""What a flow run that failed says in its log."""

import asyncio

import pytest

from rlm_batch import ConfigurationError, ExecutionsFailed, batch, sweep


def log_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        logged.getMessage() + (logged.exc_text or "") + str(logged.exc_info or "")
        for logged in caplog.records
        if logged.name == "prefect.flow_runs" and logged.levelname == "ERROR"
    ]


def test_what_only_the_flow_can_tell_to_be_wrong_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError):
        asyncio.run(sweep("SUBMIT(x=x)", grid={"x": [1]}, points=[{"x": 1}]))
    said, state = log_of(caplog)
    assert said == "ConfigurationError: the space was given twice: pass grid or points, not both"
    assert "Traceback" not in state


def test_executions_that_failed_are_no_traceback_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ExecutionsFailed):
        asyncio.run(batch(["1 / 0"]))
    said, _ = log_of(caplog)
    assert said.startswith("ExecutionsFailed: 1 of 1 executions failed")
    assert "Traceback" not in said


def test_a_defect_keeps_its_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rlm_batch.flows.batch.executions", broken)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(batch(["pass"]))
    assert "traceback" in log_of(caplog)[0]
