"""The language model as a Prefect block."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from prefect.blocks.core import Block
from pydantic import HttpUrl

from .settings import LanguageModelFields, LanguageModelSettings


class LanguageModel(LanguageModelSettings, Block):
    """Answers the queries of sandboxed code: anything that LiteLLM serves, a model on your own machine included.

    Example:
        Install the extra (`pip install 'rlm-batch[rlm]'`), load a saved block, and let the code of a batch ask it:
        ```python
        from rlm_batch import LanguageModel, batch

        model = LanguageModel.load("BLOCK_NAME")  # its settings; code is given its name
        code = "SUBMIT(answer=llm_query('How many legs has a spider?'))"
        print(batch.sync([code], language_model="language-model/BLOCK_NAME")[0].answer)
        ```
    """

    _block_type_name: ClassVar[str] = "Language Model"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "language-model"  # type: ignore[misc]
    # Part of the schema, of which saved blocks have the checksum.
    _description: ClassVar[str] = "Answers the queries of sandboxed code, through LiteLLM."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://docs.litellm.ai/docs/providers")  # type: ignore[misc]

    if TYPE_CHECKING:  # In what they make of pydantic's fields no secret may be text.

        def __init__(self, **fields: Unpack[LanguageModelFields]) -> None: ...
