"""The language model as a Prefect block."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from prefect.blocks.core import Block
from pydantic import HttpUrl

from .settings import LanguageModelFields, LanguageModelSettings


class LanguageModel(LanguageModelSettings, Block):
    """Answers the queries of sandboxed code: anything that LiteLLM serves, a model on your own machine included.

    Example:
        Load a saved block, and let the code of a batch ask it:
        ```python
        from rlm_batch import LanguageModel

        model = LanguageModel.load("BLOCK_NAME")
        ```
    """

    _block_type_name: ClassVar[str] = "Language Model"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "language-model"  # type: ignore[misc]
    _description: ClassVar[str] = "Answers the queries of sandboxed code, through LiteLLM."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://docs.litellm.ai/docs/providers")  # type: ignore[misc]

    if TYPE_CHECKING:  # In what they make of pydantic's fields no secret may be text.

        def __init__(self, **fields: Unpack[LanguageModelFields]) -> None: ...
