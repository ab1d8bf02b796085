"""The Prefect block for sandboxes of Modal."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from pydantic import Field, HttpUrl

from ..sandbox_block import SandboxBlock
from .credentials import ModalCredentials
from .provider import ModalProvider
from .settings import ModalFields


class ModalSandboxFields(ModalFields, total=False):
    """The keywords of `ModalSandbox`, for type checkers."""

    credentials: ModalCredentials | None


class ModalSandbox(ModalProvider, SandboxBlock):
    """Sandboxes of Modal. They need an account.

    Without `token_id` and `token_secret` the block signs in like Modal's own client: with MODAL_TOKEN_ID and
    MODAL_TOKEN_SECRET, or with the token that `modal token new` saved.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import ModalSandbox, batch

        sandbox = ModalSandbox.load("BLOCK_NAME")
        results = batch.sync("SUBMIT(y=x * x)", inputs=[{"x": 2}, {"x": 3}], provider=sandbox)
        print([result.y for result in results])
        ```
    """

    _block_type_name: ClassVar[str] = "Modal Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "modal-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "Runs code in sandboxes of Modal, with a token of an account. There is nothing to install beside rlm-batch."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://modal.com/docs/guide/sandbox")  # type: ignore[misc]

    account_settings: ClassVar[tuple[str, ...]] = ("credentials", *ModalProvider.account_settings)

    credentials: ModalCredentials | None = Field(
        default=None,
        title="Credentials",
        description="Account of the sandboxes. The fields of this block that are set have precedence.",
    )

    if TYPE_CHECKING:  # Pydantic's own signature would reject secrets given as text.

        def __init__(self, **fields: Unpack[ModalSandboxFields]) -> None: ...
