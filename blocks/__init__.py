"""What a person configures: the providers of sandboxes and the language model.

The Prefect blocks are found here too, imported when one is asked for: what a script uses of this room needs no Prefect.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .block_types import ContainerSandbox, DaytonaSandbox, LanguageModel, LocalSandbox, ModalSandbox

__all__ = ["ContainerSandbox", "DaytonaSandbox", "LanguageModel", "LocalSandbox", "ModalSandbox"]

if not TYPE_CHECKING:  # A type checker that saw it would take any name for a public one.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import block_types as collection

        return getattr(collection, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # `prefect block register --module rlm_batch.blocks` goes by this
