"""Refusals by Daytona: transient ones are retried, and the others give one sentence that says what to change."""

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import daytona as sdk
import pytest
from pydantic import SecretStr, ValidationError

from rlm_batch import (
    ConfigurationError,
    DaytonaCredentials,
    DaytonaInterpreter,
    DaytonaSandbox,
    QuotaExceeded,
    SandboxLost,
    SandboxStartError,
)
from rlm_batch.blocks.daytona import errors, launch
from rlm_batch.blocks.daytona.client import get_client
from rlm_batch.sandbox.errors import RlmBatchError

from ...infra.waiting import wait_until_async
from ...standins.git_server import GitServer
from ...standins.wheels import write_wheel

pytestmark = pytest.mark.anyio

CREATE = "POST /api/sandbox"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat a key as wrong if it is still refused after 0.3 seconds instead of three."""
    monkeypatch.setattr(errors, "KEY_SECONDS", 0.3)


async def open_and_remove(provider: DaytonaSandbox) -> None:
    await (await provider.open(provider.labels(""))).remove()


# -- the table of refusals


@dataclass(frozen=True)
class Refusal:
    """A refusal by Daytona. `ends_as` is the error if all retries are refused; `passes` is True if a retry may help."""

    status: int
    message: str
    ends_as: type[RlmBatchError]
    passes: bool = False

    def make_error(self) -> sdk.DaytonaError:
        return sdk.DaytonaError(self.message, status_code=self.status)


THROTTLED = Refusal(429, "ThrottlerException: Too Many Requests", QuotaExceeded, passes=True)
NO_RUNNER = Refusal(400, "failed to get runner info: request failed", SandboxStartError, passes=True)
NOT_FOUND = Refusal(404, "Sandbox with ID or name a-b not found", SandboxStartError)
NOT_STARTED = Refusal(400, "Sandbox a-b is not started", SandboxStartError)
DENIED = Refusal(403, "open /tmp/x: permission denied", ConfigurationError)
BUSY = Refusal(400, "No available runners", SandboxStartError, passes=True)
CHANGING = Refusal(409, "Sandbox state change in progress", SandboxStartError, passes=True)
NAME_TAKEN = Refusal(409, "Sandbox with name rlm-batch-1 already exists", SandboxStartError, passes=True)
VOLUME_MADE = Refusal(400, "Volume with name v already exists", SandboxStartError, passes=True)
NO_MORE_VOLUMES = Refusal(400, "Volume quota exceeded. Maximum allowed: 10", ConfigurationError)
BAD_KEY = Refusal(401, "Invalid credentials", ConfigurationError, passes=True)
BAD_FIELD = Refusal(400, "cpu must not be less than 1, memory must be an integer number", ConfigurationError)
UNKNOWN = Refusal(400, "something new", SandboxStartError, passes=True)
AWAY = Refusal(503, "Temporary authentication service error", SandboxStartError, passes=True)
BAD_TOKEN = "authentication failed: Bearer token validation error: context deadline exceeded"
REFUSALS = [
    *(THROTTLED, NO_RUNNER, NOT_FOUND, NOT_STARTED, DENIED, BUSY, CHANGING, NAME_TAKEN, VOLUME_MADE, NO_MORE_VOLUMES),
    *(BAD_KEY, BAD_FIELD, UNKNOWN, AWAY),
    Refusal(401, BAD_TOKEN, SandboxStartError, passes=True),
    Refusal(401, "unauthorized: authentication failed: Bearer token is invalid", SandboxStartError, passes=True),
    Refusal(404, "sandbox container not found: No such container", SandboxStartError, passes=True),
    Refusal(404, "session not found", SandboxStartError),
    Refusal(410, "session process has exited", SandboxStartError),
    Refusal(400, "Snapshot mine not found. Did you add it through the Dashboard?", ConfigurationError),
    Refusal(400, "Snapshot mine is not available in region eu", ConfigurationError),
    Refusal(400, "Snapshot mine is inactive", ConfigurationError),
    Refusal(400, "Snapshot mine is pulling", SandboxStartError, passes=True),
    Refusal(400, "CPU request 8 exceeds maximum allowed per sandbox (4).", ConfigurationError),
    Refusal(400, "Total CPU limit exceeded. Maximum allowed: 10.", QuotaExceeded),
    Refusal(400, "Sandbox resource limit reached (16), please try again later.", QuotaExceeded),
    Refusal(403, "Organization is suspended: unpaid", ConfigurationError),
    Refusal(403, "Region eu is not available to the organization for class container", ConfigurationError),
    Refusal(404, "Region not found", ConfigurationError),
    Refusal(400, 'Invalid network format: "x". Missing CIDR prefix length', ConfigurationError),
    Refusal(400, "Invalid mount path x (must be absolute)", ConfigurationError),
    Refusal(403, "Forbidden resource", ConfigurationError, passes=True),
    Refusal(404, "Cannot POST", SandboxStartError, passes=True),  # No row of the error table matches these two.
    Refusal(403, "", SandboxStartError, passes=True),
]


def test_each_daytona_error_maps_to_the_right_error() -> None:
    for refusal in REFUSALS:
        error = refusal.make_error()
        mapped = errors.map_error(error, "it could not be done")
        assert (type(mapped), errors.is_transient(error)) == (refusal.ends_as, refusal.passes), refusal
        assert refusal.message in str(mapped)
    rows = [errors.find_row(refusal.make_error()) for refusal in REFUSALS]
    assert [row for row in errors.TABLE if row not in rows] == []
    assert all(row.source for row in errors.TABLE)
    assert all(row.advice for row in errors.TABLE if row.meaning is errors.Meaning.KEY)


# -- each refusal at each moment of a sandbox's life

CALLS = {
    "create": r"^POST /api/sandbox$",
    "volume": r"^GET /api/volumes/by-name",
    "new volume": r"^POST /api/volumes$",
    "clone": "/process/execute$",
    "packages": "/exec$",
    "upload": "/files/bulk-upload$",
    "session": "^POST .*/process/session$",
    "start": "/exec$",
    "status": r"^GET /api/sandbox/\*$",
    "delete": "^DELETE /api/sandbox",
}


def mark_moment(moment: str, *refusals: Refusal) -> Any:
    marks = [pytest.mark.requires("pip")] if moment == "packages" else []
    return pytest.param(moment, refusals, id=moment.replace(" ", "-"), marks=marks)


async def make_provider(moment: str, standin: Any, repository: GitServer, **fields: Any) -> DaytonaSandbox:
    """Return a block whose sandboxes make the call that `CALLS` has for that moment."""
    if moment == "volume":
        fields["volume_name"] = "v"
    if moment == "clone":
        fields["repo_url"] = repository.url
    if moment == "packages":
        await open_and_remove(DaytonaSandbox(volume_name="v"))
        (volume,) = standin.state()["volumes"]
        wheel = write_wheel(Path(volume["folder"]), "tiny_of_the_tests")
        package = f"tiny-of-the-tests @ file:///home/daytona/memory/{wheel.name}"
        fields |= {"volume_name": "v", "packages": [package]}
    return DaytonaSandbox(**fields)


async def use_sandbox(provider: DaytonaSandbox, moment: str) -> None:
    """Use a sandbox as a run does, until the call for that moment."""
    if moment in ("upload", "session", "start"):
        async with provider.interpreter() as interpreter:
            text = "x" * 100_000 if moment == "upload" else ""
            assert (await interpreter.execute("SUBMIT(len(text))", {"text": text})).output == len(text)
    else:
        await open_and_remove(provider)


def refuse(standin: Any, moment: str, refusal: Refusal, **settings: Any) -> None:
    standin.set(
        boot_s=0.1 if moment == "status" else 0.0, volume_ready_s=0.0, retry_after_s=0.1, fault_rate=1.0,
        faults=[str(refusal.status)], fault_message=refusal.message, fault_where=CALLS[moment], **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "refusals"),
    [
        mark_moment("create", BUSY, NAME_TAKEN, BAD_KEY, UNKNOWN, AWAY),
        mark_moment("volume", THROTTLED, BAD_KEY, AWAY),
        mark_moment("new volume", VOLUME_MADE, UNKNOWN, AWAY),
        mark_moment("clone", NO_RUNNER),
        mark_moment("packages", NO_RUNNER),
        mark_moment("upload", NO_RUNNER, THROTTLED, AWAY),
        mark_moment("session", NO_RUNNER, UNKNOWN, AWAY),
        mark_moment("start", NO_RUNNER, UNKNOWN, AWAY),
        mark_moment("status", NOT_FOUND, THROTTLED, BAD_KEY, AWAY),
        mark_moment("delete", THROTTLED, CHANGING, BAD_KEY, AWAY),
    ],
)
async def test_one_transient_refusal_raises_no_error(
    moment: str, refusals: tuple[Refusal, ...], standin: Any, repository: GitServer
) -> None:
    provider = await make_provider(moment, standin, repository)
    for number, refusal in enumerate(refusals):
        if moment == "new volume":
            provider.volume_name = f"v{number}"
        before = standin.state()["created"]
        refuse(standin, moment, refusal, fault_times=1)
        await use_sandbox(provider, moment)
        state = standin.state()
        assert state["faults"] == {str(refusal.status): 1}
        assert state["created"] - before == 1, refusal


@pytest.mark.parametrize(
    ("moment", "refusals"),
    [
        mark_moment("create", BAD_FIELD, NO_MORE_VOLUMES),
        mark_moment("new volume", NO_MORE_VOLUMES),
        mark_moment("clone", NOT_FOUND, AWAY),  # A lost clone or command may still be running.
        mark_moment("packages", NOT_STARTED, AWAY),
        mark_moment("upload", DENIED),
    ],
)
async def test_a_refusal_that_is_not_retried_is_raised_and_leaves_no_sandbox(
    moment: str, refusals: tuple[Refusal, ...], standin: Any, repository: GitServer
) -> None:
    provider = await make_provider(moment, standin, repository)
    if moment == "new volume":
        provider.volume_name = "new"
    for refusal in refusals:
        refuse(standin, moment, refusal, fault_times=1)
        with pytest.raises((SandboxStartError, SandboxLost) if moment == "upload" else refusal.ends_as) as caught:
            await use_sandbox(provider, moment)
        assert refusal.message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert standin.state()["faults"] == {str(refusal.status): 1}


async def test_a_refusal_that_lasts_beyond_start_timeout_is_raised_with_daytonas_message(standin: Any) -> None:
    provider = DaytonaSandbox(start_timeout=5)
    await provider.check()  # The first client of a process takes seconds.
    refuse(standin, "create", BUSY)
    with pytest.raises(SandboxStartError, match=BUSY.message):
        await open_and_remove(provider)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "on its way out"])
async def test_a_call_to_a_deleted_sandbox_is_not_retried_until_the_timeout(standin: Any, is_gone: bool) -> None:
    """Daytona's proxy gives the same answer for removed and starting sandboxes, so the host reads the record."""
    standin.set(destroy_s=0.0 if is_gone else 3600.0)
    provider = DaytonaSandbox(start_timeout=3600)
    sandbox = await provider.open(provider.labels(""))
    standin.set(
        fault_rate=1.0, faults=["404"], fault_message="sandbox container not found: x", fault_where="^POST /toolbox"
    )
    await provider.delete_sandbox(sandbox.id)
    if is_gone:
        await wait_until_async(lambda: not standin.state()["sandboxes"], "the sandbox is gone")
    channel = await sandbox.connect(lambda _: None, lambda _: None)
    with pytest.raises(SandboxStartError, match=r"did not start in sandbox .* not (found|started)"):
        await channel.send(b'{"n": 1}\n')
    standin.set(destroy_s=0.0, fault_rate=0.0)
    await sandbox.remove()


# -- the account


async def test_a_key_refused_twice_is_an_error_that_hides_the_key(standin: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"refused the API key \(Invalid credentials\)") as caught:
        await open_and_remove(DaytonaSandbox(api_key=SecretStr("a wrong key")))
    assert "set DAYTONA_API_KEY, or api_key of the block" in str(caught.value)
    assert "a wrong key" not in str(caught.value)
    assert set(standin.state()["counts"]) == {CREATE}


async def test_a_missing_key_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY")
    assert not DaytonaSandbox().has_credentials()
    with pytest.raises(
        ConfigurationError, match="Daytona needs an API key: set the environment variable DAYTONA_API_KEY"
    ):
        await open_and_remove(DaytonaSandbox())


async def test_changed_credentials_in_the_environment_apply_at_once(
    standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = DaytonaSandbox()
    await provider.check()
    monkeypatch.setenv("DAYTONA_API_KEY", "a wrong key")
    with pytest.raises(ConfigurationError, match="refused the API key"):
        await provider.check()
    monkeypatch.delenv("DAYTONA_API_KEY")
    monkeypatch.setenv("DAYTONA_JWT_TOKEN", standin.key)
    monkeypatch.setenv("DAYTONA_ORGANIZATION_ID", "one")
    await provider.check()
    first = get_client(provider)
    monkeypatch.setenv("DAYTONA_ORGANIZATION_ID", "another")
    assert get_client(provider) is not first
    monkeypatch.setenv("DAYTONA_JWT_TOKEN", "a wrong token")
    with pytest.raises(ConfigurationError, match="refused the API key"):
        await provider.check()


def test_credentials_come_from_the_saved_block_named_default(
    standin: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL")  # A profile names the server.
    for name in standin.environment:
        monkeypatch.delenv(name)
    DaytonaSandbox(api_key=SecretStr(standin.key), api_url=standin.url).save("default", overwrite=True)
    with DaytonaInterpreter(environment={"A": "b"}) as interpreter:
        assert interpreter.execute("import os; SUBMIT(a=os.environ['A'])").a == "b"


def test_sandbox_blocks_share_an_account_in_saved_credentials(
    standin: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in standin.environment:
        monkeypatch.delenv(name)
    DaytonaCredentials(api_key=standin.key, api_url=standin.url).save("shared", overwrite=True)
    account: Any = DaytonaCredentials.load("shared")
    DaytonaSandbox(credentials=account).save("of-the-account", overwrite=True)
    sandbox: Any = DaytonaSandbox.load("of-the-account")
    assert sandbox.has_credentials()
    assert sandbox.run("SUBMIT(y=x)", {"x": 2}).y == 2
    # New credentials count for every block that holds them.
    DaytonaCredentials(api_key="another", api_url=standin.url).save("shared", overwrite=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="refused the API key"):
        asyncio.run(DaytonaSandbox.load("of-the-account").check())  # type: ignore[union-attr]
    own: Any = DaytonaSandbox(credentials=account, api_key="mine")  # type: ignore[arg-type]
    assert own.get_account_setting("api_key").get_secret_value() == "mine"


NO_SNAPSHOT = "Snapshot no-such not found.*set snapshot to one of the account's"
USED_UP = "limit exceeded. Maximum allowed: 0.*wait for other sandboxes, or raise the quota"
BROKEN_VOLUME = r"'broken' is in the state error \(the bucket could not be made\).*set `volume_name` to another"


@pytest.mark.parametrize(
    ("settings", "fields", "error", "words"),
    [
        ({}, {"snapshot": "no-such"}, ConfigurationError, NO_SNAPSHOT),
        ({"max_sandboxes": 0}, {}, QuotaExceeded, USED_UP),
        ({"broken_volumes": ["broken"]}, {"volume_name": "broken"}, ConfigurationError, BROKEN_VOLUME),
    ],
    ids=["snapshot", "quota", "volume"],
)
async def test_a_missing_account_feature_says_how_to_fix_it(
    settings: dict[str, Any], fields: dict[str, Any], error: type[RlmBatchError], words: str, standin: Any
) -> None:
    standin.set(**settings)
    with pytest.raises(error, match=words):
        await open_and_remove(DaytonaSandbox(**fields))
    assert standin.state()["counts"].get(CREATE, 0) == (0 if "volume_name" in fields else 1)


async def test_a_rate_limit_says_when_to_retry(standin: Any) -> None:
    standin.set(creates_per_minute=1, minute=3600.0)
    await open_and_remove(DaytonaSandbox())
    with pytest.raises(QuotaExceeded) as caught:
        await open_and_remove(DaytonaSandbox())
    assert caught.value.retry_after is not None
    assert 3000 < caught.value.retry_after <= 3600
    assert standin.state()["counts"][CREATE] == 2


# -- the address, the image and the block


async def test_an_address_without_a_server_is_an_error() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/api"
        with pytest.raises(SandboxStartError, match="no sandbox could be opened"):
            await open_and_remove(DaytonaSandbox(api_url=url, start_timeout=1))


def test_an_image_without_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PYTHON", "python-that-is-not-there")
    with pytest.raises(SandboxStartError, match=r"status 127.*python-that-is-not-there"):
        DaytonaInterpreter().start()
    with pytest.raises(SandboxStartError, match="status 127"):  # No part of the code can have run.
        DaytonaInterpreter().execute("pass")


def test_a_block_refuses_invalid_settings_without_showing_a_secret() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"snapshot": "a", "image": "b", "api_key": "hidden"}, "set either snapshot or image"),
        ({"memory": 2}, "need an image"),
        ({"environment": {"A=B": "hidden"}}, "'A=B' is not the name"),
        ({"environment": {"": "hidden"}}, "'' is not the name"),
        ({"environment": {"A": "hidden\0"}}, "value has a null"),
    ]
    for fields, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            DaytonaInterpreter(**fields)
        with pytest.raises(ValidationError, match=message) as caught:
            DaytonaSandbox(**fields)
        assert "hidden" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="no field snapsot"):
        DaytonaInterpreter(snapsot="a")  # type: ignore[call-arg]


async def test_the_key_is_never_shown_or_stored() -> None:
    provider = DaytonaSandbox(api_key=SecretStr("the-secret"), repo_token=SecretStr("another-secret"))
    shown = f"{provider!r} {provider} {await provider.fingerprint()}"
    assert "secret" not in shown.replace("SecretStr", "")
