"""Attempts of judged code to pass its check: on every provider the result's fields come from the check alone."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rlm_batch import Failure, OutcomeUnknown, Result, batch

from ...infra.requirements import mark_level
from .forgeries import CHECK, FIRST, FORGERIES, HONEST, SECRET

pytestmark = pytest.mark.anyio

LEVELS = ("bubblewrap", "landlock")
REMOTE = {"daytona": {"image": "python:3.12"}, "modal": {}}
# Attempts that end their sandbox, where its code may end all processes. Rates leave such an execution out.
ENDS_SANDBOX = ("a signal to the parent", "signals to all processes")
TIMEOUT = 20  # seconds; only the attempts that wait for it take so long


async def judge_forgeries(provider: str, names: Iterable[str] = FORGERIES, **options: Any) -> None:
    """Run an honest solution, which alone passes, and the attempts of these names.

    The solution knows the secret, and an attempt in the same sandbox could find it in memory. So each has its own run.
    """
    options |= {"check": CHECK, "provider": provider, "timeout": TIMEOUT, "max_workers": 4}
    (honest,) = await batch([HONEST], **options)
    results = await batch([FORGERIES[name] for name in names], on_failure="return", **options)
    wrong = {
        name: getattr(result, "outputs", result)
        for name, result in zip(names, results, strict=True)
        if not isinstance(result, Result) or result.outputs != {"passed": False, "reached": []}
    }
    assert wrong == {}
    assert honest.outputs == {"passed": True, "reached": []}
    assert honest.meta.judged is not None
    assert honest.meta.judged["outputs"] == {"answer": SECRET}


@pytest.mark.requires("isolation")
async def test_no_forgery_of_each_kind_passes() -> None:
    await judge_forgeries("local", FIRST)


@pytest.mark.full
@pytest.mark.parametrize("level", [pytest.param(level, marks=mark_level(level)) for level in LEVELS])
@pytest.mark.parametrize("reuse", [False, True])
async def test_no_forgery_passes_in_local_sandboxes(level: str, reuse: bool) -> None:
    await judge_forgeries(f"local:{level}", reuse_sandboxes=reuse)


@pytest.mark.full
@pytest.mark.requires("podman")
async def test_no_forgery_passes_in_containers(no_container_left: None) -> None:
    await judge_forgeries("container")


@pytest.mark.full
@pytest.mark.requires("namespaces")
@pytest.mark.parametrize("provider", REMOTE)
async def test_no_forgery_passes_on_remote_providers(provider: str, account: Callable[..., None]) -> None:
    account(provider)
    options: dict[str, Any] = {"provider_options": REMOTE[provider]}
    await judge_forgeries(provider, FORGERIES.keys() - set(ENDS_SANDBOX), **options)
    attempts = [FORGERIES[name] for name in ENDS_SANDBOX]
    outcomes = await batch(attempts, check=CHECK, provider=provider, timeout=TIMEOUT, on_failure="return", **options)
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.error, OutcomeUnknown)
        assert outcome.meta.judged is None
