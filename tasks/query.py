"""The Prefect task of a query. Its task run is a child of the task run of the execution whose code asked the query."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed
from prefect.transactions import CommitMode, atransaction

from ..sandbox.errors import RlmBatchError
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.queries.session import Query
from .engine_log import QUERY_TASK_NAME
from .task_runs import return_cancelled_state

MAX_TRACKED_QUERIES = 300  # queries of a flow run with task runs; each takes 4 ms here and about 10 ms on the server
QUIET_SECONDS = 0.005  # A task run starts or ends after so long a time without questions and answers.
MAX_NAME_CHARACTERS = 80  # characters of a prompt in the name of its task run
MAX_DELAY_SECONDS = 0.05  # A start or an end waits at most this long for such a time.


class _QueryCall:
    """A query and its work, in one parameter that Prefect does not inspect."""

    def __init__(self, query: Query, work: Callable[[], Awaitable[Any]]) -> None:
        self.query, self.work = query, work
        self.error: RlmBatchError | None = None

    def __str__(self) -> str:
        """Return the task run's name: the turn, the query's kind, and the first words of its prompt."""
        query = self.query
        words = " ".join(query.prompt.split())
        if len(words) > MAX_NAME_CHARACTERS:
            words = f"{words[: MAX_NAME_CHARACTERS - 3]}..."
        turn = f"turn {query.turn}, " if query.turn else ""
        return escape_text(f"{turn}{query.kind}: {words}")


@task(
    name=QUERY_TASK_NAME,
    task_run_name="{call}",
    retries=0,  # Otherwise Prefect's settings would have the model asked, and paid, again.
    retry_delay_seconds=0,
    persist_result=False,
    cache_policy=NO_CACHE,
    log_prints=False,
    tags={"query"},
)
@return_cancelled_state
async def run_query(call: _QueryCall) -> Any:
    """Run a query and return its final state with its usage. Store an error in `call.error` for the caller."""
    try:
        answer = await call.work()
    except RlmBatchError as error:
        call.error = error
        return Failed(message=f"{type(error).__name__}: {error.summary} ({call.query.usage_text})")
    return Completed(message=call.query.usage_text, data=answer)


async def _make_task_run(call: _QueryCall) -> Any:
    # A failed task rolls back its parent's transaction, and the state of each sibling becomes RolledBack. An eager
    # transaction commits a query when it ends, so a failed sibling does not change its state.
    async with atransaction(commit_mode=CommitMode.EAGER):
        return await run_query(call, return_state=True)  # type: ignore[reportGeneralTypeIssues]


class QueryTracker:
    """A tracker that creates a task run for each of the first `MAX_TRACKED_QUERIES` queries of a flow run.

    The other queries are only in the ledger. A flat query does not wait for Prefect: its work starts at once. Its task
    run starts and ends in the background. A recursive query's work runs inside its task run, so the task runs of the
    queries that it asks are below it. As an async context manager, it waits for all task runs at its end.
    """

    def __init__(self) -> None:
        self._tracked_count = 0
        self._background_runs: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()  # held by the task run that waits for a quiet moment
        self._active_at = 0.0  # loop time of the last question or answer

    async def track_query(self, query: Query, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the query's answer from `work`, or raise its error."""
        if self._tracked_count >= MAX_TRACKED_QUERIES:
            return await work()
        self._tracked_count += 1
        if query.kind == "llm_query":  # a flat query
            self._note_activity()
            answer = asyncio.ensure_future(work())
            answer.add_done_callback(self._note_activity)
            run = asyncio.ensure_future(self._report(query, answer))
            self._background_runs.add(run)
            run.add_done_callback(self._background_runs.discard)
            return await answer
        call = _QueryCall(query, work)
        state = await _make_task_run(call)
        if call.error is not None:
            raise call.error
        if state.is_cancelled():
            raise asyncio.CancelledError
        return await state.result()

    async def _report(self, query: Query, answer: asyncio.Future[Any]) -> None:
        """Make a task run that ends with the answer.

        The start and the end of a task run each block the event loop for milliseconds. The answers of a batch often
        arrive together, and the next questions follow them. So before a start or an end, one task run after another
        waits until no question was asked and no answer has arrived for a moment.
        """

        async def wait_for_answer() -> Any:
            await asyncio.wait([answer])
            async with self._turn:
                await self._wait_until_quiet()
            return answer.result()

        async with self._turn:
            await self._wait_until_quiet()
        await _make_task_run(_QueryCall(query, wait_for_answer))

    async def _wait_until_quiet(self) -> None:
        """Wait until there was no question or answer for `QUIET_SECONDS`, but at most `MAX_DELAY_SECONDS`."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + MAX_DELAY_SECONDS
        while True:
            # Questions and answers during the sleep change `_active_at`.
            seconds_left = min(self._active_at + QUIET_SECONDS, latest) - loop.time()
            if seconds_left <= 0:
                return
            await asyncio.sleep(seconds_left)

    def _note_activity(self, _answer: object = None) -> None:
        self._active_at = asyncio.get_running_loop().time()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._background_runs, return_exceptions=True)
