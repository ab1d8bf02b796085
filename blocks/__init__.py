"""What a person configures: the providers of sandboxes, as Prefect blocks."""

from .daytona import DaytonaSandbox
from .local import LocalSandbox
from .modal import ModalSandbox

# What Prefect registers as block types: no abstract base among them.
__all__ = ["DaytonaSandbox", "LocalSandbox", "ModalSandbox"]
