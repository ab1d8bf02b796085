"""What Daytona refuses is one sentence that says what to change, at once."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from rlm_batch import (
    ConfigurationError,
    DaytonaInterpreter,
    DaytonaSandbox,
    OutcomeUnknown,
    QuotaExceeded,
    SandboxStartError,
    batch,
)
from rlm_batch.blocks.daytona import channel, errors, launch
from rlm_batch.blocks.daytona.client import borrow_client
from rlm_batch.sandbox.errors import RlmBatchError

CREATE = "POST /api/sandbox"


async def opened(provider: DaytonaSandbox) -> None:
    box = await provider.open(provider.labels(""))
    await box.remove()


def refusal(provider: DaytonaSandbox) -> RlmBatchError:
    """What opening a sandbox raises, without having been waited for."""
    asyncio.run(_warm(provider))
    begun = time.monotonic()
    with pytest.raises(RlmBatchError) as caught:
        asyncio.run(opened(provider))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 15
    return caught.value


async def _warm(provider: DaytonaSandbox) -> None:
    """Has the SDK imported."""
    (await borrow_client(provider)).release()


def test_a_wrong_key(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "KEY_SECONDS", 0.3)
    error = refusal(DaytonaSandbox(api_key=SecretStr("a wrong key")))
    assert isinstance(error, ConfigurationError)
    assert "Invalid credentials" in str(error)
    assert "set api_key on the block, or DAYTONA_API_KEY" in str(error)
    assert "a wrong key" not in str(error)
    assert daytona.state()["counts"][CREATE] == 1


@pytest.mark.full
def test_a_wrong_key_ends_a_batch_before_anything_runs(
    daytona: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("DAYTONA_API_KEY", "a wrong key")
    monkeypatch.setattr(errors, "KEY_SECONDS", 0.3)
    with pytest.raises(ConfigurationError, match="refused the API key"):
        asyncio.run(batch(["SUBMIT(1)"] * 5, provider="daytona"))
    assert CREATE not in daytona.state()["counts"]


def test_no_key_at_all(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY")
    assert not DaytonaSandbox().has_credentials()
    with pytest.raises(ConfigurationError, match="DAYTONA_API_KEY"):
        asyncio.run(opened(DaytonaSandbox()))


@pytest.mark.anyio
async def test_other_credentials_in_the_environment_count_at_once(
    daytona: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = DaytonaSandbox()
    await provider.check()
    monkeypatch.setattr(errors, "KEY_SECONDS", 0.1)
    monkeypatch.setenv("DAYTONA_API_KEY", "a wrong key")
    with pytest.raises(ConfigurationError, match="refused the API key"):
        await provider.check()
    monkeypatch.delenv("DAYTONA_API_KEY")
    monkeypatch.setenv("DAYTONA_JWT_TOKEN", daytona.key)
    monkeypatch.setenv("DAYTONA_ORGANIZATION_ID", "one")
    await provider.check()
    first = await borrow_client(provider)
    monkeypatch.setenv("DAYTONA_ORGANIZATION_ID", "another")
    second = await borrow_client(provider)
    assert second is not first
    monkeypatch.setenv("DAYTONA_JWT_TOKEN", "a wrong token")
    with pytest.raises(ConfigurationError, match="refused the API key"):
        await provider.check()
    first.release()
    second.release()


def test_an_unknown_snapshot(daytona: Any) -> None:
    error = refusal(DaytonaSandbox(snapshot="no-such"))
    assert isinstance(error, ConfigurationError)
    assert "Snapshot no-such not found" in str(error)
    assert "name one of the account's with snapshot" in str(error)
    assert daytona.state()["counts"] == {CREATE: 1}


def test_an_unknown_snapshot_ends_a_batch(
    daytona: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    DaytonaSandbox(snapshot="no-such").save("of-the-tests", overwrite=True)
    with pytest.raises(ConfigurationError, match="Snapshot no-such not found"):
        asyncio.run(batch(["SUBMIT(1)"] * 5, provider="daytona-sandbox/of-the-tests", max_workers=1))
    assert daytona.state()["counts"][CREATE] == 1


@pytest.mark.parametrize("limit", [{"max_sandboxes": 0}, {"max_cpu": 0}])
def test_an_exhausted_quota(daytona: Any, limit: dict[str, int]) -> None:
    daytona.set(**limit)
    error = refusal(DaytonaSandbox())
    assert isinstance(error, QuotaExceeded)
    assert "limit exceeded. Maximum allowed: 0" in str(error)
    assert "use fewer workers, or raise the account's limits" in str(error)
    assert daytona.state()["counts"] == {CREATE: 1}


def test_a_rate_limit_says_when_to_come_again(daytona: Any) -> None:
    daytona.set(creates_per_minute=1, minute=30.0)
    asyncio.run(opened(DaytonaSandbox()))
    error = refusal(DaytonaSandbox())
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after is not None
    assert 20 < error.retry_after <= 30
    assert daytona.state()["counts"][CREATE] == 2


def test_a_volume_in_error(daytona: Any) -> None:
    daytona.set(broken_volumes=["broken"])
    error = refusal(DaytonaSandbox(volume_name="broken"))
    assert isinstance(error, ConfigurationError)
    assert "volume 'broken' is in the state error (the bucket could not be made)" in str(error)
    assert "name another with volume_name" in str(error)
    assert CREATE not in daytona.state()["counts"]


def test_an_image_without_python(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PYTHON", "python-that-is-not-there")
    with pytest.raises(SandboxStartError, match=r"status 127.*python-that-is-not-there"):
        asyncio.run(DaytonaSandbox().interpreter().start())
    with pytest.raises(SandboxStartError, match="status 127"):  # nothing of what went along can have run
        asyncio.run(DaytonaSandbox().interpreter().execute("pass"))


def test_an_address_where_nobody_answers(daytona: Any) -> None:
    with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
        asyncio.run(opened(DaytonaSandbox(api_url="http://127.0.0.1:9/api", start_timeout=1)))


def test_a_set_up_that_is_cut_off_again_and_again_pays_for_three_sandboxes_at_most(daytona: Any) -> None:
    daytona.set(fault_rate=1.0, faults=["502"], fault_where="/git/clone")
    block = DaytonaSandbox(repo_url="http://127.0.0.1:9/x.git", repo_ref="a" * 40, start_timeout=60)
    with pytest.raises(SandboxStartError, match="could not be set up"):
        asyncio.run(opened(block))
    assert daytona.state()["counts"]["POST /api/sandbox"] == 3


class Refusing(BaseHTTPRequestHandler):
    """Answers every call that would make something with `status` and `body`, and has nothing."""

    status, body = 400, b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.status, self.body)

    def do_GET(self) -> None:
        self._answer(404, b'{"statusCode": 404, "message": "Sandbox with ID or name x not found"}')

    do_DELETE = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"statusCode": 400, "message": ["cpu must be positive", "no name"], "error": "Bad Request"}', "no name"),
        (b'{"statusCode": 400, "error": {"code": 7, "message": "cpu must be positive"}}', "cpu must be positive"),
        (b"<html><head><title>400 Bad Request</title></head><body>nginx</body></html>", "400 Bad Request"),
        (b'{"statusCode": 400}', "status 400"),
        (b"", "status 400"),
    ],
)
def test_what_a_refusal_says_is_told_without_the_json_or_the_page_around_it(body: bytes, words: str) -> None:
    handler = type("Handler", (Refusing,), {"body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/api"
        error = refusal(DaytonaSandbox(api_url=url, api_key=SecretStr("x"), start_timeout=1))
        server.shutdown()
    assert words in str(error)
    assert not re.search("[{}<>]|statusCode|headers", str(error)), error


async def call_with_deaf_input(daytona: Any) -> None:
    async with DaytonaSandbox().interpreter(timeout=20) as interpreter:
        await interpreter.execute("pass")
        daytona.set(fault_rate=1.0, faults=["delay"], fault_where="/input", fault_delay_s=5.0)
        await interpreter.execute("pass")


def test_an_input_that_is_not_answered_says_so(daytona: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CALL_SECONDS", 1.0)
    monkeypatch.setattr(channel, "GIVE_UP_SECONDS", 0.5)
    with pytest.raises(OutcomeUnknown, match="it takes no input: no answer came in time"):
        asyncio.run(call_with_deaf_input(daytona))


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="not from both"):
        DaytonaSandbox(snapshot="a", image="b")
    with pytest.raises(ValidationError, match="go with an image"):
        DaytonaSandbox(memory=2)
    with pytest.raises(ConfigurationError, match="no field snapsot"):
        DaytonaInterpreter(snapsot="a")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"A=B": "hidden"}, "'A=B' is no name"),
        ({"": "hidden"}, "'' is no name"),
        ({"A": "hidden\0"}, "value of A has a null"),
    ],
)
def test_an_environment_that_no_process_can_have_is_refused_when_the_block_is_made(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DaytonaInterpreter(environment=environment)
    with pytest.raises(ValidationError, match=message) as caught:
        DaytonaSandbox(environment=environment)  # type: ignore[arg-type]
    assert "hidden" not in str(caught.value)


def test_what_is_wrong_with_a_block_is_told_without_its_secrets() -> None:
    with pytest.raises(ValidationError, match="not from both") as caught:
        DaytonaSandbox(api_key="of-a-person", snapshot="a", image="b")  # type: ignore[arg-type]
    assert "of-a" not in str(caught.value)


def test_the_key_is_in_nothing_that_is_shown_or_kept(daytona: Any) -> None:
    provider = DaytonaSandbox(api_key=SecretStr(daytona.key + "-secret"), repo_token=SecretStr("another-secret"))
    shown = f"{provider!r} {provider} {asyncio.run(DaytonaSandbox().fingerprint())}"
    assert "secret" not in shown.replace("SecretStr", "")


@pytest.mark.full
def test_importing_and_local_work_do_not_load_the_sdk() -> None:
    code = (
        "import sys, rlm_batch\nfrom rlm_batch import DaytonaSandbox, DaytonaInterpreter, LocalInterpreter, batch\n"
        "DaytonaSandbox(); DaytonaInterpreter()\n"
        "with LocalInterpreter(isolation='none') as i: i.execute('SUBMIT(1)')\n"
        "print([name for name in sys.modules if name.split('.')[0].startswith('daytona')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
@pytest.mark.requires("namespaces")
def test_no_connection_but_to_loopback_is_made(daytona: Any) -> None:
    code = """if True:
        import sys
        seen = set()
        sys.addaudithook(lambda event, args: seen.add(str(args[1])) if event == "socket.connect" else None)
        from rlm_batch import DaytonaInterpreter
        with DaytonaInterpreter(volume_name="v") as interpreter:
            assert interpreter.execute("SUBMIT(1)").output == 1
        print(sorted(seen))
        assert seen and all("127.0.0.1" in address for address in seen), seen
    """
    environment = {**os.environ, **daytona.environment}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)


def test_the_saved_block_named_default_has_the_credentials_that_nobody_else_has(
    daytona: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in daytona.environment:
        monkeypatch.delenv(name)
    DaytonaSandbox(api_key=SecretStr(daytona.key), api_url=daytona.url).save("default", overwrite=True)
    with DaytonaInterpreter(timeout=20, environment={"A": "b"}) as interpreter:
        assert interpreter.execute("import os; SUBMIT(a=os.environ['A'])").a == "b"
