"""Prefect's log of our runs, which is short, and of a user's own runs, which is complete."""

import json
import logging
from typing import Any

import pytest
from prefect import flow, task
from prefect.logging.formatters import JsonFormatter

from rlm_batch import ConfigurationError, ExecutionsFailed, batch, run_code, sweep

from ..standins.openai_chat import ChatServer, Reply


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
        "ConfigurationError: no trial submitted 'loss', they submitted x: name another field; the results are in "
    )
    assert failed.startswith("ExecutionsFailed: 1 of 1 executions failed")
    assert "Traceback" not in wrong + failed


def test_refused_parameters_start_no_flow_run(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match="pass one of `grid`, `points` or `space`, and only one"):
        sweep.sync("SUBMIT(x=x)", grid={"x": [1]}, points=[{"x": 1}])
    assert [logged for logged in caplog.records if logged.name.startswith("prefect.flow_runs")] == []


def test_a_defect_keeps_its_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_batch.flows.plans.batch.BatchParameters.build_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.sync(["pass"])
    assert "traceback" in read_log(caplog)[0]


def read_lines(caplog: pytest.LogCaptureFixture, *levels: str) -> list[str]:
    """Return the log of all flow runs and task runs as a console shows it."""
    console = logging.Formatter()
    return [
        console.format(logged)
        for logged in caplog.records
        if logged.name.startswith(("prefect.flow_runs", "prefect.task_runs"))
        and (logged.levelname in levels or not levels)
    ]


@pytest.mark.parametrize("name", ["mine", "batch", "rlm-batch"])
def test_a_users_flow_logs_its_traceback_and_its_end(caplog: pytest.LogCaptureFixture, name: str) -> None:
    @flow(name=name)
    def fail() -> None:
        batch.sync(["1 / 0"], provider="local:none", retries=0)

    @flow(name=name)
    def succeed() -> None:
        batch.sync(["pass"], provider="local:none")

    with pytest.raises(ExecutionsFailed):
        fail()
    (logged,) = [text for text in read_lines(caplog, "ERROR") if "Encountered exception" in text]
    assert "Traceback" in logged
    assert 'batch.sync(["1 / 0"]' in logged
    assert len([text for text in read_lines(caplog) if text.startswith("Finished in state Failed")]) == 1
    caplog.clear()
    succeed()
    assert [text for text in read_lines(caplog) if text.startswith("Finished in state")] == [
        "Finished in state Completed()"
    ]


@pytest.mark.parametrize("name", ["execute", "query", "run code"])
def test_a_users_task_logs_its_traceback_and_its_end(caplog: pytest.LogCaptureFixture, name: str) -> None:
    @task(name=name)
    def fail() -> None:
        raise ConfigurationError("of a user's task")

    @task(name=name)
    def succeed() -> None: ...

    @flow(name="rlm-batch")
    def run() -> None:
        batch.sync(["pass"], provider="local:none")
        succeed()
        fail(return_state=True)

    run(return_state=True)
    logged = read_lines(caplog)
    assert "Finished in state Completed()" in logged
    (failed,) = [text for text in logged if text.startswith("Task run failed with exception")]
    assert "Traceback" in failed


@pytest.mark.parametrize(
    ("retries", "code"),
    [pytest.param(0, "1 / 0", id="no retries"), pytest.param(1, "import os; os._exit(1)", id="after the last retry")],
)
def test_a_failed_execution_is_one_line(
    caplog: pytest.LogCaptureFixture, short_delays: None, retries: int, code: str
) -> None:
    options: dict[str, Any] = {"provider": "local:none", "retry_code_errors": True}
    batch.sync([code], on_failure="return", retries=retries, **options)
    failures = [text for text in read_lines(caplog, "WARNING", "ERROR") if "is retried in" not in text]
    assert len(failures) == 1
    assert failures[0].startswith("execution 0 failed: Code")
    assert "Traceback" not in failures[0]
    caplog.clear()

    @flow
    def run() -> None:
        run_code.with_options(retries=retries, retry_delay_seconds=0).submit(code, **options).wait()

    run()
    (failed,) = read_lines(caplog, "ERROR")
    assert failed.startswith("Finished in state Failed(")
    assert "Task run encountered an exception Code" in failed
    assert "\n" not in failed


@pytest.mark.usefixtures("openai")
def test_a_failed_query_that_the_code_handles_is_one_line(caplog: pytest.LogCaptureFixture, chat: ChatServer) -> None:
    chat.script = lambda _: Reply("refused here", status=400)
    code = "try:\n    llm_query('x')\nexcept QueryError:\n    SUBMIT(1)"
    (result,) = batch.sync([code], provider="local:none", language_model="openai/gpt-4o-mini")
    assert result.output == 1
    (line,) = [text for text in read_lines(caplog) if "refused here" in text]
    assert line.startswith("Finished in state Failed(")
    assert "\n" not in line
    assert "NoneType" not in caplog.text
    assert "Traceback" not in caplog.text


def test_an_error_of_a_flow_has_no_context_of_ours() -> None:
    with pytest.raises(ConfigurationError) as caught:
        batch.sync([])
    assert caught.value.__context__ is None


def test_what_a_mapped_task_prints_has_the_name_of_its_task_run(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def run() -> None:
        named = run_code.with_options(task_run_name="say {variables}")
        named.map("print(f'I am {n}')", [{"n": 1}, {"n": 2}], provider="local:none").wait()

    run()
    printed = {text for text in read_lines(caplog) if "I am" in text}
    assert printed == {"say {'n': 1}: I am 1", "say {'n': 2}: I am 2"}


def test_lines_in_json_have_their_whole_text(caplog: pytest.LogCaptureFixture) -> None:
    @flow
    def run() -> None:
        run_code.sync("print('100 %s')", provider="local:none")
        batch.sync("print('50 %d')\nassert x", [{"x": 1}, {"x": 0}], provider="local:none", on_failure="return")

    run()
    formatter = JsonFormatter("default", "", "%")
    lines = [json.loads(formatter.format(logged)) for logged in caplog.records if logged.name.startswith("prefect.")]
    texts = [line["msg"] for line in lines if line["name"].startswith(("prefect.flow_runs", "prefect.task_runs"))]
    assert [line["args"] for line in lines if line["args"] and line["name"].startswith("prefect.task_runs")] == []
    for expected in (
        "0: 50 %d",
        "1: 50 %d",
        "execution 1 failed: CodeError: ",
        "1 of 2 executions succeeded",
    ):
        assert len([text for text in texts if text.startswith(expected)]) == 1, expected
    assert len([text for text in texts if text.endswith(": 100 %s")]) == 1
