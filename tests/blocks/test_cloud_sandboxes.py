"""Sandboxes of Daytona and Modal: their loss, files and clones, which have the revision and no trace of the token."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, ModalSandbox, OutcomeUnknown, SandboxLost, VolumeError

from ..infra.secret_search import SEARCH, halve
from ..standins.git_server import GitServer

pytestmark = [pytest.mark.anyio, pytest.mark.requires("namespaces")]
TOKEN = "ghp_of-the-repository"
HERE = """
import subprocess
from helper_of_the_repository import NAME
head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
SUBMIT(text=open("here.txt").read(), name=NAME, head=head)
"""


@pytest.fixture(params=["daytona", "modal"])
def make(request: Any, running_daytona: object, modal_process: object, no_process_left: None) -> Callable[..., Any]:
    """Return a function that makes blocks of a provider from their fields."""
    if request.param == "daytona":
        request.getfixturevalue("daytona")
        return DaytonaSandbox
    hello = request.getfixturevalue("modal_standin").hello
    return partial(ModalSandbox, token_id=hello["token_id"], token_secret=hello["token_secret"])


async def test_the_loss_of_a_sandbox_is_an_error_that_says_whether_code_ran(make: Callable[..., Any]) -> None:
    block, is_running = make(), asyncio.Event()
    async with block.interpreter(tools={"begin": is_running.set}) as interpreter:
        running = asyncio.create_task(interpreter.execute("begin()\nimport time; time.sleep(1000)"))
        await is_running.wait()
        (info,) = await block.list_sandboxes()
        await block.delete_sandbox(info.id)
        with pytest.raises(OutcomeUnknown, match="set `idempotent`"):
            await running
        assert not interpreter.is_alive
        with pytest.raises(SandboxLost, match="in a new one"):
            await interpreter.execute("SUBMIT(1)")


PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from rlm_batch import DaytonaInterpreter, ModalInterpreter

Interpreter = {"daytona": DaytonaInterpreter, "modal": ModalInterpreter}[sys.argv[1]]

def process_chunk(chunk_id, data):
    code = (
        f"import json\\n"
        f"data = {repr(data)}\\n"
        f"processed = [x * 2 for x in data]\\n"
        f"save_to_volume(f'results/chunk_{chunk_id}.json', json.dumps(processed))\\n"
        f"SUBMIT(chunk_id={chunk_id}, count=len(processed))"
    )
    with Interpreter(repo_url=sys.argv[2], timeout=120, volume_name="rlm-volume-dspy") as interp:
        return interp.execute(code)

chunks = {0: [1,2,3], 1: [4,5,6], 2: [7,8,9]}

with ThreadPoolExecutor(max_workers=3) as pool:
    futures = [pool.submit(process_chunk, cid, data) for cid, data in chunks.items()]
    for f in futures:
        r = f.result()
        print(f"Chunk {r.chunk_id}: {r.count} items")
"""


async def test_a_program_that_processes_chunks_runs_without_warnings(
    make: Callable[..., Any], repository: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make()
    for name in ("token_id", "token_secret"):
        if value := getattr(block, name, None):
            monkeypatch.setenv(f"MODAL_{name.upper()}", value.get_secret_value())
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    command = [sys.executable, "-c", PROGRAM, block.provider_name, repository.url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=500, check=False)
    assert (done.stdout, done.stderr) == ("Chunk 0: 3 items\nChunk 1: 3 items\nChunk 2: 3 items\n", "")
    volume = await block.volume("rlm-volume-dspy")
    written = {file.path: await volume.get(file.path) for file in await volume.ls("results")}
    await volume.close()
    assert written == {
        "results/chunk_0.json": b"[2, 4, 6]",
        "results/chunk_1.json": b"[8, 10, 12]",
        "results/chunk_2.json": b"[14, 16, 18]",
    }


async def test_files_are_uploaded_and_downloaded(make: Callable[..., Any]) -> None:
    block = make()
    sandbox = await block.open(block.labels(""))
    try:
        data = os.urandom(3_000_000)
        await sandbox.upload("deep/down/file", data)
        assert await sandbox.download("deep/down/file") == data
        for path in ("none", "deep"):
            with pytest.raises(VolumeError, match=path):
                await sandbox.download(path)
        with pytest.raises(VolumeError, match="could not be written"):
            await sandbox.upload("deep", b"")
    finally:
        await sandbox.remove()


async def test_code_runs_in_a_clone_at_a_branch_a_tag_or_a_commit(
    make: Callable[..., Any], repository: GitServer
) -> None:
    async def check(ref: str | None, name: str) -> None:
        async with make(repo_url=repository.url, repo_ref=ref).interpreter() as interpreter:
            outputs = (await interpreter.execute(HERE)).outputs
        assert outputs == {"text": name, "name": name, "head": repository.commits[name]}, ref

    refs = {None: "main", "side": "side", "v1": "tagged", "v2": "released"}
    refs |= {repository.commits[name]: name for name in ("first", "released", "side")}
    await asyncio.gather(*(check(ref, name) for ref, name in refs.items()))


async def test_a_private_repository_is_cloned_without_leaving_its_token(
    make: Callable[..., Any], repository: GitServer
) -> None:
    repository.token = TOKEN
    block = make(repo_url=repository.url, repo_token=TOKEN)
    async with block.interpreter() as interpreter:
        result = await interpreter.execute(SEARCH, {"halves": halve(TOKEN, repository.password)})
    assert (result.name, result.found) == ("main", [])
    assert result.looked > 20
    assert TOKEN not in str(await block.fingerprint())


async def test_a_repository_that_cannot_be_cloned_says_what_to_check_and_leaves_no_sandbox(
    make: Callable[..., Any], repository: GitServer
) -> None:
    async def refuse(message: str, **fields: Any) -> None:
        block = make(repo_url=repository.url, **fields)
        with pytest.raises(ConfigurationError, match=message):
            await block.open(block.labels(""))
        assert await block.list_sandboxes() == []

    await refuse("no branch or tag 'nothing'", repo_ref="nothing")
    await refuse(r"could not be cloned at 0+ in a sandbox.*check repo_url", repo_ref="0" * 40)
    repository.token = TOKEN
    await refuse("git ls-remote failed", repo_token="wrong")
