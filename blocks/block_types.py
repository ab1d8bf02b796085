"""The block types that Prefect registers. Prefect imports this module at start, so saved blocks load by name."""

from .container.block import ContainerSandbox
from .daytona.block import DaytonaSandbox
from .daytona.credentials import DaytonaCredentials
from .language_model.block import LanguageModel
from .local.block import LocalSandbox
from .modal.block import ModalSandbox
from .modal.credentials import ModalCredentials

__all__ = [
    "ContainerSandbox",
    "DaytonaCredentials",
    "DaytonaSandbox",
    "LanguageModel",
    "LocalSandbox",
    "ModalCredentials",
    "ModalSandbox",
]
