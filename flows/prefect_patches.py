"""The replacements of Prefect's private parts. The docstring of each says what Prefect does without it.

For each, `tests/flows/test_prefect_patches.py` has a test that fails once Prefect does not need the replacement.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def handle_sigterm(handler: Callable[..., None]) -> None:
    """Let Prefect's handler of SIGTERM call this handler instead.

    The handler of Prefect 3.8 and 3.9 raises TerminationSignal at any point of the main thread, also while a sandbox is
    removed. A handler of our own instead of Prefect's would not do: then Prefect records a cancellation by its worker
    as a crash. Besides, a run in another thread could not install one. So Prefect's function stays, with other code.
    """
    from prefect.utilities.engine import _prefect_sigterm_handler as function

    def call_handler(number: int, *arguments: object, handler: Callable[..., None]) -> None:
        handler(number, *arguments)

    function.__code__, function.__kwdefaults__ = call_handler.__code__, {"handler": handler}


def read_no_result_for_engine() -> None:
    """Let this process of a deployment's run read results only inside a flow run.

    If a person sets the run to Completed before it begins, the engine of Prefect 3.8 and 3.9 reads the result in that
    state after the run, and nothing uses it. That person chooses the serializer, and pickle runs code on the worker.
    """
    from prefect.context import FlowRunContext
    from prefect.results import (  # These are public; only the type checker takes them for private.
        ResultRecord,  # pyright: ignore[reportPrivateImportUsage]
        ResultRecordMetadata,  # pyright: ignore[reportPrivateImportUsage]
        ResultStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    read: Callable[[ResultRecordMetadata], Awaitable[ResultRecord[Any]]] = ResultStore._from_metadata

    async def read_inside(metadata: ResultRecordMetadata) -> ResultRecord[Any]:
        if FlowRunContext.get() is None:
            return ResultRecord[Any](metadata=metadata, result=None)
        return await read(metadata)

    ResultStore._from_metadata = read_inside  # type: ignore[method-assign]


@dataclass
class _Transaction:
    """A transaction on SQLite. While it is open, no other transaction of the server begins."""

    is_open: bool = True


_current_transaction: ContextVar[_Transaction | None] = ContextVar("_current_transaction", default=None)


def serialize_sqlite_transactions() -> None:
    """Let each transaction of this process's server on SQLite begin when all earlier ones have ended.

    SQLite has one writer at a time. Prefect 3.8 and 3.9 let each transaction take a connection and wait in SQLite. This
    has three faults (https://github.com/PrefectHQ/prefect/issues/10188,
    https://github.com/PrefectHQ/prefect/issues/18934):

    - A transaction that has read before it writes is refused ("database is locked") if another one wrote meanwhile.
      The server answers 503, and Prefect's client waits 2, 4, 8, 16 and 32 s between its tries.
    - The garbage collector closes the cursors of refused statements, and must wait while their connection waits to
      write. If the collector runs in the thread of the event loop, no transaction can end, and the server does nothing
      for 60 s, until SQLite gives up.
    - The pool has 15 connections. If all of them wait, the transaction that writes gets no second one: 20 requests to
      pause a work queue, sent at the same time, were answered after 61 s, 16 of them by errors.

    With this replacement, a transaction gets its connection only when it begins. A session that a transaction opens
    begins at once. A task that a transaction has started waits like others after the transaction's end.
    """
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration

    begin_transaction = AioSqliteConfiguration.begin_transaction
    turn = asyncio.Lock()

    @asynccontextmanager
    async def begin_in_turn(
        configuration: AioSqliteConfiguration, session: "AsyncSession", with_for_update: bool = False
    ) -> AsyncGenerator["AsyncSessionTransaction", None]:
        outer = _current_transaction.get()
        if outer is not None and outer.is_open:
            async with begin_transaction(configuration, session, with_for_update) as transaction:
                yield transaction
            return
        async with turn:
            current = _Transaction()
            token = _current_transaction.set(current)
            try:
                async with begin_transaction(configuration, session, True) as transaction:
                    await session.connection()
                    # Sessions within this transaction must not take SQLite's lock for writing, which it holds.
                    SQLITE_BEGIN_MODE.set("DEFERRED")
                    yield transaction
            finally:
                current.is_open = False
                _current_transaction.reset(token)

    AioSqliteConfiguration.begin_transaction = begin_in_turn  # type: ignore[method-assign]
