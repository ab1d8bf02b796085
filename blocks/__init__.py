"""What a person configures: the providers of sandboxes, as Prefect blocks."""

from .daytona import DaytonaSandbox
from .local import LocalSandbox

__all__ = ["DaytonaSandbox", "LocalSandbox"]  # what Prefect registers as block types: no abstract base among them
