"""What a person configures: the providers of sandboxes and the language model, as Prefect blocks."""

from .daytona.block import DaytonaSandbox
from .language_model.block import LanguageModel
from .local.block import LocalSandbox
from .modal.block import ModalSandbox

# What Prefect registers as block types: no abstract base among them.
__all__ = ["DaytonaSandbox", "LanguageModel", "LocalSandbox", "ModalSandbox"]
