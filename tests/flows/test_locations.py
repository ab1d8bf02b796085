"""Results and inputs in places that several machines reach: a bucket, and Prefect's storage blocks."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, LogFilter, LogFilterFlowRunId
from prefect.filesystems import LocalFileSystem, RemoteFileSystem

from rlm_batch import ConfigurationError, batch, sweep
from rlm_batch.blocks.host_files.cache import resolve_cache_root
from rlm_batch.blocks.storage.local_volume import find_volumes_root
from rlm_batch.blocks.storage.location import write_file
from rlm_batch.blocks.storage.location_parsing import parse_location
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import list_run_records

from ..infra.deployed import Deployed
from ..infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ..infra.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.anyio

SECRET = "a-secret-that-nobody-may-read"
KILLED = (
    COUNT_EXECUTION
    + "import time\ntimes = count_execution(x)\nif x in (3, 4) and times == 1:\n    time.sleep(1000)\nSUBMIT(y=x * x)"
)


@pytest.fixture
async def block(server: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save a block that alone has the bucket's credentials, and return a location in it."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    settings = {"key": "key-of-the-block", "secret": SECRET, "client_kwargs": {"endpoint_url": s3.hello["url"]}}
    await RemoteFileSystem(basepath="s3://results/base", settings=settings).save(name)  # type: ignore[misc]
    return f"block://remote-file-system/{name}"


def begin_and_kill(place: str, results: int, folder: Path, counter: ExecutionCounter) -> None:
    """Run the batch in a process; kill it once this many results are stored and more executions are running."""
    program = (
        "import asyncio, sys\nfrom rlm_batch import batch\nfrom rlm_batch.tasks.ledger import ledger as upload_buffer\n"
        "upload_buffer.SEND_INTERVAL_SECONDS = 0.2\n"
        "asyncio.run(batch(sys.argv[1], sys.argv[2] + '/inputs.jsonl', provider='local:none', max_workers=2,\n"
        "                  results_path=sys.argv[2]))\n"
    )
    environment = {**os.environ, "TMPDIR": str(folder)}  # the killed process leaves its sandboxes' folders here
    with subprocess.Popen([sys.executable, "-c", program, KILLED, place], env=environment) as run:
        try:
            wait_until(lambda: len(Ledger(place).load_latest_lines()) >= results and len(counter.counts) > results + 1)
        finally:
            run.kill()


@pytest.mark.full
async def test_a_killed_batch_resumes_and_reports_from_the_bucket(
    s3: Any, counter: ExecutionCounter, tmp_path: Path
) -> None:
    inputs = [{"x": x, "address": counter.address} for x in range(6)]
    place = "s3://results/killed"
    write_file(parse_location(place) / "inputs.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in inputs))
    await asyncio.to_thread(begin_and_kill, place, 3, tmp_path, counter)
    assert len(Ledger(place).load_latest_lines()) == 3
    done = {x for x, times in counter.counts.items() if times}
    results = await batch(KILLED, f"{place}/inputs.jsonl", provider="local:none", results_path=place)
    assert [result.y for result in results] == [x * x for x in range(6)]
    assert {x: counter.counts[x] for x in "012"} == {"0": 1, "1": 1, "2": 1}
    assert done > {"0", "1", "2"}
    ledger = open_run_ledger(place)
    assert [outcome.y for outcome in ledger.read_outcomes()] == [x * x for x in range(6)]
    assert [(record.results_path, record.ended is None) for record in ledger.records] == [(place, True), (place, False)]


async def test_a_storage_block_opens_the_bucket_without_showing_its_secret(
    block: str, s3: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # botocore's DEBUG log has the key's id, but never the secret
    place = f"{block}/sweeps/one"
    report = await sweep("SUBMIT(loss=x)", {"x": [2, 1]}, objective="loss", provider="local:none", results_path=place)
    assert report.results_path == place
    assert report.best.loss == 1
    assert [outcome.loss for outcome in open_run_ledger(place).read_outcomes()] == [2, 1]
    s3.ask("refuse", methods=["PUT"])
    with pytest.raises(ConfigurationError, match="expired") as raised:
        await batch(["1"], provider="local:none", results_path=f"{block}/other")
    s3.ask("refuse", methods=[])
    async with get_client() as client:
        run = await client.read_flow_run(uuid.UUID(open_run_ledger(place).records[0].flow_run_id))
        of_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        logs = [line.message for line in await client.read_logs(of_run)]
        published = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        artifacts = [str(artifact.data) for artifact in await client.read_artifacts(artifact_filter=published)]
    ledger = parse_location(place)
    kept = [(ledger / name).read_bytes().decode() for name in ledger.list_sizes()]  # type: ignore[union-attr]
    assert len(kept) >= 2  # the run's record, and one part per upload
    assert len(artifacts) > 0
    texts = [str(run.parameters), str(raised.value), repr(raised.value.__cause__), caplog.text, *kept, *artifacts]
    assert any(place in text for text in (*logs, caplog.text))
    for text in (*texts, *logs):
        assert SECRET not in text
        assert "key-of-the-block" not in text


@pytest.mark.full
async def test_a_run_whose_last_results_cannot_be_uploaded_fails(
    s3: Any, counter: ExecutionCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlm_batch.tasks.ledger.ledger.RETRY_PATIENCE_SECONDS", 0.5)
    code, inputs = COUNT_EXECUTION + "count_execution(x)\nSUBMIT(1)", [{"x": 1, "address": counter.address}]
    counter.may_go_on.clear()
    run = asyncio.create_task(batch(code, inputs, provider="local:none", results_path="s3://results/job"))
    await wait_until_async(lambda: counter.counts, "an execution")
    s3.ask("refuse", methods=["PUT"])
    counter.may_go_on.set()
    with pytest.raises(OSError, match=r"could not be written to the ledger s3://results/job: .*expired"):
        await run
    s3.ask("refuse", methods=[])
    assert Ledger("s3://results/job").load_latest_lines() == {}


async def test_a_block_of_a_directory_stores_results_there(server: str, tmp_path: Path) -> None:
    name = f"share-{uuid.uuid4().hex[:8]}"
    await LocalFileSystem(basepath=str(tmp_path / "share")).save(name)  # type: ignore[misc]
    (result,) = await batch(["SUBMIT(1)"], provider="local:none", results_path=f"block://local-file-system/{name}/a/b")
    assert (
        [outcome.output for outcome in open_run_ledger(str(tmp_path / "share/a/b")).read_outcomes()]
        == [result.output]
        == [1]
    )
    assert list_run_records(tmp_path / "share/a/b")[0].results_path == str(tmp_path / "share/a/b")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"results_path": "block://remote-file-system/nosuch/job"}, "there is no block remote-file-system/nosuch"),
        ({"results_path": "s3://no-such-bucket/job"}, "bucket does not exist"),
        ({"results_path": "gs://bucket/job"}, "cannot be used: Please install gcsfs"),
        ({"results_path": "simplecache::s3://bucket/job"}, "is not a location: write a text such as"),
        ({"results_path": "s3://key:secret-of-the-url@bucket/job"}, "contains a password"),
        ({"results_path": "file://data/job"}, "three slashes"),
        ({"results_path": "block://remote-file-system"}, "names no block"),
        ({"inputs": "s3://results/nosuch.jsonl"}, "the input file s3://results/nosuch.jsonl cannot be read"),
        ({"inputs": "nosuch://results/nosuch.jsonl"}, "cannot be used: Protocol not known: nosuch"),
        ({"results_path": "s3:/results/job"}, "is not a location"),
        ({"results_path": "gs:job"}, "is not a location"),
        ({"results_path": "file:/job"}, "is not a location"),
        ({"inputs": "S3:/results/x.jsonl"}, "is not a location"),
        ({"code": "@s3:/results/code.txt", "inputs": None}, "is not a location"),
        ({"code": "@s3://results/nosuch.txt", "inputs": None}, "the code in s3://results/nosuch.txt cannot be read"),
    ],
)
async def test_an_invalid_location_is_refused_with_one_sentence(s3: Any, parameters: dict[str, Any], said: str) -> None:
    arguments = {"code": "SUBMIT(x)", "inputs": [{"x": 1}], "provider": "local:none", **parameters}
    with pytest.raises(ConfigurationError, match=said) as raised:
        await batch(**arguments)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)
    assert not {"s3:", "gs:", "file:"} & set(os.listdir())


async def test_code_and_inputs_are_read_from_locations(s3: Any, tmp_path: Path) -> None:
    bucket = Ledger("s3://results/in")
    write_file(bucket.path / "code.txt", b"SUBMIT(y=x + 1)")
    write_file(bucket.path / "points.csv", b"x\n1\n2\n")
    (tmp_path / "points.csv").write_bytes(b"x\n1\n2\n")
    for inputs in ("s3://results/in/points.csv", f"file://{tmp_path}/points.csv"):
        results = await batch("@s3://results/in/code.txt", inputs, provider="local:none", max_workers=1)
        assert [result.y for result in results] == [2, 3]


@pytest.mark.parametrize("place", ["s3://results/root", "s3:/results/root", "file:results"])
async def test_directories_of_this_machine_are_no_locations(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLM_BATCH_VOLUMES", "RLM_BATCH_CACHE", "RLM_BATCH_RESULTS"):
        monkeypatch.setenv(name, place)
    for find in (lambda: find_volumes_root(None), lambda: find_volumes_root(place), resolve_cache_root):
        with pytest.raises(ConfigurationError, match=r"must be a directory of this machine|is not a location"):
            find()
    with pytest.raises(ConfigurationError, match=r"RLM_BATCH_RESULTS is .*, and must be a directory|is not a location"):
        await batch(["1"], provider="local:none")
    assert parse_location("./s3:notes") == Path("s3:notes").absolute()
    assert not os.path.exists("s3:")


# Prints what another machine gets as a flow run's result.
READER = """
import asyncio, socket, sys
from prefect import get_client

socket.gethostname = lambda: "another-machine"


async def read():
    async with get_client() as client:
        run = await client.read_flow_run(sys.argv[1])
    try:
        report = await run.state.aresult()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{report.results_path}: {[result.y for result in report.results]}"


print(asyncio.run(read()))
"""


async def test_another_machine_reads_the_result_of_a_run_from_its_bucket(s3: Any, tmp_path: Path) -> None:
    run = await Deployed.made(code=["SUBMIT(y=1)", "SUBMIT(y=2)"], provider="local", results_path="s3://results/shared")
    assert (await run.execute()).is_completed()
    assert await read_on_another_machine(run, tmp_path) == "s3://results/shared: [1, 2]"


async def test_another_machine_is_told_where_the_results_of_a_run_are(results: Path, tmp_path: Path) -> None:
    run = await Deployed.made(code=["SUBMIT(y=1)"], provider="local")
    assert (await run.execute()).is_completed()
    path = results / str(run.run.id)
    assert await read_on_another_machine(run, tmp_path) == f"{path}: [1]"  # Both mount the same directory.
    results.rename(tmp_path / "unmounted")
    text = await read_on_another_machine(run, tmp_path)
    assert text.startswith("ConfigurationError: ")
    assert f"The run wrote {path} on {socket.gethostname()}: read it there" in text


async def read_on_another_machine(run: Deployed, folder: Path) -> str:
    """Return what READER prints in a process with another home and other results."""
    home = str(folder / "another-home")
    environment = {
        **os.environ,
        "HOME": home,
        "PREFECT_HOME": f"{home}/.prefect",
        "RLM_BATCH_RESULTS": f"{home}/results",
    }
    words = [sys.executable, "-c", READER, str(run.run.id)]
    done = await asyncio.to_thread(
        subprocess.run, words, env=environment, check=True, capture_output=True, text=True, timeout=200
    )
    return done.stdout.strip()
