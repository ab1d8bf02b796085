"""The Prefect block for sandboxes of Modal."""

from typing import TYPE_CHECKING, ClassVar, Unpack

from prefect.blocks.core import Block
from pydantic import HttpUrl

from .provider import ModalProvider
from .settings import ModalFields


class ModalSandbox(ModalProvider, Block):
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
    _block_schema_capabilities: ClassVar[list[str]] = ["open-sandbox"]  # type: ignore[misc]

    if TYPE_CHECKING:  # Pydantic's own signature would reject secrets given as text.

        def __init__(self, **fields: Unpack[ModalFields]) -> None: ...
