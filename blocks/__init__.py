"""What a person configures: the providers of sandboxes and the language model, as Prefect blocks."""

from .daytona import DaytonaSandbox
from .language_model import LanguageModel
from .local import LocalSandbox
from .modal import ModalSandbox

# What Prefect registers as block types: no abstract base among them.
__all__ = ["DaytonaSandbox", "LanguageModel", "LocalSandbox", "ModalSandbox"]
