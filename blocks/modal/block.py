"""The Prefect blocks for Modal: an account, and sandboxes."""

from typing import Any, ClassVar

from prefect.blocks.abstract import CredentialsBlock
from pydantic import Field, HttpUrl

from ..own_block import OwnBlock
from ..sandbox_block import SandboxBlock
from .provider import ModalProvider
from .settings import ModalAccountSettings


class ModalCredentials(ModalAccountSettings, OwnBlock, CredentialsBlock):
    """An account of Modal, which several sandbox blocks can share.

    Example:
        Load saved credentials, and run a batch in sandboxes of the account:
        ```python
        from rlm_batch import ModalCredentials, ModalSandbox, batch

        account = ModalCredentials.load("BLOCK_NAME")
        sandbox = ModalSandbox(credentials=account)
        sandbox.save("of-the-account")
        print(batch.sync(["SUBMIT(y=1)"], provider=sandbox)[0].y)
        ```
    """

    _block_type_name: ClassVar[str] = "RLM Modal Credentials"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "The token of a Modal account, for sandbox blocks. There is nothing to install beside rlm-batch."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl(  # type: ignore[misc]
        "https://modal.com/docs/reference/modal.config"
    )

    def get_client(self) -> Any:  # type: ignore[reportIncompatibleMethodOverride]
        """Return a client of Modal.

        Returns:
            A `modal.Client`, with the block's token or, without one, with that of Modal's own configuration.

        Raises:
            modal.exception.AuthError: There is no token.
        """
        import modal

        if self.token_id is None or self.token_secret is None:
            return modal.Client.from_env()
        return modal.Client.from_credentials(self.token_id.get_secret_value(), self.token_secret.get_secret_value())


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

    _block_type_name: ClassVar[str] = "RLM Modal Sandbox"  # type: ignore[misc]
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
