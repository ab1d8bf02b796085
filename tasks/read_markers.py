"""The Prefect task that reads completion markers, in a sandbox of its own."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from .concurrency_tags import add_tags, build_tags
from .lane import Lane
from .ledger.completion_markers import CompletionMarker, read_markers
from .task_log import READ_MARKERS_TASK_NAME


@task(
    name=READ_MARKERS_TASK_NAME,
    task_run_name=READ_MARKERS_TASK_NAME,
    persist_result=False,
    cache_policy=NO_CACHE,
    log_prints=False,
)
async def read_markers_in_sandbox(lane: Lane, folder: str) -> dict[str, CompletionMarker]:
    """The markers in a folder of the volume by their names, read in the lane's sandbox, which is removed then."""
    add_tags(build_tags(lane.provider.provider_name))
    try:
        await lane.acquire_for_work()
        return await read_markers(await lane.open_sandbox(), folder)
    finally:
        await lane.release()
