"""The Prefect clients of the flow runs in this process.

Measured with Prefect 3.9.1, an embedded server and runs of one execution:

- A run takes 65 ms of the program's CPU. It took 150 ms when each run read all settings again and made two clients that
  read the certificates of all authorities.
- A flow without `result_storage` asks the server for a default, with a request that blocks the event loop. If the
  server is busy, Prefect's waits between the tries block it too.
- A server on SQLite answers 503 to the creation of a flow run if another request writes at the same time. Prefect waits
  2, 4, 8, 16 and 32 s between its tries.
"""

import asyncio
import functools
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.context import AsyncClientContext, SettingsContext, SyncClientContext, get_settings_context
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
)

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun

T = TypeVar("T")

CREATION_WAITS_SECONDS = (0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)  # waits between quick tries, on average


@dataclass
class _SharedClient:
    key: object  # the server and the credentials
    client: PrefectClient
    users: int = 0
    answers: dict[str, "_Answer"] = field(default_factory=dict)


@dataclass
class _Answer:
    asked_at: float  # monotonic seconds
    task: "asyncio.Task[Any]"


# This run's client, and when the run started, in monotonic seconds. Runs of one event loop may use several servers.
_use: ContextVar[tuple[_SharedClient, float] | None] = ContextVar("_use", default=None)
_shared_clients: "WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedClient]" = WeakKeyDictionary()


@asynccontextmanager
async def open_clients(check: Callable[[], Coroutine[Any, Any, None]] | None = None) -> AsyncIterator[None]:
    """Make Prefect's engine and our own code use one client in the context.

    All runs of an event loop that use a server at the same time share the client, and create their flow runs one at a
    time.

    Args:
        check: Checks the server before the client does, whose errors do not say what to do. It runs once for all runs.
    """
    loop, client = asyncio.get_running_loop(), make_client()
    key = (client.api_url, PREFECT_API_AUTH_STRING.value(), PREFECT_API_KEY.value())
    shared = _shared_clients.get(loop)
    if shared is None or shared.key != key:
        _share_csrf_tokens(client)
        client.request = _register_flows_once(client.request)  # type: ignore[method-assign]
        client.create_flow_run = _create_one_at_a_time(client.create_flow_run)  # type: ignore[method-assign]
        shared = _shared_clients[loop] = _SharedClient(key, client)
    shared.users += 1
    token = _use.set((shared, time.monotonic()))
    try:
        if check is not None:
            await ask_once("check", check)
        # Prefect's own constructors would make other clients. `get_client()` returns a context's client.
        async with AsyncClientContext.model_construct(client=shared.client):
            sync_client = get_client(sync_client=True, httpx_settings=_build_settings())
            with SyncClientContext.model_construct(client=sync_client):
                yield
    finally:
        _use.reset(token)
        shared.users -= 1
        if not shared.users:  # The client is closed.
            for answer in shared.answers.values():
                answer.task.cancel()
            if _shared_clients.get(loop) is shared:
                del _shared_clients[loop]


async def ask_once(question: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the server's answer. Runs share it that start before one of them asks, or while the server answers.

    The server's CPU limits how many runs can start at the same time. Each of 50 such runs took 89 to 98 ms of it when
    it asked alone, and takes 74 ms (Prefect 3.9.1 on SQLite).

    Args:
        question: The question's name.
        ask: Asks the server. If it raises, this run and those that wait with it fail, and the next run asks again.
    """
    use = _use.get()
    if use is None:
        return await ask()
    shared, started_at = use
    answer = shared.answers.get(question)
    if answer is None or (answer.task.done() and answer.asked_at < started_at):
        answer = shared.answers[question] = _Answer(time.monotonic(), asyncio.create_task(ask()))
    try:
        return await asyncio.shield(answer.task)  # Other runs wait for it too.
    except Exception:
        if shared.answers.get(question) is answer:
            del shared.answers[question]
        raise


def _forget_answer(question: str) -> None:
    """Let the next run that wants this answer ask the server again."""
    use = _use.get()
    if use is not None:
        use[0].answers.pop(question, None)


def make_client() -> PrefectClient:
    """Return a client that is not shared. It reads no certificates if the server's address needs none."""
    return get_client(httpx_settings={**_build_settings(), "event_hooks": {"response": [_skip_last_wait]}})


def _build_settings() -> dict[str, Any]:
    """Return the settings of an httpx client. A server without TLS needs no certificates."""
    url = PREFECT_API_URL.value()
    return {} if url and not url.startswith("http://") else {"verify": _make_empty_tls_context()}


async def _skip_last_wait(response: httpx.Response) -> None:
    """Let Prefect return a last answer at once. It would wait as before another try."""
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and not PREFECT_CLIENT_MAX_RETRIES.value():
        response.headers["Retry-After"] = "0"


@functools.cache
def _make_empty_tls_context() -> ssl.SSLContext:
    """Return a context that trusts no authority, so that a redirect to https fails."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _share_csrf_tokens(client: PrefectClient) -> None:
    """Let the client's concurrent requests wait for one CSRF token.

    With Prefect 3.9.1 each request without a token asks for one, and the server accepts a client's last token only. So
    twenty runs that an own flow starts at the same time invalidated each other's tokens until Prefect's retries ended.
    """
    http: Any = client._client
    add, adding = http._add_csrf_headers, None

    async def add_headers(request: httpx.Request) -> None:
        nonlocal adding
        expiry = http.csrf_token_expiration
        if http.csrf_token and (expiry is None or expiry > datetime.now(UTC)):
            await add(request)
        elif adding is None or adding.done():
            adding = asyncio.create_task(add(request))
            await asyncio.shield(adding)  # Other requests wait for it too.
        else:
            await asyncio.shield(adding)
            await add(request)

    http._add_csrf_headers = add_headers


def _register_flows_once(send: Callable[..., Coroutine[Any, Any, httpx.Response]]) -> Callable[..., Any]:
    """Return a function that sends requests. Prefect's client registers the flow with each flow run that it creates."""

    async def request(method: str, path: str, *args: Any, **options: Any) -> httpx.Response:
        ask = functools.partial(send, method, path, *args, **options)
        if (method, path) == ("POST", "/flows/"):
            return await ask_once(f"flow {options['json']['name']}", ask)
        return await ask()

    return request


def _create_one_at_a_time(
    create: Callable[..., Coroutine[Any, Any, "FlowRun"]],
) -> Callable[..., Coroutine[Any, Any, "FlowRun"]]:
    """Return a function that creates flow runs one at a time, and soon tries again if the server is busy.

    Another process may create flow runs on the same server. If the server stays busy, Prefect's own waits follow.
    """
    lock = asyncio.Lock()

    async def create_flow_run(flow: "Flow[..., Any]", *args: Any, **kwargs: Any) -> "FlowRun":
        async with lock:
            for seconds in CREATION_WAITS_SECONDS:
                try:
                    with change_settings(client={"max_retries": 0}):
                        return await create(flow, *args, **kwargs)
                except httpx.HTTPError as error:
                    status = getattr(getattr(error, "response", None), "status_code", None)
                    if status == httpx.codes.CONFLICT:
                        _forget_answer(f"flow {flow.name}")  # The flow was deleted after a run had registered it.
                    elif status != httpx.codes.SERVICE_UNAVAILABLE:
                        break  # Prefect decides below whether it is worth another try.
                await asyncio.sleep(random.uniform(0.5, 1.5) * seconds)
            return await create(flow, *args, **kwargs)

    return create_flow_run


@contextmanager
def change_settings(ui_url: str | None = None, **sections: dict[str, Any]) -> Iterator[None]:
    """Change settings of Prefect in the context, which has its own copy of them.

    Prefect's `temporary_settings` reads all settings again, which takes 50 ms of CPU.

    Args:
        ui_url: The address of the UI, if it changes.
        **sections: The new values by name, for each section of the settings, such as `client`.
    """
    context = get_settings_context()
    changes = {name: getattr(context.settings, name).model_copy(update=values) for name, values in sections.items()}
    if ui_url is not None:
        changes["ui_url"] = ui_url
    with SettingsContext(profile=context.profile, settings=context.settings.model_copy(update=changes)):
        yield
