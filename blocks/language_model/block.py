"""The language model as a Prefect block."""

from typing import ClassVar

from prefect.blocks.core import Block
from pydantic import HttpUrl

from .settings import LanguageModelSettings


class LanguageModel(LanguageModelSettings, Block):
    """A language model that answers the queries of sandboxed code: any model that LiteLLM serves, also a local one.

    Example:
        Install the extra (`pip install 'rlm-batch[rlm]'`), load a saved block, and let the code of a batch ask it:
        ```python
        from rlm_batch import LanguageModel, batch

        model = LanguageModel.load("BLOCK_NAME")  # to read its settings; a batch takes its name
        code = "SUBMIT(answer=llm_query('How many legs has a spider?'))"
        print(batch.sync([code], language_model="language-model/BLOCK_NAME")[0].answer)
        ```
    """

    _block_type_name: ClassVar[str] = "Language Model"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "language-model"  # type: ignore[misc]
    # The description is part of the schema. Saved blocks refer to the schema by its checksum, which a new text changes.
    _description: ClassVar[str] = "Answers the queries of sandboxed code, through LiteLLM."  # type: ignore[misc]
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://docs.litellm.ai/docs/providers")  # type: ignore[misc]
