"""Blocks that are saved on a Prefect server: the one place where providers and models ask Prefect for a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..sandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from prefect.blocks.core import Block


def has_prefect_server() -> bool:
    """Return True if a Prefect server is configured or this code runs in a flow. Otherwise loading would start one."""
    from prefect.context import AsyncClientContext, FlowRunContext
    from prefect.settings import PREFECT_API_URL

    return bool(FlowRunContext.get() or AsyncClientContext.get() or PREFECT_API_URL.value())


async def load_saved_block(block: type[Block], text: str) -> Any:
    """Load the block that `text` names, such as `rlm-daytona-sandbox/NAME`. Its class imports Prefect.

    Raises ConfigurationError if the server has no such block or the block is not valid.
    """
    from pydantic import ValidationError

    from .problems import describe_problems

    name = text.partition("/")[2]
    try:
        return await block.aload(name)
    except ValidationError as error:
        secrets = [field for field, info in block.model_fields.items() if "SecretStr" in str(info.annotation)]
        wrong = describe_problems(error, secrets)
        raise ConfigurationError(f"the saved block {text} is not valid: {wrong}") from None
    except ValueError as error:
        raise ConfigurationError(
            f"this Prefect server has no block {text}: save it in the UI or with .save({name!r})"
        ) from error
