"""Prefect's tag limits hold for executions, whose task runs show their tags while they run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.concurrency import services
from prefect.runtime import flow_run

from rlm_batch import batch, run_code

from ...infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ...infra.waiting import wait_until_async
from ..conftest import find_run_id

LIMIT = GlobalConcurrencyLimitCreate(name="tag:sandbox:local", limit=2)
TAGS = {"sandbox", "sandbox:local"}
CODE = (
    COUNT_EXECUTION
    + """
import os
open(f"{folder}/{n}", "w").close()
count_execution("begun")
at_once = len(os.listdir(folder))
os.unlink(f"{folder}/{n}")
SUBMIT(at_once=at_once)
"""
)


@asynccontextmanager
async def set_limit() -> AsyncIterator[None]:
    """Set a limit of two on the tag of local sandboxes in the context."""
    async with get_client() as client:
        await client.create_global_concurrency_limit(LIMIT)
        services._no_limits_cache.clear()  # Prefect remembers for 5 s that there was no limit.
        yield
        await client.delete_global_concurrency_limit_by_name(LIMIT.name)


async def run_batch(inputs: list[dict[str, Any]]) -> list[Any]:
    return list(await batch(CODE, inputs=inputs, provider="local:none", max_workers=6))


@flow
async def run_tasks(inputs: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(run_code(CODE, variables, provider="local:none") for variables in inputs))


async def list_shown_tags(run: UUID, state: str) -> list[set[str]]:
    """Return the tags of the flow run's task runs in that state, as the server has them."""
    async with get_client() as client:
        only = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
        runs = await client.read_task_runs(flow_run_filter=only)
    return [set(run.tags) for run in runs if run.state_name == state]


@pytest.mark.anyio
@pytest.mark.parametrize("run", [run_batch, run_tasks], ids=["batch", "run_code"])
async def test_a_tag_limit_of_two_lets_two_of_six_run_and_shows_their_tags(
    results: Path, tmp_path: Path, run: Any
) -> None:
    (folder := tmp_path / "running").mkdir()
    async with set_limit():
        with ExecutionCounter() as counter:
            counter.may_go_on.clear()
            inputs = [{"n": n, "folder": str(folder), "address": counter.address} for n in range(6)]
            running = asyncio.create_task(run(inputs))
            await wait_until_async(lambda: counter.counts["begun"] == 2, "two executions")

            async def are_shown() -> bool:
                return await list_shown_tags(find_run_id(results), "Running") == [TAGS, TAGS]

            await wait_until_async(are_shown, "two task runs with tags")
            counter.may_go_on.set()
            assert max(result.at_once for result in await running) <= 2


@pytest.mark.anyio
async def test_without_a_limit_task_runs_show_their_tags_at_the_end(results: Path) -> None:
    await batch("pass", inputs=[{"n": n} for n in range(3)], provider="local:none")
    run_id = find_run_id(results)

    async def are_shown() -> bool:
        return await list_shown_tags(run_id, "Completed") == [TAGS] * 3

    await wait_until_async(are_shown, "three task runs with tags")


@pytest.mark.anyio
async def test_the_tags_of_a_changed_task_name_the_provider(results: Path) -> None:
    @flow
    async def run() -> str:
        await run_code.with_options(name="mine", tags={"own"})("pass", provider="local:none")
        assert flow_run.id is not None
        return flow_run.id

    run_id = UUID(await run())

    async def are_shown() -> bool:
        return await list_shown_tags(run_id, "Completed") == [{"own", *TAGS}]

    await wait_until_async(are_shown, "the task run")
