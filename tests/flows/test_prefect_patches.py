"""What Prefect does without each of our patches. A test that fails here says that its patch is no longer needed."""

import asyncio
import sys
from pathlib import Path

import pytest
import sqlalchemy
from prefect.exceptions import TerminationSignal
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.utilities import engine
from sqlalchemy.exc import OperationalError

from rlm_batch.flows.engine.termination import cancel_at_termination

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

# It compares what the modules and classes of Prefect have before and after the import.
COMPARED = """
import sys
import prefect.deployments, prefect.flow_engine, prefect.runner, prefect.server.api.server, prefect.task_engine

def read():
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "prefect"}
    found = [value for module in modules.values() for value in vars(module).values() if isinstance(value, type)]
    classes = {f"{value.__module__}:{value.__qualname__}": value for value in found}
    owners = {**modules, **{name: value for name, value in classes.items() if name.startswith("prefect.")}}
    values = {(owner, name): value for owner in owners for name, value in vars(owners[owner]).items()}
    codes = {key: getattr(value, "__code__", None) for key, value in values.items()}
    return {key: (id(value), id(codes[key])) for key, value in values.items()}

before = read()
import rlm_batch
for name in rlm_batch.__all__:
    getattr(rlm_batch, name)
after = read()
# Pydantic completes a model when it is first used.
print([key for key in before if after.get(key) != before[key] and not key[1].startswith("__pydantic_")])
"""


def test_importing_rlm_batch_changes_nothing_in_prefect() -> None:
    done = run_program([sys.executable, "-c", COMPARED])
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.anyio
async def test_without_runs_of_ours_sigterm_does_what_it_does_without_rlm_batch() -> None:
    with cancel_at_termination():
        pass
    with pytest.raises(TerminationSignal):
        engine._prefect_sigterm_handler(15, None)


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
