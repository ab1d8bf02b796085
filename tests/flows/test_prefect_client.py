"""The Prefect clients of runs in one process: flow runs that start at the same time, on a busy server."""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import prefect
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from rlm_batch import ConfigurationError
from rlm_batch.flows.prefect_client import CREATION_WAITS_SECONDS, open_clients
from rlm_batch.flows.prefect_server import provide_server

pytestmark = pytest.mark.anyio


@prefect.flow
def nothing() -> None:
    """Do nothing."""


class BusyServer(ThreadingHTTPServer):
    """A server that answers 503 to the first `refusals` creations of flow runs."""

    def __init__(self, refusals: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refusals = refusals
        self.creations = self.registrations = self.tokens = 0
        self.overlapping_creations = 0
        self.checks = 0
        self.flow_id = ""  # An empty id: no flow is registered.
        self.is_healthy = True
        self.is_creating = threading.Lock()

    def answer(self, path: str, flow_id: str | None) -> tuple[int, Any]:
        """Return the status and the content for a path, and a flow's id in the request."""
        if path == "/api/health":
            self.checks += 1
            return (200, True) if self.is_healthy else (404, {})
        if path == "/api/admin/version":
            return 200, prefect.__version__
        if path.startswith("/api/csrf-token"):
            self.tokens += 1
            return 200, {"client": "a-client", "token": "a-token", "expiration": "9999-01-01T00:00:00Z"}
        if path == "/api/task_runs/":
            return 201, {}
        if path == "/api/flows/":
            self.registrations += 1
            self.flow_id = self.flow_id or str(uuid.uuid4())
            return 201, {"id": self.flow_id, "name": "nothing"}
        if path != "/api/flow_runs/":
            return 404, {}
        if flow_id != self.flow_id:
            return 409, {"detail": "Data integrity conflict."}
        if not self.is_creating.acquire(blocking=False):
            self.overlapping_creations += 1
            return 503, {}
        with self.is_creating_now():
            if self.refusals:
                self.refusals -= 1
                return 503, {}
            self.creations += 1
            return 201, {"id": str(uuid.uuid4()), "flow_id": flow_id, "name": "a-run"}

    @contextmanager
    def is_creating_now(self) -> Iterator[None]:
        """Give other requests the time to arrive, and release the lock."""
        try:
            threading.Event().wait(0.02)
            yield
        finally:
            self.is_creating.release()


class Handler(BaseHTTPRequestHandler):
    """The requests of the server."""

    server: BusyServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        status, content = self.server.answer(self.path, request.get("flow_id"))
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *_: object) -> None: ...


@contextmanager
def serve(refusals: int) -> Iterator[BusyServer]:
    """Run a busy server, whose clients do not retry by themselves."""
    with BusyServer(refusals) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            try:
                yield server
            finally:
                server.shutdown()


async def create(may_create: asyncio.Barrier | None = None) -> str:
    """Create a flow run as Prefect's engine does, and return its name."""
    async with open_clients():
        if may_create is not None:
            await may_create.wait()
        return (await get_client().create_flow_run(nothing)).name


async def test_flow_runs_that_start_at_the_same_time_are_created_one_after_another() -> None:
    with serve(refusals=0) as server:
        assert await asyncio.gather(*(create() for _ in range(5))) == ["a-run"] * 5
    assert (server.creations, server.overlapping_creations) == (5, 0)


async def test_runs_that_start_at_the_same_time_register_their_flow_once_and_a_later_run_does_it_again() -> None:
    with serve(refusals=0) as server:
        async with open_clients():
            all_started = asyncio.Barrier(5)
            await asyncio.gather(*(create(all_started) for _ in range(5)))
            assert server.registrations == 1
            await create()
    assert server.registrations == 2


async def test_a_flow_that_is_deleted_while_runs_wait_for_their_creation_is_registered_again() -> None:
    with serve(refusals=0) as server:
        async with open_clients():
            await get_client().create_flow_run(nothing)
            server.flow_id = ""  # as after `prefect flow delete`
            assert (await get_client().create_flow_run(nothing)).name == "a-run"
    assert (server.creations, server.registrations) == (2, 2)


async def test_a_run_registers_its_flow_with_its_own_server_beside_a_run_on_another() -> None:
    has_created, may_end = asyncio.Event(), asyncio.Event()

    async def create_and_wait() -> None:
        async with open_clients():
            await get_client().create_flow_run(nothing)
            has_created.set()
            await may_end.wait()

    with serve(refusals=0) as first:
        async with open_clients():
            client = get_client()
            with serve(refusals=0) as second:
                other = asyncio.create_task(create_and_wait())
                await has_created.wait()
                await client.create_flow_run(nothing)
                may_end.set()
                await other
    assert (first.registrations, second.registrations) == (1, 1)


async def test_changes_at_the_same_time_share_a_token_because_the_server_accepts_only_the_last_one() -> None:
    with serve(refusals=0) as server:
        async with open_clients():
            first, *others = [
                asyncio.create_task(get_client().request("POST", "/task_runs/", json={})) for _ in range(5)
            ]
            await asyncio.sleep(0)  # All wait for the first one's token.
            first.cancel()
            assert [answer.status_code for answer in await asyncio.gather(*others)] == [201] * 4
    assert (first.cancelled(), server.tokens) == (True, 1)


async def test_a_creation_that_a_busy_server_refuses_is_tried_again() -> None:
    with serve(refusals=3):
        assert await create() == "a-run"


async def test_a_server_that_stays_busy_is_reported() -> None:
    with serve(refusals=100) as server, pytest.raises(Exception, match="503"):
        await create()
    assert server.refusals == 100 - len(CREATION_WAITS_SECONDS) - 1


async def test_runs_of_one_event_loop_share_a_client_until_the_last_one_ends() -> None:
    with serve(refusals=0):
        async with open_clients():
            first = get_client()
            async with open_clients():
                assert get_client() is first
            assert (await first.create_flow_run(nothing)).name == "a-run"
        async with open_clients():
            assert get_client() is not first


async def use_server(until: asyncio.Event) -> None:
    """Use the configured server as a run does."""
    async with provide_server():
        await until.wait()


async def test_runs_at_the_same_time_check_the_server_once_and_a_later_run_checks_it_again() -> None:
    end = asyncio.Event()
    with serve(refusals=0) as server:
        runs = [asyncio.create_task(use_server(end)) for _ in range(5)]
        async with provide_server():  # It asks after the others.
            assert server.checks == 1
        end.set()
        await asyncio.gather(*runs)
        server.is_healthy = False
        with pytest.raises(ConfigurationError, match="is not a Prefect API"):
            await use_server(end)


async def test_a_run_that_is_cancelled_leaves_the_check_to_the_others() -> None:
    end = asyncio.Event()
    end.set()
    with serve(refusals=0) as server:
        first, second = asyncio.create_task(use_server(end)), asyncio.create_task(use_server(end))
        await asyncio.sleep(0)  # Both wait for the first one's check.
        first.cancel()
        await asyncio.wait([first, second])
    assert (first.cancelled(), second.exception(), server.checks) == (True, None, 1)
