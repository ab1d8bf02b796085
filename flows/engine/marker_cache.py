"""Earlier results of a chunked job: the volume's markers say what is complete, the ledger what its result was."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta
from ...sandbox.result import Result
from ...tasks.execute import configure_task
from ...tasks.execution import Execution
from ...tasks.ledger.completion_markers import (
    MAX_MARKER_BYTES,
    CompletionMarker,
    MarkerLocation,
    compute_outputs_digest,
)
from ...tasks.ledger.marker_signature import KEY_VARIABLE
from ...tasks.ledger.result_index import ResultIndex, get_results_root
from ...tasks.read_markers import read_markers_in_sandbox
from .job import Job
from .results.result_cache import ResultCache

FILES_ELSEWHERE = "its files were collected by an earlier run, whose ledger is not here"


@dataclass(slots=True)
class MarkerCache:
    """Looks up the executions of a chunked job.

    With a `folder` of markers on the volume, an earlier result counts only if its marker does. Without one the job's
    own cache decides. A reduction counts only where no chunk was executed again: the chunks' files are new then,
    whatever they submitted.

    Code can write markers too. One that is not signed is taken for its word only with `trusts_unsigned`; otherwise it
    takes a ledger that has the same result, this job's own or one below the results root.
    """

    job: Job
    folder: str | None
    trusts_unsigned: bool = False
    _markers: dict[str, CompletionMarker] = field(default_factory=dict[str, CompletionMarker])
    _ledgers: ResultCache | None = None  # that unsigned markers are held against, once there are any
    _refused_count: int = 0
    _has_executed: bool = False

    async def load_markers(self, find_names: Callable[[], set[str]]) -> None:
        """Reads, in a task run, what the volume says is complete; `find_names` are asked for the job's own markers.

        Raises what opening a sandbox raises, and VolumeError.
        """
        if self.folder is None:
            return
        context = self.job.context
        task = await configure_task(read_markers_in_sandbox, context.policy, context.provider.provider_name)
        lane = context.make_lane(self.job.slots, is_prepared=False)
        try:
            with suppress(TimeoutError):  # the deadline: nothing will be run
                async with asyncio.timeout_at(context.deadline.at):
                    self._markers = await task(lane, self.folder, find_names, self.trusts_unsigned)
        finally:
            await context.usage.close_lane(lane)
        if any(marker.is_intact and not marker.is_trusted for marker in self._markers.values()):
            await asyncio.to_thread(self._open_ledgers)
        if unread := sum(not marker.is_read for marker in self._markers.values()):
            self.job.recorder.warn(
                f"{unread} of {len(self._markers)} completion markers on the volume were not read, and their chunks "
                f"run again: they are larger than the {MAX_MARKER_BYTES:,} bytes of a marker, or reading took too long"
            )

    def _open_ledgers(self) -> None:
        cache = self.job.cache
        try:
            if cache.index is None:
                index = ResultIndex(get_results_root())
                index.refresh()
                cache = replace(cache, index=index)
        except (OSError, ConfigurationError) as error:
            self.job.context.log.warning("%s", error)
        self._ledgers = cache

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
                result = self._take_result(marker, execution)
            location.is_stale = marker is not None and result is None
        self._has_executed = self._has_executed or result is None
        return result

    def _take_result(self, marker: CompletionMarker, execution: Execution) -> Result | None:
        if marker.is_trusted:
            return self.job.cache.find_result(execution) or self._restore_result(marker, execution)
        ledgers = self._ledgers or self.job.cache
        result = ledgers.find_result(
            execution, lambda result: compute_outputs_digest(result.outputs) == marker.outputs_digest
        )
        if result is None:
            self._refused_count += 1
            if self._refused_count == 1:
                self.job.recorder.warn(
                    "a completion marker on the volume was not taken, and its chunk runs again: it is not signed with "
                    "this user's key, and no ledger here has its result. Where only code that you trust has written "
                    "to the volume, pass trust_markers=True (--trust-markers). For markers of other machines or users, "
                    f"set {KEY_VARIABLE} to one key for all"
                )
        return result

    def tell_refused(self) -> None:
        """Logs how many markers were not taken because they were not signed, if there were any."""
        if self._refused_count:
            self.job.context.log.warning(
                "%d completion markers on the volume were not taken, as they were not signed", self._refused_count
            )

    def _restore_result(self, marker: CompletionMarker, execution: Execution) -> Result:
        """The result of an execution that was complete, but whose line the ledger does not have."""
        meta = Meta(
            variables=execution.variables,
            provider=self.job.context.provider.provider_name,
            submitted=marker.submitted,
            files=marker.files,
            not_collected=(FILES_ELSEWHERE,) if self.job.context.options.collect else (),
        )
        result = Result(marker.outputs, meta)
        self.job.cache.adopt_result(execution, result)
        return result
