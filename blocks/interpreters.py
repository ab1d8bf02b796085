"""Interpreters for scripts that have no flow: one per provider, configured by its block's fields as keywords."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from ..sandbox.blocking import BlockingInterpreter
from ..sandbox.errors import ConfigurationError
from .daytona import DaytonaSandbox
from .local import LocalSandbox
from .modal import ModalSandbox
from .provider import SandboxProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..sandbox.contract import Sandbox

DEFAULT = "default"  # the saved block that is asked for credentials that nobody else has


class _ProviderInterpreter(BlockingInterpreter):
    """An interpreter whose sandbox comes from the block that a subclass names."""

    block: ClassVar[type[SandboxProvider]]

    def __init__(
        self,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        **fields: Any,
    ) -> None:
        self._fields = fields
        self._provider = _configured(self.block, fields)
        super().__init__(self._open_sandbox, timeout=timeout, tools=tools)

    async def _open_sandbox(self) -> Sandbox:
        provider = self._provider
        # Without that address, asking for a block would start a server.
        if not provider.has_credentials() and os.environ.get("PREFECT_API_URL"):
            try:
                saved = await self.block.aload(DEFAULT)
            except ValueError:
                pass  # there is none of that name: the provider says what is missing
            else:
                provider = self._provider = _configured(
                    self.block, {**{name: getattr(saved, name) for name in saved.model_fields_set}, **self._fields}
                )
        return await provider.open(provider.labels(""))


def _configured(block: type[SandboxProvider], fields: dict[str, Any]) -> SandboxProvider:
    unknown = sorted(set(fields) - set(block.model_fields))
    if unknown:
        raise ConfigurationError(
            f"{block.__name__} has no field {', '.join(unknown)}: it has {', '.join(block.model_fields)}"
        )
    try:
        return block(**fields)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigurationError(f"{block.__name__} cannot be configured like that: {wrong}") from None


class LocalInterpreter(_ProviderInterpreter):
    """Runs code in a sandbox on this machine, step by step.

    Keywords are `LocalSandbox`'s fields (`isolation="landlock"`, `memory_mib=1024`), `timeout` (seconds, the default
    for each execution) and `tools` (functions of the host that the code may call by name).

    Example:
        >>> with LocalInterpreter(timeout=120) as interpreter:
        ...     print(interpreter.execute("SUBMIT(total=sum(range(1000)))").total)
        499500
    """

    block = LocalSandbox


class ModalInterpreter(_ProviderInterpreter):
    """Runs code in a sandbox of Modal, step by step.

    Keywords are `ModalSandbox`'s fields (`volume_name="results"`, `gpu="T4"`), `timeout` (seconds, the default for each
    execution) and `tools` (functions of the host that the code may call by name).
    """

    block = ModalSandbox


class DaytonaInterpreter(_ProviderInterpreter):
    """Runs code in a sandbox of Daytona, step by step.

    Keywords are `DaytonaSandbox`'s fields (`repo_url`, `volume_name`, `snapshot`), `timeout` (seconds, the default for
    each execution) and `tools` (functions of the host that the code may call by name). The API key comes from
    `api_key`, or DAYTONA_API_KEY, or, with PREFECT_API_URL set, the saved block named `default`.

    Example:
        >>> with DaytonaInterpreter(timeout=120) as interpreter:
        ...     print(interpreter.execute("SUBMIT(total=sum(range(1000)))").total)
        499500
    """

    block = DaytonaSandbox
