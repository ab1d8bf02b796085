"""Attacks on a worker by a person who may start runs of deployments and save blocks: none gets out, or gets a key."""

import asyncio
import base64
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.filesystems import RemoteFileSystem
from prefect.results import ResultRecordMetadata  # pyright: ignore[reportPrivateImportUsage]
from prefect.serializers import PickleSerializer
from prefect.workers.process import ProcessWorker

from rlm_batch import DaytonaSandbox, LanguageModel
from rlm_batch.deployments.deploy import POOL_FILE, WORK_POOL, deploy

from ..infra.consent import move_home, write_policy
from ..infra.deployed import Deployed
from ..infra.programs import run_program
from ..infra.workers import Worker, wait_until_online
from ..standins.openai_chat import ChatServer

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.timeout(900)]

PREFECT = str(Path(sys.executable).with_name("prefect"))
KEYS = {f"{name}_API_KEY": f"{name}-of-the-worker" for name in ("OPENAI", "ANTHROPIC", "AZURE_AI", "DAYTONA")}
ASK = "SUBMIT(answer=llm_query('Who?'))"


class Thief:
    """A server of an attacker, which keeps all that it receives."""

    def __init__(self) -> None:
        received: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                received.append(f"{self.path}\n{self.headers}\n{body!r}")
                self.send_response(404)
                self.send_header("content-length", "0")
                self.end_headers()

            do_GET = do_PUT = do_DELETE = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "Thief":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def thief() -> Iterator[Thief]:
    with Thief() as server:
        yield server


@pytest.fixture(scope="module")
def own_model() -> Iterator[ChatServer]:
    """Yield the model server to which the worker's keys may go."""
    with ChatServer() as server:
        yield server


@pytest.fixture(scope="module")
def closed_worker(server: str, own_model: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker of the pool that `deploy` makes. It has keys, and its code may look into its environment."""
    asyncio.run(deploy())
    folder = tmp_path_factory.mktemp("closed")
    consent = move_home(folder / "user", allowed_tools=["os:getenv"], key_addresses=[own_model.url])
    environment = consent | KEYS | {"OF_THE_WORKER": "here"}
    with Worker(folder / "machine", server, "closed-worker", limit=4, environment=environment) as worker:
        asyncio.run(wait_until_online(worker.name))
        yield worker


async def end_all(runs: dict[str, Deployed]) -> dict[str, str]:
    """Wait until the runs have ended, and return their states with the messages."""
    states = await asyncio.gather(*(run.ended() for run in runs.values()))
    return {name: f"{state.name}: {state.message}" for name, state in zip(runs, states, strict=True)}


async def test_a_runs_environment_is_no_consent(server: str, tmp_path: Path) -> None:
    """The pool is as open as Prefect makes it."""
    pool = f"open-{uuid.uuid4().hex[:8]}"
    template = ProcessWorker.get_default_base_job_template()
    async with get_client() as client:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
    written, outside, home = tmp_path / "written", tmp_path / "outside.jsonl", tmp_path / "attackers"
    outside.write_text('{"x": 1}')
    write_policy(home / ".config" / "rlm-batch" / "worker.toml", allow_no_isolation=True, allowed_paths=["/"])
    getting_out = {"code": [f"open({str(written)!r}, 'w').close()"], "provider": "local:none"}
    homes = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "XDG_CONFIG_DIRS": str(home / ".config")}
    attacks: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "consent": ({"RLM_BATCH_ALLOW_NO_ISOLATION": "1"}, getting_out),
        "home": (homes, getting_out),
        "script": (
            {"PREFECT__FLOW_RUN_ID": None, "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS": None},
            getting_out,
        ),
        "paths": ({"RLM_BATCH_ALLOWED_PATHS": "/"}, {"code": "SUBMIT(x=x)", "inputs": str(outside)}),
        "home's paths": (homes, {"code": "SUBMIT(x=x)", "inputs": str(outside)}),
    }
    consent = move_home(tmp_path / "user")
    with Worker(tmp_path / "machine", server, pool, pool=pool, limit=3, environment=consent) as worker:
        await wait_until_online(worker.name, pool)
        runs = {
            name: await Deployed.made(pool, {"env": environment}, **parameters)
            for name, (environment, parameters) in attacks.items()
        }
        states = await end_all(runs)
    assert not written.exists()
    file = tmp_path / "user" / ".config" / "rlm-batch" / "worker.toml"
    for name, state in states.items():
        assert "ConfigurationError: this worker does not" in state, (name, state)
        assert f"in the worker's file (/etc/rlm-batch/worker.toml or {file})" in state, (name, state)


async def test_a_run_in_our_pool_gets_neither_environment_nor_command(
    server: str, closed_worker: Worker, tmp_path: Path
) -> None:
    done = run_program(
        [PREFECT, "deployment", "run", "rlm-batch/local", "--job-variable", 'env={"OF_THE_RUN": "here"}']
    )
    assert done.returncode != 0
    assert "'env' was unexpected" in done.stdout + done.stderr
    # This request is not validated by Prefect's server.
    touched = tmp_path / "touched"
    variables = {
        "env": {"OF_THE_RUN": "here", "PYTHONPATH": str(tmp_path)},
        "env.OF_THE_RUN": "here",
        "command": f"touch {touched}",
        "working_dir": str(tmp_path),
    }
    parameters = {
        "code": ["SUBMIT(own=look('OF_THE_WORKER'), run=look('OF_THE_RUN'), path=look('PYTHONPATH'))"],
        "tools": {"look": "os:getenv"},
        "provider": "local",
        "inputs": None,
    }
    async with get_client() as client, httpx.AsyncClient(base_url=server) as raw:
        deployment = await client.read_deployment_by_name("rlm-batch/local")
        created = await raw.post(
            "/flow_runs/",
            json={
                "flow_id": str(deployment.flow_id),
                "deployment_id": str(deployment.id),
                "work_queue_name": "default",
                "work_pool_name": WORK_POOL,
                "parameters": parameters,
                "job_variables": variables,
                "state": {"type": "SCHEDULED"},
            },
        )
        created.raise_for_status()
        assert created.json()["job_variables"] == variables
        run = Deployed(await client.read_flow_run(uuid.UUID(created.json()["id"])))
        state = await run.ended()
        assert state.is_completed(), state
        (result,) = (await state.aresult()).results
    assert (result.own, result.run) == ("here", None)
    assert str(tmp_path) not in result.path.split(":")
    assert not touched.exists()


async def test_a_result_that_a_person_gives_a_run_is_not_unpickled(server: str, tmp_path: Path) -> None:
    """Prefect's engine would read it from the state that the run has when its process starts."""
    touched = tmp_path / "touched"
    block = await RemoteFileSystem(basepath="data://result").asave(f"result-{uuid.uuid4().hex[:8]}")  # type: ignore[misc]
    metadata = ResultRecordMetadata(serializer=PickleSerializer(picklelib="pickle"), storage_block_id=block)
    pickled = base64.encodebytes(f"cos\nsystem\n(S'touch {touched}'\ntR.".encode()).decode()
    record = json.dumps({"metadata": metadata.model_dump(mode="json"), "result": pickled})
    metadata.storage_key = f",{quote(record, safe='')}"
    run = await Deployed.made(code=["SUBMIT()"])
    state = {"type": "COMPLETED", "data": metadata.model_dump(mode="json")}
    async with httpx.AsyncClient(base_url=server) as raw:
        answer = await raw.post(f"/flow_runs/{run.run.id}/set_state", json={"state": state, "force": True})
        answer.raise_for_status()
    done = run_program(
        [sys.executable, "-m", "prefect.engine"],
        env={**os.environ, "PREFECT_API_URL": server, "PREFECT__FLOW_RUN_ID": str(run.run.id)},
    )
    assert done.returncode == 0, done.stderr
    assert "Beginning flow run" not in done.stdout + done.stderr
    assert not touched.exists()


async def test_the_command_that_deploy_prints_closes_an_open_pool(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = f"open-{uuid.uuid4().hex[:8]}"
    async with get_client() as client:
        fixed: dict[str, Any] = {"job_configuration": {"env": {}}, "variables": {"type": "object"}}
        for template in (ProcessWorker.get_default_base_job_template(), fixed):
            await client.create_work_pool(
                WorkPoolCreate(name=pool, type="process", base_job_template=template), overwrite=True
            )
            await deploy(pool)
            warning = capsys.readouterr().err
            assert f"in the work pool {pool} can run any program as its worker's user" in warning
        _, _, command = warning.strip().rpartition(": ")
        assert command.startswith("prefect work-pool update")
        done = run_program([PREFECT, *command.split()[1:]])
        assert done.returncode == 0, done.stdout + done.stderr
        assert (await client.read_work_pool(pool)).base_job_template == json.loads(POOL_FILE.read_text())
        await deploy(pool)
        assert "can run any program" not in capsys.readouterr().err
        await client.delete_work_pool(pool)


async def test_the_workers_keys_go_only_where_its_file_says(
    server: str, closed_worker: Worker, thief: Thief, own_model: ChatServer
) -> None:
    suffix = uuid.uuid4().hex[:8]

    async def save_model(name: str, **fields: Any) -> str:
        await LanguageModel(**fields, retries=0).save(f"{name}-{suffix}")  # type: ignore[misc]
        return f"rlm-language-model/{name}-{suffix}"

    gpt, claude = "openai/gpt-4o-mini", "anthropic/claude-sonnet-4-5"
    blocks: dict[str, dict[str, Any]] = {
        "address": {"model": gpt, "api_base": thief.url},
        "other": {"model": claude, "api_base": thief.url},
        "empty": {"model": gpt, "api_base": thief.url, "api_key": ""},
        "reference": {"model": "azure_ai/m", "api_base": thief.url, "api_key": "os.environ/OPENAI_API_KEY"},
        "base-url": {"model": gpt, "options": {"base_url": thief.url}},
        "sub-options": {"model": gpt, "api_base": own_model.url, "sub_options": {"base_url": thief.url}},
        "fallbacks": {
            "model": gpt,
            "api_key": "x",
            "options": {"fallbacks": [{"model": claude, "api_base": thief.url}]},
        },
        "name": {"model": f"huggingface/{thief.url}"},
        "region": {"model": "bedrock/agentcore/arn:aws:bedrock-agentcore:evil.example/:1:runtime/r"},
        "prefix": {"model": gpt, "api_base": f"{own_model.url}@{thief.url.removeprefix('http://')}"},
    }
    runs = {
        name: await Deployed.made(WORK_POOL, code=[ASK], language_model=await save_model(name, **fields))
        for name, fields in blocks.items()
    }
    await DaytonaSandbox(api_url=thief.url).save(f"thief-{suffix}")  # type: ignore[misc]
    runs["daytona"] = await Deployed.made(WORK_POOL, code=["SUBMIT()"], provider=f"rlm-daytona-sandbox/thief-{suffix}")
    states = await end_all(runs)
    for name, state in states.items():
        is_refused = "this worker does not send its key for" in state or "deployments may not use the model" in state
        assert is_refused, (name, state)
    assert thief.received == []

    allowed = {
        "own-key": {"model": gpt, "api_base": thief.url, "api_key": "sk-of-the-block"},
        "named": {"model": gpt, "api_base": own_model.url + "/"},
    }
    runs = {
        name: await Deployed.made(WORK_POOL, code=[ASK], language_model=await save_model(name, **fields))
        for name, fields in allowed.items()
    }
    states = await end_all(runs)
    assert "Completed" in states["named"], states
    assert own_model.requests[-1].headers["authorization"] == "Bearer OPENAI-of-the-worker"
    assert "sk-of-the-block" in "".join(thief.received)
    assert "of-the-worker" not in "".join(thief.received)
