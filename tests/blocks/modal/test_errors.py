"""Errors of Modal's account, images, volumes and limits: each is one sentence that says what to change."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from rlm_batch import (
    ConfigurationError,
    ModalInterpreter,
    ModalSandbox,
    QuotaExceeded,
    SandboxStartError,
)

pytestmark = pytest.mark.anyio
Make = Callable[..., ModalSandbox]
NO_PACKAGE = "there-is-none @ file:///nowhere/there_is_none-1.0-py3-none-any.whl"


async def refuse(block: ModalSandbox, kind: type[Exception] = ConfigurationError) -> str:
    """Return the error that opening a sandbox raises, and check that it is one line without secrets."""
    with pytest.raises(kind) as caught:
        await block.open(block.labels(""))
    text = str(caught.value)
    assert "\n" not in text
    assert block.token_secret is not None
    assert block.token_secret.get_secret_value() not in text
    return text


async def test_a_wrong_token_says_where_to_set_it_and_a_changed_one_applies_at_once(
    modal_sandbox: Make, modal_standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await refuse(modal_sandbox(token_secret="as-wrong"))
    assert "Token ID or secret is invalid" in text
    hello = modal_standin.hello
    monkeypatch.setenv("MODAL_TOKEN_ID", hello["token_id"])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-wrong")
    block = ModalSandbox()
    with pytest.raises(ConfigurationError, match="modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"):
        await block.check()
    monkeypatch.setenv("MODAL_TOKEN_SECRET", hello["token_secret"])
    await block.check()


def test_a_missing_token_is_an_error_before_any_call(modal_standin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(
        ConfigurationError,
        match=r"Token missing.*: run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET$",
    ):
        ModalInterpreter().start()
    assert not modal_standin.ask("state")["counts"]


async def test_an_unavailable_region_image_or_volume_is_named(modal_sandbox: Make, modal_standin: Any) -> None:
    assert "'mars'" in await refuse(modal_sandbox(region="mars"))
    assert "manifest unknown" in await refuse(modal_sandbox(image="registry.invalid/does-not-exist:1"))
    modal_standin.ask("volume", name="of-old", version=1)
    text = await refuse(modal_sandbox(volume_name="of-old"))
    assert "has version v1, not v2" in text
    assert "`volume_name` 'of-old' cannot be used" in text
    assert not modal_standin.ask("state")["sandboxes"]


@pytest.mark.full
async def test_a_failed_image_build_shows_pips_error(modal_sandbox: Make, modal_standin: Any) -> None:
    block = modal_sandbox(packages=[NO_PACKAGE])
    text = await refuse(block)
    assert "No such file or directory: '/nowhere/there_is_none-1.0-py3-none-any.whl'" in text
    assert "correct `image`, `setup` or `packages`" in text
    assert "modal image logs im-" in text
    await refuse(block)  # The block retries, because the user may have fixed the cause.
    assert not modal_standin.ask("state")["counts"].get("SandboxCreateV2")


async def test_a_full_workspace_raises_quota_exceeded(modal_sandbox: Make, modal_standin: Any) -> None:
    modal_standin.ask("set", max_sandboxes=1)
    block = modal_sandbox()
    async with block.interpreter():
        text = await refuse(block, QuotaExceeded)
        assert "Workspace limit of 1 concurrent sandboxes" in text
        assert "lower `max_workers`" in text.lower()
    assert modal_standin.ask("state")["counts"]["SandboxCreateV2"] == 2


async def test_throttling_is_retried_for_a_bounded_time(
    modal_sandbox: Make, modal_standin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttled = {"method": "SandboxCreateV2", "status": "RESOURCE_EXHAUSTED", "retry_after": 0.2}
    modal_standin.ask("faults", rules=[{**throttled, "times": 8}])
    block = modal_sandbox()
    opened = await asyncio.gather(*(block.open(block.labels("")) for _ in range(5)))
    await asyncio.gather(*(sandbox.remove() for sandbox in opened))
    assert modal_standin.ask("state")["faults"] == {"SandboxCreateV2": 8}
    monkeypatch.setenv("MODAL_MAX_THROTTLE_WAIT", "1")
    modal_standin.ask("faults", rules=[throttled])
    with pytest.raises(QuotaExceeded) as caught:
        await block.open(block.labels(""))
    assert caught.value.retry_after == pytest.approx(0.2)


async def test_an_image_without_python_says_so(modal_sandbox: Make, modal_standin: Any) -> None:
    modal_standin.ask("set", python="")
    with pytest.raises(SandboxStartError, match="python: No such file or directory"):
        async with modal_sandbox().interpreter():
            pass


@pytest.mark.full  # Modal's client retries until its timeout.
async def test_a_missing_or_silent_server_is_a_one_sentence_error(
    monkeypatch: pytest.MonkeyPatch, modal_sandbox: Make
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for url in ("https://no-such-host.invalid", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            monkeypatch.setenv("MODAL_SERVER_URL", url)
            text = await refuse(modal_sandbox(), SandboxStartError)
            assert f"{url} did not answer within 10 s" in text
            assert "MODAL_SERVER_URL" in text


def test_a_block_refuses_settings_that_modal_would_refuse() -> None:
    wrong: list[dict[str, Any]] = [
        {"lifetime": 90_000}, {"app_name": "no spaces"}, {"workdir": "here"}, {"cpu": 0}, {"packages": ["--upgrade"]},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ConfigurationError, match=next(iter(fields))):
            ModalInterpreter(**fields)


async def test_settings_that_the_client_cannot_send_raise_a_sentence(modal_sandbox: Make) -> None:
    for fields in ({"cpu": 1e9}, {"memory_mib": 2**40}):
        assert "client refused the settings" in await refuse(modal_sandbox(**fields))


async def test_no_secret_reaches_a_log(
    modal_sandbox: Make, modal_standin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    block = modal_sandbox(environment={"CODE_SECRET": "for the code"})
    async with block.interpreter() as interpreter:
        code = "import os; SUBMIT(names=[n for n in os.environ if 'TOKEN' in n], mine=os.environ['CODE_SECRET'])"
        result = await interpreter.execute(code)
    assert (result.names, result.mine) == ([], "for the code")
    for secret in (modal_standin.hello["token_secret"], "for the code"):
        assert secret not in caplog.text
        assert secret not in str(block)
        assert secret not in str(await block.fingerprint())
