"""What code finds in a sandbox of Daytona's: volumes, repositories, packages, large values."""

import asyncio
import base64
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from rlm_batch import CodeError, ConfigurationError, DaytonaInterpreter, DaytonaSandbox, VolumeError

pytestmark = pytest.mark.requires("namespaces")  # what is found at a path of the sandbox's own

TOKEN = "token-of-the-repository"


@pytest.fixture(autouse=True)
def standin(daytona: Any) -> Any:
    return daytona


# -- volumes


def test_a_volume_is_made_and_what_one_sandbox_writes_another_reads(standin: Any) -> None:
    with DaytonaInterpreter(volume_name="shared") as interpreter:
        code = "import os; os.makedirs('/home/daytona/memory/a'); open('/home/daytona/memory/a/b', 'w').write('c')"
        interpreter.execute(code)
    with DaytonaInterpreter(volume_name="shared", volume_mount_path="/tmp/elsewhere") as interpreter:
        assert interpreter.execute("SUBMIT(open('/tmp/elsewhere/a/b').read())").output == "c"
    assert [volume["name"] for volume in standin.state()["volumes"]] == ["shared"]


def test_sandboxes_that_start_together_make_one_volume(standin: Any) -> None:
    async def one(provider: DaytonaSandbox) -> bool:
        async with provider.interpreter() as interpreter:
            return (await interpreter.execute("import os; SUBMIT(os.path.isdir('/home/daytona/memory'))")).output

    async def main() -> list[bool]:
        return await asyncio.gather(*(one(DaytonaSandbox(volume_name="new")) for _ in range(5)))

    assert asyncio.run(main()) == [True] * 5
    assert len(standin.state()["volumes"]) == 1


@pytest.mark.parametrize(
    "code",
    [
        "os.rename(path, path + '2')",
        "os.chmod(path, 0o600)",
        "open(path, 'a')",
        "open(path, 'r+')",
        "fcntl.flock(open(path), fcntl.LOCK_EX)",
    ],
)
def test_a_volume_refuses_what_the_real_one_refuses(code: str) -> None:
    with DaytonaInterpreter(volume_name="v") as interpreter:
        interpreter.execute("import fcntl, os; path = '/home/daytona/memory/f'; open(path, 'w').write('x')")
        with pytest.raises(CodeError, match=r"OSError|PermissionError"):
            interpreter.execute(code)
        assert interpreter.execute("open(path, 'w').write('whole'); SUBMIT(open(path).read())").output == "whole"


def test_without_a_volume_nothing_is_mounted(standin: Any) -> None:
    with DaytonaInterpreter() as interpreter:
        assert not interpreter.execute("import os; SUBMIT(os.path.exists('/home/daytona/memory'))").output
        assert standin.state()["sandboxes"][0]["volumes"] == []


# -- files


def test_files_go_up_and_come_down() -> None:
    async def main() -> None:
        provider = DaytonaSandbox()
        box = await provider.open(provider.labels(""))
        try:
            data = os.urandom(3_000_000)
            await box.upload("deep/down/file", data)
            assert await box.download("deep/down/file") == data
            assert await box.download("/home/daytona/deep/down/file") == data
            with pytest.raises(VolumeError, match="none"):
                await box.download("none")
            with pytest.raises(VolumeError, match="could not be written"):
                await box.upload("/proc/nothing", b"")
        finally:
            await box.remove()

    asyncio.run(main())


def test_large_values_go_as_files_both_ways_and_none_is_left(standin: Any) -> None:
    with DaytonaInterpreter(tools={"twice": lambda text: text * 2}) as interpreter:
        result = interpreter.execute("SUBMIT(text=text, n=len(twice('y' * 2_000_000)))", {"text": "é" * 400_000})
        assert result.text == "é" * 400_000
        assert result.n == 4_000_000
        left = interpreter.execute("import os; SUBMIT([list(os.scandir(x)) for x in os.scandir('/tmp')])").output
    assert left == [[]]
    counts = standin.state()["counts"]
    assert counts["POST /toolbox/*/files/bulk-upload"] == 2  # the variable, the tool's answer
    assert counts["POST /toolbox/*/files/bulk-download"] == 2  # the tool's argument, the result


@pytest.mark.parametrize("fault", ["lost", pytest.param("500", marks=pytest.mark.full)])
def test_a_large_value_arrives_although_the_call_that_removes_its_file_fails(standin: Any, fault: str) -> None:
    times = 100 if fault == "500" else 1
    standin.set(fault_rate=1.0, fault_where="DELETE .*/files", faults=[fault], fault_times=times)
    with DaytonaInterpreter(timeout=20) as interpreter:
        assert interpreter.execute("SUBMIT(text='t' * 900_000)").text == "t" * 900_000
    assert standin.state()["faults"][fault]


def test_a_repeated_input_runs_nothing_twice(standin: Any) -> None:
    standin.set(fault_rate=1.0, faults=["drop"], fault_times=3, fault_where="/input$", seed=3)
    with DaytonaInterpreter() as interpreter:
        for _ in range(5):
            interpreter.execute("runs = globals().get('runs', 0) + 1")
        assert interpreter.execute("SUBMIT(runs)").output == 5


# -- repositories


def git(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z"}
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "init.defaultBranch=main")
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Repository:
    """A Git repository that is served over HTTP on loopback: the address, and the commits by name."""

    def __init__(self, folder: Path) -> None:
        work = folder / "work"
        work.mkdir(parents=True)
        git("init", cwd=work)
        self.commits: dict[str, str] = {}
        for name in ("first", "tagged", "main"):
            self.add(work, name)
        git("tag", "-a", "v1", "-m", "one", self.commits["tagged"], cwd=work)
        git("checkout", "-q", "-b", "side", cwd=work)
        self.add(work, "released")
        git("tag", "-a", "v2", "-m", "two", self.commits["released"], cwd=work)
        self.add(work, "side")
        git("checkout", "-q", "main", cwd=work)
        git("clone", "-q", "--bare", str(work), str(folder / "served" / "my-repo.git"), cwd=folder)
        git("update-server-info", cwd=folder / "served" / "my-repo.git")
        repository = self
        self.needed: str | None = None

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                pair = base64.b64encode(f"x-access-token:{repository.needed}".encode()).decode()
                if repository.needed is not None and self.headers.get("Authorization") != f"Basic {pair}":
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="tests"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    super().do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder / "served")))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/my-repo.git"

    def add(self, work: Path, name: str) -> None:
        (work / "here.txt").write_text(name)
        (work / "helper_of_the_repository.py").write_text(f"NAME = {name!r}\n")
        git("add", ".", cwd=work)
        git("commit", "-q", "-m", name, cwd=work)
        self.commits[name] = git("rev-parse", "HEAD", cwd=work)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    repository = Repository(tmp_path)
    yield repository
    repository.close()


HERE = """
import os, subprocess
from helper_of_the_repository import NAME
head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
SUBMIT(text=open("here.txt").read(), name=NAME, cwd=os.path.basename(os.getcwd()), head=head)
"""


@pytest.mark.parametrize(("ref", "name"), [(None, "main"), ("main", "main"), ("side", "side"), ("v1", "tagged")])
def test_code_runs_in_a_clone_at_a_branch_or_a_tag(repository: Repository, ref: str | None, name: str) -> None:
    with DaytonaInterpreter(repo_url=repository.url, repo_ref=ref) as interpreter:
        result = interpreter.execute(HERE)
    assert (result.text, result.name, result.cwd) == (name, name, "my-repo")
    assert result.head == repository.commits[name]


def test_code_runs_in_a_clone_at_a_commit(repository: Repository) -> None:
    commit = repository.commits["first"]
    with DaytonaInterpreter(repo_url=repository.url, repo_ref=commit) as interpreter:
        assert interpreter.execute(HERE).outputs == {"text": "first", "name": "first", "cwd": "my-repo", "head": commit}


@pytest.mark.parametrize("git_cli", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("ref", "name"), [("v2", "released"), ("commit", "released"), ("commit", "side")])
def test_code_runs_in_a_clone_at_what_is_not_on_the_default_branch(
    repository: Repository, standin: Any, ref: str, name: str, git_cli: bool
) -> None:
    standin.set(git_cli=git_cli)
    commit = repository.commits[name]
    with DaytonaInterpreter(repo_url=repository.url, repo_ref=commit if ref == "commit" else ref) as interpreter:
        assert interpreter.execute(HERE).outputs == {"text": name, "name": name, "cwd": "my-repo", "head": commit}


@pytest.mark.parametrize("name", ["main", "side"])
def test_a_private_repository_is_cloned_and_its_token_is_nowhere_in_the_sandbox(
    repository: Repository, name: str
) -> None:
    repository.needed = TOKEN
    fields: dict[str, Any] = {"repo_url": repository.url, "repo_token": SecretStr(TOKEN)}
    fields["repo_ref"] = repository.commits[name]
    search = """
        import os
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
    coded = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
    with DaytonaInterpreter(**fields) as interpreter:
        assert interpreter.execute(HERE).text == name
        # The parts are put together only in the variables' own file and memory: they must not be found by the search.
        halves = {"a": TOKEN[:9], "b": TOKEN[9:], "c": coded[:9], "d": coded[9:]}
        import textwrap

        code = "token, coded = a + b, c + d\n" + textwrap.dedent(search)
        result = interpreter.execute(code, halves)
    assert result.n > 5
    assert not result.seen


def test_a_repository_that_cannot_be_cloned_says_what_to_check(repository: Repository, standin: Any) -> None:
    with pytest.raises(ConfigurationError, match="no branch or tag 'nothing'"):
        DaytonaInterpreter(repo_url=repository.url, repo_ref="nothing").start()
    repository.needed = TOKEN
    with pytest.raises(ConfigurationError, match=r"git ls-remote failed"):
        DaytonaInterpreter(repo_url=repository.url, repo_token="wrong").start()
    unknown = "0" * 40
    repository.needed = None
    with pytest.raises(ConfigurationError, match=f"could not be cloned at {unknown}.*check repo_url"):
        DaytonaInterpreter(repo_url=repository.url, repo_ref=unknown).start()


# -- packages


def wheel() -> bytes:
    """A package of one module."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("tiny_of_the_tests.py", "ANSWER = 42\n")
        info = "tiny_of_the_tests-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-of-the-tests\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return data.getvalue()


@pytest.mark.requires("pip")
def test_packages_are_there_before_the_first_execution(standin: Any) -> None:
    with DaytonaInterpreter(volume_name="wheels"):
        (volume,) = standin.state()["volumes"]
        Path(volume["folder"], "tiny_of_the_tests-1.0-py3-none-any.whl").write_bytes(wheel())
    place = "tiny-of-the-tests @ file:///home/daytona/memory/tiny_of_the_tests-1.0-py3-none-any.whl"
    with DaytonaInterpreter(volume_name="wheels", packages=[place]) as interpreter:
        assert interpreter.execute("from tiny_of_the_tests import ANSWER; SUBMIT(ANSWER)").output == 42


@pytest.mark.requires("pip")
def test_a_package_that_cannot_be_installed_is_an_error_with_the_end_of_what_pip_said() -> None:
    with pytest.raises(
        ConfigurationError, match=r"pip could not install /nowhere/tiny-1.0-py3-none-any.whl .*\n.*nowhere"
    ):
        DaytonaInterpreter(packages=["/nowhere/tiny-1.0-py3-none-any.whl"]).start()


# -- the programs that its users write


def process_chunk(chunk_id: int, data: list[int], volume: str, repository: str) -> Any:
    code = (
        f"import json, os\n"
        f"data = {data!r}\n"
        f"processed = [x * 2 for x in data]\n"
        f"os.makedirs('/home/daytona/memory/artifacts', exist_ok=True)\n"
        f"with open(f'/home/daytona/memory/artifacts/chunk_{chunk_id}.json', 'w') as f:\n"
        f"    json.dump(processed, f)\n"
        f"SUBMIT(chunk_id={chunk_id}, count=len(processed))"
    )
    interp = DaytonaInterpreter(repo_url=repository, timeout=120, volume_name=volume)
    interp.start()
    try:
        return interp.execute(code)
    finally:
        interp.shutdown()


@pytest.mark.full
def test_three_pieces_of_code_at_once_each_with_a_clone(repository: Repository) -> None:
    from concurrent.futures import ThreadPoolExecutor, as_completed

    tasks = [
        "result = sum(range(1000)); SUBMIT(total=result)",
        "import math; SUBMIT(pi_approx=math.pi)",
        "SUBMIT(greeting='Hello from Daytona')",
    ]

    def run_task(code: str) -> Any:
        interp = DaytonaInterpreter(repo_url=repository.url, timeout=120)
        interp.start()
        try:
            return interp.execute(code)
        finally:
            interp.shutdown()

    with ThreadPoolExecutor(max_workers=3) as pool:
        futures = {pool.submit(run_task, t): i for i, t in enumerate(tasks)}
        found = {futures[future]: future.result() for future in as_completed(futures)}
    assert found[0].total == 499500
    assert found[1].pi_approx == 3.141592653589793
    assert found[2].greeting == "Hello from Daytona"


@pytest.mark.full
def test_chunks_on_a_shared_volume(repository: Repository, standin: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    chunks = {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8, 9]}
    with ThreadPoolExecutor(max_workers=3) as pool:
        futures = [pool.submit(process_chunk, c, d, "rlm-volume-dspy", repository.url) for c, d in chunks.items()]
        assert [(f.result().chunk_id, f.result().count) for f in futures] == [(0, 3), (1, 3), (2, 3)]
    (volume,) = standin.state()["volumes"]
    written = Path(volume["folder"], "artifacts")
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        "chunk_0.json": "[2, 4, 6]",
        "chunk_1.json": "[8, 10, 12]",
        "chunk_2.json": "[14, 16, 18]",
    }


@pytest.mark.full
def test_the_sweep_finds_what_it_finds_locally(repository: Repository) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from rlm_batch import LocalInterpreter

    def sweep(make: Any, lr: float, batch_size: int) -> Any:
        code = (
            "import random\n"
            "random.seed(42)\n"
            f"loss = 1.0 / ({lr} * {batch_size} + 0.01) + random.random() * 0.1\n"
            f"SUBMIT(lr={lr}, batch_size={batch_size}, loss=loss)"
        )
        interp = make()
        interp.start()
        try:
            return interp.execute(code)
        finally:
            interp.shutdown()

    def all_of(make: Any) -> list[dict[str, Any]]:
        params = [(0.001, 32), (0.01, 32), (0.001, 64), (0.01, 64)]
        with ThreadPoolExecutor(max_workers=2) as pool:
            return [result.outputs for result in pool.map(lambda p: sweep(make, *p), params)]

    remote = all_of(lambda: DaytonaInterpreter(repo_url=repository.url, timeout=300))
    assert remote == all_of(lambda: LocalInterpreter(isolation="none", timeout=300))
    best = min(remote, key=lambda outputs: outputs["loss"])
    assert (best["lr"], best["batch_size"], f"{best['loss']:.4f}") == (0.01, 64, "1.6024")


def test_five_executions_in_one_interpreter(repository: Repository) -> None:
    interp = DaytonaInterpreter(repo_url=repository.url, timeout=300)
    interp.start()
    try:
        results = [interp.execute(f"import math; SUBMIT(task={i}, value=math.factorial({i + 10}))") for i in range(5)]
    finally:
        interp.shutdown()
    assert [result.task for result in results] == [0, 1, 2, 3, 4]
    assert [result.value for result in results] == [3628800, 39916800, 479001600, 6227020800, 87178291200]
