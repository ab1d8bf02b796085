"""The definition of a Modal sandbox: image, packages, repository, resources and network."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, ModalSandbox
from rlm_batch.blocks.modal.creation import build_options

from ...infra.secret_search import SEARCH, halve
from ...infra.waiting import wait_until_async
from ...standins.git_server import GitServer
from ...standins.wheels import write_wheel

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]
TOKEN = "ghp_of-the-repository"


async def test_packages_are_built_into_the_image_once_and_its_handles_are_shared(
    modal_sandbox: Make, modal_standin: Any, tmp_path: Path
) -> None:
    packages = [f"{name} @ file://{write_wheel(tmp_path, name)}" for name in ("first_of_two", "second_of_two")]

    async def use() -> None:
        block = modal_sandbox(packages=packages, volume_name="shared-handles", app_name="shared-handles")
        async with block.interpreter() as interpreter:
            code = "import first_of_two, second_of_two\nSUBMIT(names=[first_of_two.NAME, second_of_two.NAME])"
            assert (await interpreter.execute(code)).names == ["first_of_two", "second_of_two"]

    await asyncio.gather(*(use() for _ in range(3)))
    await use()
    counts = modal_standin.ask("state")["counts"]
    assert counts["ImageGetOrCreate"] == 2  # one image is Debian, and one adds the packages
    assert counts["AppGetOrCreate"] == counts["VolumeGetOrCreate"] == 1
    assert counts["SandboxCreateV2"] == 4
    async with modal_sandbox().interpreter() as interpreter:
        with pytest.raises(CodeError, match="No module named 'first_of_two'"):
            await interpreter.execute("import first_of_two")


async def test_cancelling_one_waiter_keeps_the_image_build_for_others(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox(image="python:3.11-slim")
    modal_standin.ask("faults", rules=[{"method": "ImageGetOrCreate", "delay": 3600.0}])
    first = asyncio.create_task(block.open(block.labels("")))
    other = asyncio.create_task(block.open(block.labels("")))
    await wait_until_async(
        lambda: modal_standin.ask("state")["counts"].get("ImageGetOrCreate"), "the image is asked for"
    )
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    modal_standin.ask("faults", rules=[])
    await (await other).remove()


async def test_the_creation_has_the_blocks_settings(modal_sandbox: Make, modal_standin: Any) -> None:
    code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', port), 60)\n    SUBMIT(reached=True)\n"
    code += "except OSError:\n    SUBMIT(reached=False)"
    block = modal_sandbox(cpu=2.0, memory_mib=512, region="eu", block_network=True, image="python:3.13-slim")
    async with block.interpreter() as interpreter:
        port = int(modal_standin.hello["url"].rpartition(":")[2])
        assert not (await interpreter.execute(code, {"port": port})).reached
        (sandbox,) = modal_standin.ask("state")["sandboxes"].values()
    for text in ("milli_cpu: 2000", "memory_mb: 512", "memory_mb_max: 512", 'regions: "eu"', "BLOCKED"):
        assert text in sandbox["definition"]
    async with modal_sandbox(allowed_domains=["*.example.org"], allowed_cidrs=["10.0.0.0/8"]).interpreter():
        (sandbox,) = modal_standin.ask("state")["sandboxes"].values()
    for text in ("ALLOWLIST", "*.example.org", "10.0.0.0/8"):
        assert text in sandbox["definition"]
    lines = [lines[0] for lines in modal_standin.ask("state")["images"].values()]
    assert "FROM python:3.13-slim" in lines
    assert any("FROM python:3.12" in line for line in lines)  # the default image of a block
    # Modal creates sandboxes with a GPU on another backend, which the stand-in does not have.
    assert build_options(modal_sandbox(gpu="T4"), {}, None)["gpu"] == "T4"


# -- repositories


async def test_sandboxes_start_from_an_image_with_the_set_up_and_the_clone(
    modal_sandbox: Make, modal_standin: Any, repository: GitServer
) -> None:
    repository.token = TOKEN
    earlier = modal_standin.ask("state")["images"]  # Other tests build images on the same stand-in.
    block = modal_sandbox(
        repo_url=repository.url, repo_token=TOKEN, setup_snapshot="always",
        setup="mkdir /made\necho 'a b' > /made/file", packages=[repository.add_wheel("wheel_of_an_image")],
    )  # fmt: skip

    async def run_one() -> Any:
        async with block.interpreter() as interpreter:
            code = SEARCH.replace("SUBMIT(", "import wheel_of_an_image\nSUBMIT(setup=open('/made/file').read(), ")
            return await interpreter.execute(code, {"halves": halve(TOKEN, repository.password)})

    for result in await asyncio.gather(*(run_one() for _ in range(4))):
        assert (result.name, result.setup, result.found) == ("main", "a b\n", [])
    state = modal_standin.ask("state")
    lines = [line for image, commands in state["images"].items() if image not in earlier for line in commands]
    assert len([line for line in lines if "git fetch" in line]) == 1
    assert not any(TOKEN in line or repository.password in line for line in lines)
    assert state["counts"]["SandboxCreateV2"] == 4
    assert repository.downloads == {"clone": 1, "wheel": 1}


async def test_a_clone_that_no_image_can_have_is_made_in_each_sandbox(
    modal_sandbox: Make, modal_standin: Any, repository: GitServer, caplog: pytest.LogCaptureFixture
) -> None:
    modal_standin.ask("set", build_error="no network in builds")
    block = modal_sandbox(repo_url=repository.url, setup_snapshot="always")
    for _ in range(2):
        async with block.interpreter() as interpreter:
            result = await interpreter.execute("from helper_of_the_repository import NAME\nSUBMIT(name=NAME)")
            assert result.name == "main"
    assert caplog.text.count("every sandbox clones the repository") == 1
    assert "no network in builds" in caplog.text


async def test_a_failed_set_up_says_why(modal_sandbox: Make, modal_standin: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the reason; correct `image`, `setup` or `packages`"):
        await modal_sandbox(setup="echo the reason; exit 3").open({})
    assert not modal_standin.ask("state")["sandboxes"]


async def test_a_clone_that_is_cancelled_leaves_no_sandbox_and_is_made_again(
    modal_sandbox: Make, modal_standin: Any, repository: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = modal_sandbox(repo_url=repository.url)
    monkeypatch.setitem(repository.delays, "clone", 3600.0)
    opening = asyncio.create_task(block.open(block.labels("")))
    await wait_until_async(lambda: repository.downloads["clone"], "the clone has begun")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await wait_until_async(lambda: not modal_standin.ask("state")["sandboxes"], "no sandbox is left")
    repository.delays.clear()
    await (await block.open(block.labels(""))).remove()
