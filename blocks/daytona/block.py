"""The Prefect blocks for Daytona: an account, and sandboxes."""

from typing import Any, ClassVar

from prefect.blocks.abstract import CredentialsBlock
from pydantic import Field, HttpUrl

from ..own_block import OwnBlock
from ..sandbox_block import SandboxBlock
from .provider import DaytonaProvider
from .settings import DaytonaAccountSettings


class DaytonaCredentials(DaytonaAccountSettings, OwnBlock, CredentialsBlock):
    """An account of Daytona, which several sandbox blocks can share.

    Example:
        Load saved credentials, and run a batch in sandboxes of the account:
        ```python
        from rlm_batch import DaytonaCredentials, DaytonaSandbox, batch

        account = DaytonaCredentials.load("BLOCK_NAME")
        sandbox = DaytonaSandbox(credentials=account)
        sandbox.save("of-the-account")
        print(batch.sync(["SUBMIT(y=1)"], provider=sandbox)[0].y)
        ```
    """

    _block_type_name: ClassVar[str] = "RLM Daytona Credentials"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "The API key of a Daytona account, for sandbox blocks. There is nothing to install beside rlm-batch."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://www.daytona.io/docs/en/api-keys/")  # type: ignore[misc]

    def get_client(self) -> Any:  # type: ignore[reportIncompatibleMethodOverride]
        """Return a client of Daytona's SDK.

        Returns:
            A `daytona.AsyncDaytona`. Close it after use.

        Raises:
            daytona.DaytonaAuthenticationError: Neither the block nor the environment has a key.
        """
        import daytona

        key = None if self.api_key is None else self.api_key.get_secret_value()
        return daytona.AsyncDaytona(daytona.DaytonaConfig(api_key=key, api_url=self.api_url, target=self.target))


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

    _block_type_name: ClassVar[str] = "RLM Daytona Sandbox"  # type: ignore[misc]
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
