"""What a Modal sandbox is made of: image, packages, repository, resources, network."""

import asyncio
import base64
import hashlib
import http.server
import os
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, ConfigurationError, ModalInterpreter, ModalSandbox, SandboxStartError

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]
TOKEN = "ghp_of-the-repository"


def make_wheel(folder: Path, name: str) -> str:
    """The requirement of a package of one module, which is a wheel in a folder."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"NAME = {name!r}\n")
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files = [f"{name}.py", f"{metadata}/METADATA", f"{metadata}/WHEEL"]
        rows = []
        for file in files:
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(file)).digest()).rstrip(b"=").decode()
            rows.append(f"{file},sha256={digest},{len(wheel.read(file))}")
        wheel.writestr(f"{metadata}/RECORD", "\n".join([*rows, f"{metadata}/RECORD,,"]))
    return f"{name} @ file://{path}"


async def test_packages_are_built_into_the_image_once(modal_sandbox: Make, modal_standin: Any, tmp_path: Path) -> None:
    packages = [make_wheel(tmp_path, "first_of_two"), make_wheel(tmp_path, "second_of_two")]

    async def use(block: ModalSandbox) -> list[str]:
        async with block.interpreter() as interpreter:
            code = "import first_of_two, second_of_two\nSUBMIT(names=[first_of_two.NAME, second_of_two.NAME])"
            return (await interpreter.execute(code)).names

    block = modal_sandbox(packages=packages)
    found = await asyncio.gather(*(use(block) for _ in range(5)))
    assert found == [["first_of_two", "second_of_two"]] * 5
    assert await use(modal_sandbox(packages=packages)) == ["first_of_two", "second_of_two"]
    counts = modal_standin.ask("state")["counts"]
    assert counts["ImageGetOrCreate"] == 2  # Debian, and the packages on it
    async with modal_sandbox().interpreter() as interpreter:
        with pytest.raises(CodeError, match="No module named 'first_of_two'"):
            await interpreter.execute("import first_of_two")


async def test_the_python_of_the_default_image_is_not_the_hosts(modal_sandbox: Make, modal_standin: Any) -> None:
    async with modal_sandbox().interpreter():
        images = modal_standin.ask("state")["images"]
    assert any("FROM python:3.12" in lines[0] for lines in images.values())


async def test_an_image_of_a_registry_is_taken_as_it_is(modal_sandbox: Make, modal_standin: Any) -> None:
    async with modal_sandbox(image="python:3.13-slim").interpreter() as interpreter:
        assert (await interpreter.execute("SUBMIT(x=1)")).x == 1
        images = modal_standin.ask("state")["images"]
    assert any(lines[0] == "FROM python:3.13-slim" for lines in images.values())


async def test_resources_and_network_stand_in_the_creation(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox(cpu=2.0, memory_mib=512, region="eu", block_network=True)
    async with block.interpreter() as interpreter:
        code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', port), 2)\n    SUBMIT(reached=True)\n"
        code += "except OSError:\n    SUBMIT(reached=False)"
        port = int(modal_standin.hello["url"].rpartition(":")[2])
        assert not (await interpreter.execute(code, {"port": port})).reached
        (sandbox,) = modal_standin.ask("state")["sandboxes"].values()
    for text in ("milli_cpu: 2000", "memory_mb: 512", "memory_mb_max: 512", 'regions: "eu"', "BLOCKED"):
        assert text in sandbox["definition"]


async def test_names_that_code_may_reach_stand_in_the_creation(modal_sandbox: Make, modal_standin: Any) -> None:
    async with modal_sandbox(allowed_domains=["*.example.org"], allowed_cidrs=["10.0.0.0/8"]).interpreter():
        (sandbox,) = modal_standin.ask("state")["sandboxes"].values()
    for text in ("ALLOWLIST", "*.example.org", "10.0.0.0/8"):
        assert text in sandbox["definition"]


async def test_a_gpu_takes_the_other_backend_and_the_same_tests_hold(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox(gpu="T4", volume_name="of-gpus")
    async with block.interpreter() as interpreter:
        assert (await interpreter.execute("open('/data/a', 'w').write('x')\nSUBMIT(x=1)")).x == 1
        assert modal_standin.ask("volume", name="of-gpus") == {"a": "x"}
        (info,) = await block.list_sandboxes()
        assert info.labels["managed-by"] == "rlm-batch"
    counts = modal_standin.ask("state")["counts"]
    assert counts["SandboxCreate"] == counts["SandboxTerminate"] == 1
    assert "SandboxCreateV2" not in counts


@pytest.mark.full
async def test_two_blocks_of_one_process_share_their_handles(modal_sandbox: Make, modal_standin: Any) -> None:
    async def use() -> None:
        async with modal_sandbox(volume_name="shared-handles", app_name="shared-handles").interpreter():
            pass

    await asyncio.gather(*(use() for _ in range(10)))
    counts = modal_standin.ask("state")["counts"]
    assert counts["AppGetOrCreate"] == counts["VolumeGetOrCreate"] == 1
    assert counts["SandboxCreateV2"] == 10


@pytest.mark.full
async def test_whoever_waits_for_an_image_may_be_cancelled_alone(
    modal_sandbox: Make, modal_standin: Any, tmp_path: Path
) -> None:
    block = modal_sandbox(packages=[make_wheel(tmp_path, "waited_for")])
    modal_standin.ask("faults", rules=[{"method": "ImageGetOrCreate", "delay": 0.5}])
    first = asyncio.create_task(block.open(block.labels("")))
    other = asyncio.create_task(block.open(block.labels("")))
    await asyncio.sleep(0.2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await (await other).remove()


def test_the_interpreter_keeps_its_state_between_executions(
    modal_standin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", modal_standin.hello["token_id"])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", modal_standin.hello["token_secret"])
    with ModalInterpreter(timeout=20, workdir=str(tmp_path)) as interpreter:  # what is there on any machine
        interpreter.execute("data = [1, 2, 3]")
        result = interpreter.execute("SUBMIT(total=sum(data))")
        assert result.total == 6
        assert result.meta.provider == "modal"


# --------------------------------------------------------------------------------------------------------- repositories


class Served(http.server.SimpleHTTPRequestHandler):
    """Files for those who sign in."""

    def do_GET(self) -> None:
        """Refuses whoever has no token."""
        expected = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
        if self.path.startswith("/private") and self.headers.get("Authorization") != f"Basic {expected}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with two repositories of one history: public.git and private.git."""
    folder = tmp_path_factory.mktemp("repositories")
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }

    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=folder / "work", check=True, capture_output=True, env=os.environ | identity)

    (folder / "work").mkdir()
    git("init", "-q", "-b", "main")
    for number in (1, 2):
        (folder / "work" / "version.py").write_text(f"VERSION = {number}\n")
        git("add", ".")
        git("commit", "-q", "-m", f"version {number}")
        git("tag", f"v{number}")
    for name in ("public.git", "private.git"):
        git("clone", "-q", "--bare", ".", str(folder / name))
        subprocess.run(["git", "update-server-info"], cwd=folder / name, check=True)
    handler = partial(Served, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_code_runs_in_a_clone_of_the_repository(modal_sandbox: Make, repositories: str) -> None:
    block = modal_sandbox(repo_url=f"{repositories}/public.git")
    async with block.interpreter() as interpreter:
        result = await interpreter.execute("import os, version\nSUBMIT(version=version.VERSION, cwd=os.getcwd())")
    assert (result.version, result.cwd) == (2, "/sandbox")


async def test_the_clone_is_at_the_revision_that_was_asked_for(modal_sandbox: Make, repositories: str) -> None:
    block = modal_sandbox(repo_url=f"{repositories}/public.git", repo_ref="v1", workdir="/code/here")
    async with block.interpreter() as interpreter:
        result = await interpreter.execute("import os, version\nSUBMIT(version=version.VERSION, cwd=os.getcwd())")
    assert (result.version, result.cwd) == (1, "/code/here")


SEARCH = """
import glob, os
patterns = ("/sandbox/**/*", os.path.expanduser("~/*"), "/tmp/*", "/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline")
places = [path for pattern in patterns
          for path in glob.glob(pattern, recursive=True, include_hidden=True)]
found = []
for path in places:
    try:
        if os.path.isfile(path) and any(word in open(path, "rb").read() for word in words_as_bytes):
            found.append(path)
    except OSError:
        pass
SUBMIT(found=found, version=__import__("version").VERSION, looked=len(places))
"""


async def test_a_private_repository_is_cloned_and_its_token_is_nowhere_in_the_sandbox(
    modal_sandbox: Make, repositories: str
) -> None:
    block = modal_sandbox(repo_url=f"{repositories}/private.git", repo_token=TOKEN)
    secret = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
    async with block.interpreter() as interpreter:
        # In halves, so that the question is not its own answer.
        halves = [[TOKEN[:8], TOKEN[8:]], [secret[:8], secret[8:]]]
        code = "words_as_bytes = [''.join(pair).encode() for pair in halves]\n" + SEARCH
        result = await interpreter.execute(code, {"halves": halves})
    assert result.version == 2
    assert result.looked > 20
    assert result.found == []
    assert TOKEN not in str(await block.fingerprint())


async def test_a_private_repository_without_its_token_is_refused_on_the_host(
    modal_sandbox: Make, modal_standin: Any, repositories: str
) -> None:
    block = modal_sandbox(repo_url=f"{repositories}/private.git", repo_token="wrong")
    with pytest.raises(ConfigurationError, match="git ls-remote failed"):
        await block.open(block.labels(""))
    assert not modal_standin.ask("state")["counts"].get("SandboxCreateV2")


async def test_a_commit_that_is_not_there_leaves_no_sandbox(
    modal_sandbox: Make, modal_standin: Any, repositories: str
) -> None:
    block = modal_sandbox(repo_url=f"{repositories}/public.git", repo_ref="0" * 40)
    with pytest.raises(SandboxStartError, match="could not be cloned in the sandbox"):
        await block.open(block.labels(""))
    assert not modal_standin.ask("state")["sandboxes"]
