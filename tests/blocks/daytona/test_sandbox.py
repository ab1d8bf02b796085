"""Volumes, large values, repositories and packages in Daytona sandboxes."""

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from pydantic import SecretStr

from rlm_batch import ConfigurationError, DaytonaInterpreter, DaytonaSandbox, VolumeError

from ...standins.git_server import GitServer
from ...standins.wheels import write_wheel

pytestmark = pytest.mark.anyio

TOKEN = "token-of-the-repository"


# -- volumes


async def test_sandboxes_that_start_together_create_and_mount_one_volume(standin: Any) -> None:
    async with DaytonaSandbox().interpreter() as interpreter:
        assert not (await interpreter.execute("import os; SUBMIT(os.path.exists('/home/daytona/memory'))")).output
        assert standin.state()["sandboxes"][0]["volumes"] == []

    async def write(name: str) -> None:
        async with DaytonaSandbox(volume_name="new").interpreter() as interpreter:
            code = "import os; os.makedirs(f'/home/daytona/memory/{name}'); SUBMIT()"
            await interpreter.execute(code, {"name": name})

    await asyncio.gather(write("a"), write("b"), write("c"))
    assert [volume["name"] for volume in standin.state()["volumes"]] == ["new"]
    async with DaytonaSandbox(volume_name="new", volume_mount_path="/tmp/elsewhere").interpreter() as interpreter:
        result = await interpreter.execute("import os; SUBMIT(sorted(os.listdir('/tmp/elsewhere')))")
    assert result.output == ["a", "b", "c"]


# -- files


async def test_files_are_uploaded_and_downloaded() -> None:
    provider = DaytonaSandbox()
    sandbox = await provider.open(provider.labels(""))
    try:
        data = os.urandom(3_000_000)
        await sandbox.upload("deep/down/file", data)
        assert await sandbox.download("deep/down/file") == data
        assert await sandbox.download("/home/daytona/deep/down/file") == data
        with pytest.raises(VolumeError, match="none"):
            await sandbox.download("none")
        with pytest.raises(VolumeError, match="could not be written"):
            await sandbox.upload("/proc/nothing", b"")
    finally:
        await sandbox.remove()


def test_large_values_travel_as_files_that_are_deleted_afterwards(standin: Any) -> None:
    with DaytonaInterpreter(tools={"twice": lambda text: text * 2}) as interpreter:
        result = interpreter.execute("SUBMIT(text=text, n=len(twice('y' * 2_000_000)))", {"text": "é" * 400_000})
        assert result.text == "é" * 400_000
        assert result.n == 4_000_000
        left = interpreter.execute("import os; SUBMIT([list(os.scandir(x)) for x in os.scandir('/tmp')])").output
        assert left == [[]]
        counts = standin.state()["counts"]
        assert counts["POST /toolbox/*/files/bulk-upload"] == 2  # the variable and the tool's answer
        assert counts["POST /toolbox/*/files/bulk-download"] == 2  # the tool's argument and the result
        # The call that removes an uploaded or downloaded file may fail.
        standin.set(fault_rate=1.0, fault_where="DELETE .*/files", faults=["lost"], fault_times=1)
        assert interpreter.execute("SUBMIT(text='t' * 900_000)").text == "t" * 900_000
    assert standin.state()["faults"] == {"lost": 1}


# -- repositories


HERE = """
import os, subprocess
from helper_of_the_repository import NAME
head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
SUBMIT(text=open("here.txt").read(), name=NAME, cwd=os.path.basename(os.getcwd()), head=head)
"""


async def test_code_runs_in_a_clone_at_a_branch_a_tag_or_a_commit(repository: GitServer) -> None:
    async def check(ref: str | None, name: str) -> None:
        async with DaytonaSandbox(repo_url=repository.url, repo_ref=ref).interpreter() as interpreter:
            outputs = (await interpreter.execute(HERE)).outputs
        assert outputs == {"text": name, "name": name, "cwd": "my-repo", "head": repository.commits[name]}, ref

    refs = {None: "main", "side": "side", "v1": "tagged", "v2": "released"}
    refs |= {repository.commits[name]: name for name in ("first", "released", "side")}
    await asyncio.gather(*(check(ref, name) for ref, name in refs.items()))


@pytest.mark.parametrize("name", ["main", "side"])
async def test_a_private_repository_is_cloned_without_leaving_its_token(repository: GitServer, name: str) -> None:
    repository.token = TOKEN
    provider = DaytonaSandbox(repo_url=repository.url, repo_token=SecretStr(TOKEN), repo_ref=repository.commits[name])
    search = """
        import os
        token, coded = a + b, c + d
        def texts():
            yield from (f"{name}={value}" for name, value in os.environ.items())
            for root in ("/home/daytona", "/tmp", "/proc"):
                for folder, names, files in os.walk(root):
                    if folder.startswith("/proc"):
                        names[:] = [n for n in names if n.isdigit()] if folder == "/proc" else []
                        files = [f for f in files if f in ("cmdline", "environ")]
                    for file in files:
                        try:
                            yield open(os.path.join(folder, file), errors="replace").read()
                        except OSError:
                            pass
        found = list(texts())
        SUBMIT(seen=any(token in text or coded in text for text in found), n=len(found))
    """
    async with provider.interpreter() as interpreter:
        assert (await interpreter.execute(HERE)).text == name
        # The search would find its own variables, so the code gets the token in halves.
        coded = repository.password
        halves = {"a": TOKEN[:9], "b": TOKEN[9:], "c": coded[:9], "d": coded[9:]}
        result = await interpreter.execute(dedent(search), halves)
    assert result.n > 5
    assert not result.seen


async def test_a_repository_that_cannot_be_cloned_says_what_to_check(repository: GitServer) -> None:
    async def refuse(message: str, **fields: Any) -> None:
        provider = DaytonaSandbox(repo_url=repository.url, **fields)
        with pytest.raises(ConfigurationError, match=message):
            await provider.open(provider.labels(""))

    await refuse("no branch or tag 'nothing'", repo_ref="nothing")
    await refuse(f"could not be cloned at {'0' * 40}.*check repo_url", repo_ref="0" * 40)
    repository.token = TOKEN
    await refuse("git ls-remote failed", repo_token=SecretStr("wrong"))


# -- packages


@pytest.mark.requires("pip")
async def test_packages_are_installed_before_the_first_execution_or_pips_error_is_shown(standin: Any) -> None:
    provider = DaytonaSandbox(volume_name="wheels")
    await (await provider.open(provider.labels(""))).remove()
    (volume,) = standin.state()["volumes"]
    wheel = write_wheel(Path(volume["folder"]), "tiny_of_the_tests")
    package = f"tiny-of-the-tests @ file:///home/daytona/memory/{wheel.name}"
    async with DaytonaSandbox(volume_name="wheels", packages=[package]).interpreter() as interpreter:
        assert (
            await interpreter.execute("from tiny_of_the_tests import NAME; SUBMIT(NAME)")
        ).output == "tiny_of_the_tests"
    provider = DaytonaSandbox(packages=["/nowhere/tiny-1.0-py3-none-any.whl"])
    words = r"pip could not install /nowhere/tiny-1.0-py3-none-any.whl .*\n.*nowhere"
    with pytest.raises(ConfigurationError, match=words):
        await provider.open(provider.labels(""))


# -- programs


def test_a_program_processes_chunks_with_a_clone_and_a_shared_volume(repository: GitServer, standin: Any) -> None:
    def process_chunk(chunk_id: int, data: list[int]) -> Any:
        code = (
            f"import json, os\n"
            f"data = {data!r}\n"
            f"processed = [x * 2 for x in data]\n"
            f"os.makedirs('/home/daytona/memory/artifacts', exist_ok=True)\n"
            f"with open(f'/home/daytona/memory/artifacts/chunk_{chunk_id}.json', 'w') as f:\n"
            f"    json.dump(processed, f)\n"
            f"SUBMIT(chunk_id={chunk_id}, count=len(processed))"
        )
        interp = DaytonaInterpreter(repo_url=repository.url, timeout=120, volume_name="rlm-volume-dspy")
        interp.start()
        try:
            return interp.execute(code)
        finally:
            interp.shutdown()

    chunks = {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8, 9]}
    with ThreadPoolExecutor(max_workers=3) as pool:
        futures = [pool.submit(process_chunk, chunk_id, data) for chunk_id, data in chunks.items()]
        assert [(f.result().chunk_id, f.result().count) for f in futures] == [(0, 3), (1, 3), (2, 3)]
    (volume,) = standin.state()["volumes"]
    written = {path.name: path.read_text() for path in Path(volume["folder"], "artifacts").iterdir()}
    assert written == {
        "chunk_0.json": "[2, 4, 6]",
        "chunk_1.json": "[8, 10, 12]",
        "chunk_2.json": "[14, 16, 18]",
    }


@pytest.mark.full
def test_only_a_daytona_sandbox_loads_the_sdk_and_calls_no_other_server(standin: Any) -> None:
    code = """if True:
        import sys
        addresses = set()
        sys.addaudithook(lambda event, args: addresses.add(str(args[1])) if event == "socket.connect" else None)
        from rlm_batch import DaytonaInterpreter, DaytonaSandbox, LocalInterpreter, batch
        DaytonaSandbox(), DaytonaInterpreter()
        with LocalInterpreter(isolation="none") as interpreter:
            interpreter.execute("SUBMIT(1)")
        assert "daytona" not in sys.modules
        with DaytonaInterpreter(volume_name="v") as interpreter:
            assert interpreter.execute("SUBMIT(1)").output == 1
        assert addresses and all("127.0.0.1" in address for address in addresses), addresses
    """
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **standin.environment}, timeout=100, check=True)
