"""What every provider of sandboxes is: a Prefect block that can open them, list them and remove them."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from ..sandbox.interpreter import Interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox that carries our labels, as its provider lists it."""

    id: str
    labels: dict[str, str]

    @property
    def expires(self) -> float:
        """When its lifetime is over, in epoch seconds; 0 where the label is missing or damaged."""
        try:
            return float(self.labels["rlm-batch-expires"])
        except (KeyError, ValueError):
            return 0.0


class SandboxProvider(Block, ABC):
    """Opens sandboxes, lists those that carry our labels, and removes one by its id."""

    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]
    provider_name: ClassVar[str]

    environment: dict[str, SecretStr] = Field(
        default_factory=dict,
        title="Environment",
        description="Environment variables that the sandboxed code sees. No other secret reaches it.",
    )
    lifetime: int = Field(
        default=86_400,
        ge=1,
        title="Lifetime",
        description="Seconds after which the provider itself removes a sandbox, whatever became of its host.",
    )

    @abstractmethod
    async def open(self, labels: dict[str, str]) -> Sandbox:
        """Opens a sandbox. Raises SandboxStartError, QuotaExceeded or ConfigurationError, and leaves nothing then."""

    @abstractmethod
    async def list_sandboxes(self) -> list[SandboxInfo]:
        """The sandboxes that carry our labels, whoever opened them."""

    @abstractmethod
    async def delete_sandbox(self, sandbox_id: str) -> None:
        """Removes one, with all that runs in it. One that has gone is no error."""

    @abstractmethod
    async def check(self) -> str:
        """What keeps code in, in a line for a log. Raises ConfigurationError where no sandbox can be opened."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """The settings that a result depends on: no secrets, no limits."""

    def labels(self, run: str) -> dict[str, str]:
        """What a sandbox of the flow run (or script) `run` is labelled with."""
        return {
            "managed-by": "rlm-batch",
            "rlm-batch-run": run,
            "rlm-batch-host": socket.gethostname(),
            "rlm-batch-expires": str(int(time.time()) + self.lifetime),
        }

    def interpreter(
        self, *, run: str = "", timeout: float | None = 120.0, tools: dict[str, Callable[..., Any]] | None = None
    ) -> Interpreter:
        """An interpreter in a sandbox of its own, not yet open. Parameters are those of `Interpreter`."""
        return Interpreter(lambda: self.open(self.labels(run)), timeout=timeout, tools=tools)
