"""Earlier results of a chunked job: the volume's markers say what is complete, the ledger what its result was."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from ...sandbox.meta import Meta
from ...sandbox.result import Result
from ...tasks.execute import configure_task
from ...tasks.execution import Execution
from ...tasks.ledger.completion_markers import CompletionMarker, MarkerLocation
from ...tasks.read_markers import read_markers_in_sandbox
from .job import Job


@dataclass(slots=True)
class MarkerCache:
    """Looks up the executions of a chunked job.

    With a `folder` of markers on the volume, an earlier result counts only if its marker does. Without one the job's
    own cache decides. A reduction counts only where no chunk was executed again: the chunks' files are new then,
    whatever they submitted.
    """

    job: Job
    folder: str | None
    _markers: dict[str, CompletionMarker] = field(default_factory=dict[str, CompletionMarker])
    _has_executed: bool = False

    async def load_markers(self) -> None:
        """Reads, in a task run, what the volume says is complete. Raises what opening a sandbox raises."""
        if self.folder is None:
            return
        context = self.job.context
        task = await configure_task(read_markers_in_sandbox, context.policy, context.provider.provider_name)
        lane = context.make_lane(self.job.slots)
        try:
            with suppress(TimeoutError):  # the deadline: nothing will be run
                async with asyncio.timeout_at(context.deadline.at):
                    self._markers = await task(lane, self.folder)
        finally:
            await context.usage.close_lane(lane)

    def locate_marker(self, name: str) -> MarkerLocation | None:
        """Where a marker of that name belongs; None without a volume."""
        return None if self.folder is None else MarkerLocation(f"{self.folder}/{name}")

    def find_result(self, execution: Execution) -> Result | None:
        """The result that this execution has from before, if there is one that counts."""
        location, is_reduction = execution.marker, "chunk_id" not in execution.variables
        may_reuse = not (self._has_executed and is_reduction)
        if location is None:
            result = self.job.cache.find_result(execution) if may_reuse else None
        else:
            marker = self._markers.pop(location.path.rpartition("/")[2], None)
            result = None
            if marker is not None and marker.is_intact and marker.key == execution.key and may_reuse:
                result = self.job.cache.find_result(execution) or self._restore_result(marker, execution)
            location.is_stale = marker is not None and result is None
        self._has_executed = self._has_executed or result is None
        return result

    def _restore_result(self, marker: CompletionMarker, execution: Execution) -> Result:
        """The result of an execution that was complete, but whose line the ledger does not have."""
        meta = Meta(
            variables=execution.variables,
            provider=self.job.context.provider.provider_name,
            submitted=marker.submitted,
            files=marker.files,
        )
        result = Result(marker.outputs, meta)
        self.job.cache.adopt_result(execution, result)
        return result
