"""The language model as a Prefect block."""

from typing import ClassVar

from pydantic import HttpUrl

from ..own_block import OwnBlock
from .settings import LanguageModelSettings


class LanguageModel(LanguageModelSettings, OwnBlock):
    """A language model that answers the queries of sandboxed code: any model that LiteLLM serves, also a local one.

    Example:
        Install the extra (`pip install 'rlm-batch[rlm]'`), load a saved block, and let the code of a batch ask it:
        ```python
        from rlm_batch import LanguageModel, batch

        model = LanguageModel.load("BLOCK_NAME")  # to read its settings; a batch takes its name
        code = "SUBMIT(answer=llm_query('How many legs has a spider?'))"
        print(batch.sync([code], language_model="rlm-language-model/BLOCK_NAME")[0].answer)
        ```
    """

    _block_type_name: ClassVar[str] = "RLM Language Model"  # type: ignore[misc]
    # The description is part of the schema. Saved blocks refer to the schema by its checksum, which a new text changes.
    _description: ClassVar[str] = "Answers the queries of sandboxed code, through LiteLLM."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://docs.litellm.ai/docs/providers")  # type: ignore[misc]
