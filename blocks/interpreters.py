"""Interpreters for scripts that have no flow: one per provider, configured by its block's fields as keywords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..sandbox.blocking import BlockingInterpreter
from ..sandbox.errors import ConfigurationError
from .local import LocalSandbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from .provider import SandboxProvider


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


class LocalInterpreter(BlockingInterpreter):
    """Runs code in a sandbox on this machine, step by step.

    Keywords are `LocalSandbox`'s fields (`isolation="landlock"`, `memory_mib=1024`), `timeout` (seconds, the default
    for each execution) and `tools` (functions of the host that the code may call by name).

    Example:
        >>> with LocalInterpreter(timeout=120) as interpreter:
        ...     print(interpreter.execute("SUBMIT(total=sum(range(1000)))").total)
        499500
    """

    def __init__(
        self,
        *,
        timeout: float | None = 120.0,
        tools: dict[str, Callable[..., Any]] | None = None,
        **fields: Any,
    ) -> None:
        provider = _configured(LocalSandbox, fields)
        super().__init__(lambda: provider.open(provider.labels("")), timeout=timeout, tools=tools)
