"""What a person configures: the providers of sandboxes, as Prefect blocks."""

from .local import LocalSandbox
from .modal import ModalSandbox

__all__ = ["LocalSandbox", "ModalSandbox"]  # what Prefect registers as block types: no abstract base among them
