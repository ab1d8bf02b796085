"""What a person configures: the providers of sandboxes, as Prefect blocks."""

from .local import LocalSandbox

__all__ = ["LocalSandbox"]  # what Prefect registers as block types: no abstract base among them
