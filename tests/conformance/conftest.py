"""What every provider of sandboxes has to do: the same tests run on each name in `PROVIDERS`.

A new provider adds its name, and what opens it when the name is asked for.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlm_batch import ConfigurationError, DaytonaSandbox, LocalSandbox
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

PROVIDERS = ("local-none", "local-landlock", "local-bubblewrap", "daytona")
LITTLE_MEMORY = 256  # MiB


def make(name: str, memory_mib: int) -> SandboxProvider:
    """The provider of that name, whose sandboxes have at least that much memory and not much more."""
    if name == "daytona":  # in whole GiB, and with an image
        return DaytonaSandbox(image="python:3.12", memory=-(-memory_mib // 1024))
    isolation = name.removeprefix("local-")
    return LocalSandbox(isolation=isolation, memory_mib=memory_mib)  # type: ignore[arg-type]


@pytest.fixture(params=PROVIDERS)
def provider_name(request: pytest.FixtureRequest, running_daytona: object) -> str:
    if request.param == "daytona":
        request.getfixturevalue("daytona")
    return str(request.param)


@pytest.fixture
def provider(provider_name: str) -> SandboxProvider:
    """Each provider that this machine has, with its usual settings."""
    return _checked(make(provider_name, 4096))


@pytest.fixture
def small_provider(provider_name: str) -> SandboxProvider:
    """The same with little memory."""
    return _checked(make(provider_name, LITTLE_MEMORY))


@pytest.fixture
async def interpreter(provider: SandboxProvider) -> AsyncIterator[Interpreter]:
    """An interpreter in an open sandbox."""
    async with provider.interpreter(timeout=20) as interpreter:
        yield interpreter


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Every test here starts processes."""


def _checked(provider: SandboxProvider) -> SandboxProvider:
    try:
        asyncio.run(provider.check())
    except ConfigurationError as error:
        pytest.skip(error.summary)
    return provider
