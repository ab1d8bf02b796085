"""The Prefect task that reads completion markers, in a sandbox of its own."""

from collections.abc import Callable

from prefect import task
from prefect.cache_policies import NO_CACHE

from .concurrency_tags import add_tags, build_tags
from .lane import Lane
from .ledger.completion_markers import CompletionMarker, read_markers
from .ledger.marker_signature import MarkerSigner
from .task_log import READ_MARKERS_TASK_NAME


@task(
    name=READ_MARKERS_TASK_NAME,
    task_run_name=READ_MARKERS_TASK_NAME,
    persist_result=False,
    cache_policy=NO_CACHE,
    log_prints=False,
)
async def read_markers_in_sandbox(
    lane: Lane, folder: str, find_names: Callable[[], set[str]], trusts_unsigned: bool
) -> dict[str, CompletionMarker]:
    """The markers in a folder of the volume by their names, read in the lane's sandbox, which is removed then.

    See `read_markers`. Raises ConfigurationError where there is no key for their signatures.
    """
    add_tags(build_tags(lane.provider.provider_name))
    signer = MarkerSigner.for_volume_of(lane.provider)
    try:
        await lane.acquire_for_work()
        interpreter = await lane.open_sandbox()
        return await read_markers(interpreter, folder, find_names, signer, trusts_unsigned=trusts_unsigned)
    finally:
        await lane.release()
