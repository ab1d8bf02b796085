"""A NUL is a character like others in values, although Postgres, which Prefect may have, holds none."""

from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import CodeSyntaxError, ConfigurationError, Failure, batch, chunks, sequence, sweep
from rlm_batch.deployments.server import PrefectServer

from ...infra.postgres import Postgres

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.requires("postgres")]
OPTIONS: dict[str, Any] = {"provider": "local:none"}


def test_values_names_code_and_what_code_says_may_have_a_nul(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Postgres() as postgres:
        monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", postgres.url)
        with PrefectServer(tmp_path / "server") as server, temporary_settings({PREFECT_API_URL: server.url}):
            check_values()
            check_code()


def check_values() -> None:
    inputs = [{"x": "a\0b"}, {"x": {"\0": "\ud7ff"}}]
    found = batch.sync("print(x)\nSUBMIT(y=x, **{'a\\0': 1})", inputs, **OPTIONS)
    assert [result.outputs for result in found] == [{"y": item["x"], "a\0": 1} for item in inputs]
    trials = sweep.sync("SUBMIT(loss=len(x))", points=[{"x": "\0"}, {"x": "a"}], objective="loss", **OPTIONS)
    assert [trial.meta.variables["x"] for trial in trials.trials] == ["\0", "a"]
    parts = chunks.sync("SUBMIT(n=len(data))", chunks={"a\0": ["\0"]}, **OPTIONS)
    assert parts["a\0"].n == 1


def check_code() -> None:
    codes = ["SUBMIT(x='a\0b')", "raise ValueError('a\\0b')", "SUBMIT(x=1)"]
    wrong, raising, right = batch.sync(codes, on_failure="return", **OPTIONS)
    assert isinstance(wrong, Failure)
    assert type(wrong.error) is CodeSyntaxError
    assert isinstance(raising, Failure)
    assert "a\\x00b" in str(raising.error)
    assert right.outputs == {"x": 1}
    one = [
        *batch.sync("SUBMIT(x='a\0b')", on_failure="return", **OPTIONS),
        *sequence.sync(["x = 1", "# \0"], on_failure="return", **OPTIONS)[1:],
    ]
    assert [type(outcome.error) for outcome in one if isinstance(outcome, Failure)] == [CodeSyntaxError] * 2
    with pytest.raises(ConfigurationError, match="prepare has a NUL character"):
        batch.sync("SUBMIT()", prepare="x = '\0'", **OPTIONS)
