"""Environment variables of a run: plain ones among the provider's options, and secrets of this process."""

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, LocalSandbox, batch, sequence

from ..infra.deployed import Deployed

pytestmark = pytest.mark.anyio

CODE = "import os\nSUBMIT(stage=os.environ.get('STAGE'), size=len(os.environ.get('TOKEN_OF_TEST', '')))"


async def test_a_run_sets_environment_variables_beside_those_of_the_block() -> None:
    name = f"env-{uuid.uuid4().hex[:8]}"
    await LocalSandbox(environment={"STAGE": "saved", "TOKEN_OF_TEST": "abc"}).save(name)  # type: ignore[arg-type]
    for options, expected in (({}, "saved"), ({"environment": {"STAGE": "run"}}, "run")):
        (result,) = await batch([CODE], provider=f"local-sandbox/{name}", provider_options=options)
        assert (result.stage, result.size) == (expected, 3)


async def test_a_secret_reaches_the_code_and_no_log_ledger_or_server(
    results: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    value = f"secret-{uuid.uuid4().hex}"
    monkeypatch.setenv("TOKEN_OF_TEST", value)
    (result,) = await batch([CODE], secrets=["TOKEN_OF_TEST"], provider_options={"environment": {"STAGE": "test"}})
    assert (result.stage, result.size) == ("test", len(value))
    (step,) = await sequence([CODE], secrets=["TOKEN_OF_TEST"])
    assert step.size == len(value)
    assert value not in caplog.text
    assert "TOKEN_OF_TEST" not in str(os.environ.get("PREFECT_API_URL"))
    server_home = find_database().parent
    files = [path for root in (results, server_home) for path in root.rglob("*") if path.is_file()]
    assert find_database() in files
    assert [path for path in files if value.encode() in path.read_bytes()] == []
    # The search finds what the server has: the name of the secret is a parameter of the run.
    assert any(b"TOKEN_OF_TEST" in path.read_bytes() for path in files if path.is_relative_to(server_home))


def find_database() -> Path:
    """Return the database of the tests' Prefect server."""
    from ..conftest import HOME

    (path,) = (Path(HOME) / "server").rglob("prefect.db")
    return path


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"secrets": ["NO_SUCH_VARIABLE_HERE"]}, "no such environment variable: export it first"),
        ({"secrets": ["PATH"], "shards": 2}, "a job in shards cannot take `secrets`"),
        ({"provider_options": {"environment": {"A=B": "c"}}}, "'A=B' is not the name of an environment variable"),
        ({"provider_options": {"environment": "A=B"}}, "environment"),
        ({"provider_options": {"repo_token": "c"}}, "repo_token"),
    ],
)
async def test_wrong_variables_are_refused_with_one_sentence(parameters: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        await batch(["SUBMIT()"], **parameters)
    assert "\n" not in str(raised.value)


async def test_a_run_of_a_deployment_gets_no_secret_of_its_worker() -> None:
    flow = await Deployed.made(code=[CODE], secrets=["PATH"])
    state = await flow.execute()
    assert state.is_failed()
    assert "a run of a deployment cannot take `secrets`" in str(state.message)
