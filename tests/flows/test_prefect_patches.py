"""What Prefect does without each of our patches. A test that fails here says that its patch is no longer needed."""

import asyncio
import sys
from pathlib import Path

import pytest
import sqlalchemy
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy.exc import OperationalError

from ..infra.programs import run_program

INTERRUPTED = """
import os, signal, time
from prefect.utilities.engine import capture_sigterm

with capture_sigterm():
    try:
        pass
    finally:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        except BaseException as error:
            print(type(error).__name__, flush=True)
            os._exit(0)
print("cleaned up")
"""


def test_prefects_handler_of_sigterm_interrupts_a_cleanup() -> None:
    done = run_program([sys.executable, "-c", INTERRUPTED])
    assert done.stdout == "TerminationSignal\n", done.stderr


@pytest.mark.anyio
async def test_prefect_refuses_a_transaction_that_reads_before_it_writes_beside_another(tmp_path: Path) -> None:
    database = AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/test.db")
    engine = await database.engine()
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("CREATE TABLE counts (number INTEGER)"))
    have_read = asyncio.Barrier(2)

    async def read_and_write() -> None:
        async with await database.session(engine) as session, database.begin_transaction(session):
            await session.execute(sqlalchemy.text("SELECT * FROM counts"))
            await have_read.wait()
            await session.execute(sqlalchemy.text("INSERT INTO counts VALUES (1)"))

    results = await asyncio.gather(read_and_write(), read_and_write(), return_exceptions=True)
    refused = [result for result in results if isinstance(result, OperationalError)]
    assert ["database is locked" in str(error) for error in refused] == [True]
    await engine.dispose()
