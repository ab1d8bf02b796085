"""What Daytona refuses, as it says it, at each moment where it may say so: nobody's block is wrong for what passes."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import daytona as sdk
import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, QuotaExceeded, SandboxLost, SandboxStartError
from rlm_batch.blocks.daytona import deletion, errors
from rlm_batch.blocks.daytona.error_table import TABLE, Meaning
from rlm_batch.sandbox.errors import RlmBatchError

from .test_sandbox import Repository, wheel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]

MOMENTS = {
    "create": r"^POST /api/sandbox$",
    "volume": r"^GET /api/volumes/by-name",
    "new volume": r"^POST /api/volumes$",
    "clone": "/git/clone$",
    "packages": "/exec$",
    "upload": "/files/bulk-upload$",
    "session": "^POST .*/process/session$",
    "start": "/exec$",
    "status": r"^GET /api/sandbox/\*$",
    "delete": "^DELETE /api/sandbox",
}
IN_SANDBOX = ("clone", "packages", "upload", "session", "start")
IN_EXECUTION = ("upload", "session", "start")
WHEEL = "tiny_of_the_tests-1.0-py3-none-any.whl"


@dataclass(frozen=True)
class Refusal:
    """An answer of Daytona's, and when it comes; `ends_as` is our error where it comes again and again."""

    status: int
    message: str
    moments: tuple[str, ...]
    ends_as: type[RlmBatchError]

    @property
    def passes(self) -> bool:
        """Whether one such answer is not the end."""
        return errors.is_transient(self.make_error())

    def make_error(self) -> sdk.DaytonaError:
        return sdk.DaytonaError(self.message, status_code=self.status)


REFUSALS = [
    Refusal(429, "ThrottlerException: Too Many Requests", ("volume", "upload", "status", "delete"), QuotaExceeded),
    Refusal(400, "failed to get runner info: request failed", IN_SANDBOX, SandboxStartError),
    Refusal(
        401,
        "authentication failed: Bearer token validation error: context deadline exceeded",
        IN_SANDBOX,
        SandboxStartError,
    ),
    Refusal(401, "unauthorized: authentication failed: Bearer token is invalid", ("session",), SandboxStartError),
    Refusal(
        400,
        "bad request: failed to resolve container IP after 3 attempts: no IP address found. Is the Sandbox started?",
        IN_SANDBOX,
        SandboxStartError,
    ),
    Refusal(404, "sandbox container not found: No such container", IN_SANDBOX, SandboxStartError),
    Refusal(400, "Sandbox is not running", ("upload",), SandboxStartError),
    Refusal(404, "Sandbox with ID or name a-b not found", ("clone", "packages"), SandboxStartError),
    Refusal(400, "Sandbox a-b is not started", ("packages",), SandboxStartError),
    Refusal(404, "session not found", ("packages",), SandboxStartError),
    Refusal(410, "session process has exited", ("packages",), SandboxStartError),
    Refusal(403, "open /tmp/x: permission denied", ("upload",), SandboxStartError),
    Refusal(400, "No available runners", ("create",), SandboxStartError),
    Refusal(400, "Runner r-1 is draining", ("create",), SandboxStartError),
    Refusal(409, "Sandbox state change in progress", ("delete",), SandboxStartError),
    Refusal(409, "Sandbox with name rlm-batch-1 already exists", ("create",), SandboxStartError),
    Refusal(400, "Snapshot mine not found. Did you add it through the Dashboard?", ("create",), ConfigurationError),
    Refusal(400, "Snapshot mine is not available in region eu", ("create",), ConfigurationError),
    Refusal(400, "Snapshot mine is inactive", ("create",), ConfigurationError),
    Refusal(400, "Snapshot mine is pulling", ("create",), SandboxStartError),
    Refusal(400, "Volume 'v' is not in a ready state. Current state: pending_create", ("create",), SandboxStartError),
    Refusal(400, "Volume with name v already exists", ("new volume",), SandboxStartError),
    Refusal(400, "Volume quota exceeded. Maximum allowed: 10", ("new volume",), ConfigurationError),
    Refusal(400, "CPU request 8 exceeds maximum allowed per sandbox (4).", ("create",), ConfigurationError),
    Refusal(400, "Total CPU limit exceeded. Maximum allowed: 10.", ("create",), QuotaExceeded),
    Refusal(400, "Sandbox resource limit reached (16), please try again later.", ("create",), QuotaExceeded),
    Refusal(403, "Organization is suspended: unpaid", ("create", "new volume"), ConfigurationError),
    Refusal(403, "Region eu is not available to the organization for class container", ("create",), ConfigurationError),
    Refusal(404, "Region not found", ("create",), ConfigurationError),
    Refusal(400, 'Invalid network format: "x". Missing CIDR prefix length', ("create",), ConfigurationError),
    Refusal(400, "Invalid mount path x (must be absolute)", ("create",), ConfigurationError),
    Refusal(400, "cpu must not be less than 1, memory must be an integer number", ("create",), ConfigurationError),
    Refusal(401, "authentication required: Repository not found.", ("clone",), ConfigurationError),
    Refusal(404, "reference not found", ("clone",), ConfigurationError),
    Refusal(401, "Invalid credentials", ("create", "volume", "status", "delete"), ConfigurationError),
    Refusal(403, "Forbidden resource", ("create",), ConfigurationError),
    # What no row knows.
    Refusal(400, "something new", tuple(MOMENTS), SandboxStartError),
    Refusal(404, "Cannot POST", ("create", "upload", "session", "start"), SandboxStartError),
    Refusal(403, "", ("create",), SandboxStartError),
    Refusal(503, "Temporary authentication service error", tuple(MOMENTS), SandboxStartError),
]


def list_cases(*, passing: bool) -> list[Any]:
    """The refusals, with each of their moments: the first of them belongs to the usual tests."""
    cases: list[Any] = []
    for refusal in REFUSALS:
        if refusal.passes != passing:
            continue
        for number, moment in enumerate(refusal.moments):
            marks = [pytest.mark.full] if number else []
            if moment == "packages":
                marks.append(pytest.mark.requires("pip"))
            if moment == "packages" or "volume" in moment:
                marks.append(pytest.mark.requires("namespaces"))
            name = f"{moment} {refusal.status} {refusal.message[:40]}"
            cases.append(pytest.param(refusal, moment, id=name.replace(" ", "-"), marks=marks))
    return cases


def list_lasting_cases() -> list[Any]:
    """The passing ones that come again and again, where that is an error of a start: two belong to the usual tests."""
    cases: list[Any] = []
    for case in list_cases(passing=True):
        refusal, moment = case.values
        if moment in ("delete", "status"):  # of the start Daytona sends an event, too
            continue
        is_usual = refusal.message.startswith(("No available", "failed to get")) and not any(
            mark.name == "full" for mark in case.marks
        )
        marks = case.marks if is_usual else [*case.marks, pytest.mark.full]
        cases.append(pytest.param(refusal, moment, id=case.id, marks=marks))
    return cases


@pytest.fixture(autouse=True)
def standin(running_daytona: object, daytona: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every test here has one; what passes within seconds passes within tenths."""
    monkeypatch.setattr(errors, "KEY_SECONDS", 0.3)
    return daytona


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    repository = Repository(tmp_path)
    yield repository
    repository.close()


async def make_provider(moment: str, request: pytest.FixtureRequest, **fields: Any) -> DaytonaSandbox:
    """A block whose sandboxes come by that moment."""
    if "volume" in moment:
        fields["volume_name"] = "v"
    if moment == "clone":
        fields["repo_url"] = request.getfixturevalue("repository").url
    if moment == "packages":
        fields |= {"volume_name": "v", "packages": [f"tiny-of-the-tests @ file:///home/daytona/memory/{WHEEL}"]}
    provider = DaytonaSandbox(**fields)
    await provider.check()  # the first client of a process takes seconds
    if moment == "packages":
        standin = request.getfixturevalue("daytona")
        await start_and_remove(DaytonaSandbox(volume_name="v"), "volume")
        (volume,) = standin.state()["volumes"]
        Path(volume["folder"], WHEEL).write_bytes(wheel())
    return provider


async def start_and_remove(provider: DaytonaSandbox, moment: str) -> None:
    """What a run does with a sandbox, as far as the moment."""
    if moment in IN_EXECUTION:
        async with provider.interpreter(timeout=20) as interpreter:
            text = "x" * 100_000 if moment == "upload" else ""
            assert (await interpreter.execute("SUBMIT(len(text))", {"text": text})).output == len(text)
    else:
        await (await provider.open(provider.labels(""))).remove()


def find_kin(moment: str) -> tuple[type[RlmBatchError], ...]:
    """What an error may be too: what a first execution uploads is uploaded while its driver starts."""
    return (SandboxLost,) if moment == "upload" else ()


async def is_empty(standin: Any) -> bool:
    """Whether the stand-in has nothing any more: removing is accepted, and done a little later."""
    for _ in range(100):
        if not standin.state()["sandboxes"]:
            return True
        await asyncio.sleep(0.02)
    return False


def test_every_row_of_the_table_is_tried() -> None:
    rows = [errors.find_row(refusal.make_error()) for refusal in REFUSALS]
    assert [row for row in TABLE if row not in rows] == []
    assert all(row.source for row in TABLE)
    assert all(row.advice for row in TABLE if row.meaning is Meaning.KEY)


@pytest.mark.parametrize(("refusal", "moment"), list_cases(passing=True))
async def test_one_refusal_that_may_pass_is_nobodys_error(
    refusal: Refusal, moment: str, standin: Any, request: pytest.FixtureRequest
) -> None:
    provider = await make_provider(moment, request)
    standin.set(
        boot_s=0.1 if moment == "status" else 0.0, volume_ready_s=0.0, retry_after_s=0.1, fault_rate=1.0,
        faults=[str(refusal.status)], fault_message=refusal.message, fault_where=MOMENTS[moment], fault_times=1,
    )  # fmt: skip
    await start_and_remove(provider, moment)
    assert standin.state()["faults"] == {str(refusal.status): 1}
    assert await is_empty(standin)
    # A clone or a command that was lost may be under way: another sandbox has it to itself.
    is_lost = moment in ("clone", "packages") and refusal.status >= 500
    assert standin.state()["created"] == 1 + is_lost + (moment == "packages")


@pytest.mark.parametrize(("refusal", "moment"), list_cases(passing=False))
async def test_a_refusal_that_is_certain_is_told_at_once(
    refusal: Refusal, moment: str, standin: Any, request: pytest.FixtureRequest
) -> None:
    provider = await make_provider(moment, request)
    standin.set(
        boot_s=0.1 if moment == "status" else 0.0, volume_ready_s=0.0, fault_rate=1.0, faults=[str(refusal.status)],
        fault_message=refusal.message, fault_where=MOMENTS[moment], fault_times=1,
    )  # fmt: skip
    began = time.monotonic()
    with pytest.raises((refusal.ends_as, *find_kin(moment))) as caught:
        await start_and_remove(provider, moment)
    assert refusal.message[:60] in str(caught.value)
    assert time.monotonic() - began < 15
    assert await is_empty(standin)


@pytest.mark.parametrize(("refusal", "moment"), list_lasting_cases())
async def test_what_does_not_pass_within_the_time_for_a_start_is_told_in_daytonas_words(
    refusal: Refusal, moment: str, standin: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "TRIES", 2)
    monkeypatch.setattr(deletion, "DELETE_SECONDS", 1.0)
    provider = await make_provider(moment, request, start_timeout=2)
    standin.set(
        boot_s=0.0, volume_ready_s=0.0, retry_after_s=0.1, fault_rate=1.0, faults=[str(refusal.status)],
        fault_message=refusal.message, fault_where=MOMENTS[moment],
    )  # fmt: skip
    with pytest.raises((SandboxStartError if moment in IN_EXECUTION else refusal.ends_as, *find_kin(moment))) as caught:
        await start_and_remove(provider, moment)
    assert refusal.message[:60] in str(caught.value)
    assert await is_empty(standin)


async def test_a_refusal_after_which_there_is_no_time_for_another_call_is_told_too(standin: Any) -> None:
    standin.set(
        retry_after_s=10.0, fault_rate=1.0, faults=["503"], fault_message="Temporary service error",
        fault_where=MOMENTS["volume"],
    )  # fmt: skip
    with pytest.raises(SandboxStartError, match="volume 'v' could not be had: Temporary service error"):
        await start_and_remove(DaytonaSandbox(volume_name="v", start_timeout=1), "volume")


@pytest.mark.full
async def test_a_set_up_that_is_cut_off_before_no_sandbox_is_opened_is_told_too(
    standin: Any, repository: Repository
) -> None:
    standin.set(boot_s=0.0, fault_rate=1.0, faults=["502"], fault_message="no clone", fault_where=MOMENTS["clone"])

    async def refuse_creations() -> None:
        while not standin.state()["faults"]:  # noqa: ASYNC110 - it is the server's, in another process
            await asyncio.sleep(0.02)
        standin.set(fault_message="no sandbox", fault_where=MOMENTS["create"])

    refusing = asyncio.create_task(refuse_creations())
    with pytest.raises(SandboxStartError, match=r"could not be set up: no clone; then .* opened: no sandbox"):
        await start_and_remove(DaytonaSandbox(repo_url=repository.url, start_timeout=3), "clone")
    await refusing
    assert await is_empty(standin)


async def test_a_sandbox_that_is_not_found_once_while_it_starts_is_looked_for(standin: Any) -> None:
    standin.set(
        boot_s=0.1, fault_rate=1.0, fault_times=1, faults=["404"], fault_where=MOMENTS["status"],
        fault_message="Sandbox with ID or name a-b not found",
    )  # fmt: skip
    await start_and_remove(DaytonaSandbox(), "status")
    assert await is_empty(standin)
    assert standin.state()["created"] == 1


async def test_a_key_that_is_refused_again_some_seconds_later_is_wrong(standin: Any) -> None:
    standin.set(fault_rate=1.0, faults=["401"], fault_message="Invalid credentials")
    with pytest.raises(ConfigurationError, match=r"refused the API key \(Invalid credentials\): set api_key"):
        await start_and_remove(DaytonaSandbox(), "create")
    counts = standin.state()["counts"]
    assert counts["POST /api/sandbox"] == 1
    assert counts["GET /api/sandbox/*"] == 2


async def test_a_call_to_a_sandbox_that_was_removed_is_not_repeated_until_the_time_is_over(standin: Any) -> None:
    """What the proxy says of it is what it says of one that is coming up; the sandbox's own record tells them apart."""
    provider = DaytonaSandbox()
    box = await provider.open(provider.labels(""))
    standin.set(
        fault_rate=1.0, faults=["404"], fault_message="sandbox container not found: x", fault_where="^POST /toolbox"
    )
    await provider.delete_sandbox(box.id)
    assert await is_empty(standin)
    began = time.monotonic()
    channel = await box.connect(lambda _: None, lambda _: None)
    with pytest.raises(SandboxStartError, match=r"did not start in sandbox .* not found"):
        await channel.send(b'{"n": 1}\n')
    assert time.monotonic() - began < 20
    await box.remove()
