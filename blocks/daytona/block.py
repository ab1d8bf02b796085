"""The Prefect block for sandboxes of Daytona."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from prefect.blocks.core import Block
from pydantic import HttpUrl

from .provider import DaytonaProvider
from .settings import DaytonaFields


class DaytonaSandbox(DaytonaProvider, Block):
    """Sandboxes of Daytona. They need an account and an API key.

    Without `snapshot` and `image` they start from the account's default snapshot, which Daytona keeps warm. The SDK
    reads settings that are missing here from DAYTONA_API_KEY, DAYTONA_API_URL and DAYTONA_TARGET.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import DaytonaSandbox, batch

        sandbox = DaytonaSandbox.load("BLOCK_NAME")
        results = batch.sync("SUBMIT(y=x * x)", inputs=[{"x": 2}, {"x": 3}], provider=sandbox)
        print([result.y for result in results])
        ```
    """

    _block_type_name: ClassVar[str] = "Daytona Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "daytona-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "Runs code in Daytona's sandboxes, with an API key of an account. There is nothing to install beside rlm-batch."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://www.daytona.io/docs/")  # type: ignore[misc]
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]

    if TYPE_CHECKING:  # Pydantic's own signature would reject secrets given as text.

        def __init__(self, **fields: Unpack[DaytonaFields]) -> None: ...
