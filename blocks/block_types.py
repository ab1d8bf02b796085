"""The block types that Prefect registers. Prefect imports this module at start, so saved blocks load by name."""

from .container.block import ContainerSandbox
from .daytona.block import DaytonaCredentials, DaytonaSandbox
from .language_model.block import LanguageModel
from .local.block import LocalSandbox
from .modal.block import ModalCredentials, ModalSandbox

__all__ = [
    "ContainerSandbox",
    "DaytonaCredentials",
    "DaytonaSandbox",
    "LanguageModel",
    "LocalSandbox",
    "ModalCredentials",
    "ModalSandbox",
]
