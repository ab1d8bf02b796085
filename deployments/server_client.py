"""A client of the configured Prefect server, whose failures are sentences."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from ..flows.prefect_server import check_server
from ..flows.proxies import check_proxies
from ..sandbox.errors import ConfigurationError
from ..tasks.server_errors import describe_server_error


@asynccontextmanager
async def open_server_client() -> AsyncIterator[PrefectClient]:
    """A client of the server in PREFECT_API_URL.

    Raises ConfigurationError where no server is configured, where none answers, and for what it refuses meanwhile.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigurationError(
            "no Prefect server is configured: name one in PREFECT_API_URL, or start one with rlm-batch up"
        )
    check_proxies()
    try:
        async with get_client() as client:
            await check_server(client, url, "name another in PREFECT_API_URL")
            yield client
    except PrefectHTTPStatusError as error:
        raise ConfigurationError(
            f"the Prefect server at {url} refused what was asked of it: {describe_server_error(error)}"
        ) from error
    except httpx.HTTPError as error:
        raise ConfigurationError(
            f"the Prefect server at {url} went away meanwhile ({type(error).__name__}): look at it, and try again"
        ) from error
