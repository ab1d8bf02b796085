"""What Prefect registers as block types: it imports this when it starts, so that a saved block loads by its name."""

from .container.block import ContainerSandbox
from .daytona.block import DaytonaSandbox
from .language_model.block import LanguageModel
from .local.block import LocalSandbox
from .modal.block import ModalSandbox

__all__ = ["ContainerSandbox", "DaytonaSandbox", "LanguageModel", "LocalSandbox", "ModalSandbox"]
