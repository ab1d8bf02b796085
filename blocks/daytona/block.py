"""The Prefect block for sandboxes of Daytona."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from pydantic import Field, HttpUrl

from ..sandbox_block import SandboxBlock
from .credentials import DaytonaCredentials
from .provider import DaytonaProvider
from .settings import DaytonaFields


class DaytonaSandboxFields(DaytonaFields, total=False):
    """The keywords of `DaytonaSandbox`, for type checkers."""

    credentials: DaytonaCredentials | None


class DaytonaSandbox(DaytonaProvider, SandboxBlock):
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

    account_settings: ClassVar[tuple[str, ...]] = ("credentials", *DaytonaProvider.account_settings)

    credentials: DaytonaCredentials | None = Field(
        default=None,
        title="Credentials",
        description="Account of the sandboxes. The fields of this block that are set have precedence.",
    )

    if TYPE_CHECKING:  # Pydantic's own signature would reject secrets given as text.

        def __init__(self, **fields: Unpack[DaytonaSandboxFields]) -> None: ...
