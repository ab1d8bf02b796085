"""What a person configures: the providers of sandboxes and the language model, as Prefect blocks."""

from .language_model import LanguageModel
from .local import LocalSandbox

__all__ = ["LanguageModel", "LocalSandbox"]  # what Prefect registers as block types: no abstract base among them
