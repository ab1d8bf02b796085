"""What every provider of sandboxes has to do: the same tests run on each name in `PROVIDERS`.

A new provider adds its name, and what opens it when the name is asked for.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlm_batch import DaytonaSandbox, LocalSandbox, ModalSandbox
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.isolation_levels import lacks, needs

PROVIDERS = ("local-none", "local-landlock", "local-bubblewrap", "daytona", "modal")
# Code without isolation runs as under bubblewrap, less what that adds: where bubblewrap is there, it waits for the full
# tests.
LATER = () if lacks("bubblewrap") else ("local-none",)
LITTLE_MEMORY = 256  # MiB


def make(name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    """The provider of that name, whose sandboxes have at least that much memory and not much more."""
    if name == "modal":
        hello = request.getfixturevalue("modal_standin").hello
        return ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"], memory_mib=memory_mib)
    if name == "daytona":  # in whole GiB, and with an image
        return DaytonaSandbox(image="python:3.12", memory=-(-memory_mib // 1024))
    isolation = name.removeprefix("local-")
    return LocalSandbox(isolation=isolation, memory_mib=memory_mib)  # type: ignore[arg-type]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.full if name in LATER else ()) for name in PROVIDERS])
def provider_name(request: pytest.FixtureRequest, running_daytona: object) -> str:
    if request.param == "daytona":
        request.getfixturevalue("daytona")
    return str(request.param)


@pytest.fixture
def provider(provider_name: str, request: pytest.FixtureRequest) -> SandboxProvider:
    """Each provider that this machine has, with its usual settings."""
    return _checked(make(provider_name, 4096, request))


@pytest.fixture
def small_provider(provider_name: str, request: pytest.FixtureRequest) -> SandboxProvider:
    """The same with little memory."""
    return _checked(make(provider_name, LITTLE_MEMORY, request))


@pytest.fixture
def volume_name(volumes: Path) -> str:
    """A volume of the test's own."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def interpreter(provider: SandboxProvider) -> AsyncIterator[Interpreter]:
    """An interpreter in an open sandbox."""
    async with provider.interpreter(timeout=20) as interpreter:
        yield interpreter


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Every test here starts processes."""


def _checked(provider: SandboxProvider) -> SandboxProvider:
    if isinstance(provider, LocalSandbox):
        needs(provider.isolation)
    asyncio.run(provider.check())
    return provider
