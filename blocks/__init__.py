"""The sandbox providers and the language model, and their Prefect blocks.

A block is imported when its name is first used, so scripts can use this package without Prefect.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .block_types import (
        ContainerSandbox,
        DaytonaCredentials,
        DaytonaSandbox,
        LanguageModel,
        LocalSandbox,
        ModalCredentials,
        ModalSandbox,
    )

__all__ = [
    "ContainerSandbox",
    "DaytonaCredentials",
    "DaytonaSandbox",
    "LanguageModel",
    "LocalSandbox",
    "ModalCredentials",
    "ModalSandbox",
]

if not TYPE_CHECKING:  # A type checker that sees `__getattr__` accepts any name.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import block_types as collection

        return getattr(collection, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # `prefect block register --module rlm_batch.blocks` reads this.
