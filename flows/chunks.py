"""The chunks flow: one piece of code over the parts of some data, on a durable volume, and one that reduces them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ..blocks.registry import resolve_provider
from ..sandbox.driver import NotJson, strict_json
from ..sandbox.errors import ConfigurationError, RlmBatchError
from ..sandbox.meta import Meta
from ..sandbox.result import Failure, Result
from ..tasks.execution import Execution, compute_key
from ..tasks.ledger.completion_markers import (
    CompletionMarker,
    MarkerLocation,
    compute_marker_folder,
    compute_marker_name,
    read_markers,
)
from ..tasks.ledger.run_record import ReportSpec
from ..tasks.retry import compute_backoff, get_requested_wait
from .decorator import batch_flow
from .engine.job import Outcome, Outcomes, Run, raise_failures, with_volume
from .engine.labels import chunk_label
from .inputs.chunking import ChunkSource, build_chunks
from .inputs.spilling import read_text_reference
from .parameters import (
    BatchConcurrency,
    CacheResults,
    Deadline,
    ExecutionsPerTask,
    Idempotent,
    LogOutput,
    MaxCost,
    MaxDepth,
    MaxLlmCalls,
    MaxLlmTokens,
    MaxWorkers,
    Model,
    OnFailure,
    Options,
    Provider,
    ResultsPath,
    Retries,
    RetryCodeErrors,
    ReuseSandboxes,
    Shards,
    Timeout,
)
from .reporting.text_table import format_rows

REDUCTION = "reduction.json"  # the name of its marker; those of chunks are hexadecimal


@dataclass(frozen=True, slots=True)
class ChunksReport:
    """A chunked job's results by chunk id, which is text, and what `reduce` submitted.

    `reduction` is None where there was no `reduce`. `overlaps` are the files on the volume that several chunks wrote,
    with the chunks' ids: such a file holds what the last of them left. Known are the files that Python code opened by
    itself, and no subprocess's. Printed, it is a table of chunks and fields.
    """

    results: Mapping[str, Outcome]
    reduction: Outcome | None
    overlaps: dict[str, list[str]]
    results_path: str

    def __getitem__(self, chunk_id: str | int) -> Outcome:
        return self.results[str(chunk_id)]

    def rows(self, limit: int | None = None) -> list[list[str]]:
        """The table's rows of text, the header first; with a `limit` so many of the first."""
        shown = self.results.values() if limit is None else itertools.islice(self.results.values(), limit)
        return format_rows(list(shown))

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


class _ById(Mapping[str, Outcome]):
    """Outcomes by chunk id, in order, wherever they are."""

    def __init__(self, places: dict[str, int], outcomes: Sequence[Outcome]) -> None:
        self._places, self._outcomes = places, outcomes

    def __getitem__(self, chunk_id: str) -> Outcome:
        return self._outcomes[self._places[chunk_id]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@batch_flow("chunks")
async def chunks(
    code: Annotated[str, Field(description="Python code that reads chunk_id and data, and submits its fields")],
    chunks: Annotated[
        dict[str, Any] | str | None,
        Field(description="The data of each chunk by its id, or a path to JSON lines or CSV with id and data"),
    ] = None,
    data: Annotated[
        list[Any] | str | None,
        Field(description="Data to be cut into chunks, or a path to JSON lines or CSV, of which a line is an item"),
    ] = None,
    chunk_size: Annotated[int | None, Field(ge=1, description="Items of the data in one chunk")] = None,
    volume_name: Annotated[
        str | None, Field(description="The volume that every sandbox has; by default the provider's own, if any")
    ] = None,
    reduce: Annotated[
        str | None, Field(description="Code that runs once when all chunks are done, with their fields as results")
    ] = None,
    provider: Provider = "local",
    max_workers: MaxWorkers = 4,
    timeout: Timeout = 120,
    retries: Retries = 2,
    retry_code_errors: RetryCodeErrors = False,
    idempotent: Idempotent = False,
    on_failure: OnFailure = "raise",
    deadline: Deadline = None,
    reuse_sandboxes: ReuseSandboxes = False,
    executions_per_task: ExecutionsPerTask = None,
    cache_results: CacheResults = False,
    results_path: ResultsPath = None,
    shards: Shards = None,
    log_output: LogOutput = True,
    language_model: Model = None,
    batch_concurrency: BatchConcurrency = 4,
    max_depth: MaxDepth = 2,
    max_llm_calls: MaxLlmCalls = 50,
    max_llm_tokens: MaxLlmTokens = None,
    max_cost: MaxCost = None,
) -> ChunksReport:
    """Runs the code once for each chunk, with `chunk_id` (text) and `data`, and `reduce` once at the end.

    The chunks are `chunks`, data by id, or `data` that is cut into lists of `chunk_size` items, whose ids are "0", "1"
    and so on. With a volume each chunk that is complete is marked there; a job that is run again executes only what
    has no marker of its code and data, or whose files have gone or changed since. `reduce` finds what the chunks
    submitted as `results`, a dict by chunk id, and their files on the volume; it runs if none of them failed. What the
    other parameters mean is in docs/reference.md.

    Raises ExecutionsFailed when all are done and some failed (with `on_failure="return"` a `Failure` stands in their
    place), and ConfigurationError before anything runs.
    """
    code = read_text_reference(code)
    reduce = None if reduce is None else read_text_reference(reduce)
    parts = build_chunks(chunks, data, chunk_size)
    options = Options(
        provider=provider,
        max_workers=max_workers,
        timeout=timeout,
        retries=retries,
        retry_code_errors=retry_code_errors,
        idempotent=idempotent,
        on_failure=on_failure,
        deadline=deadline,
        reuse_sandboxes=reuse_sandboxes,
        executions_per_task=executions_per_task,
        cache_results=cache_results,
        results_path=results_path,
        shards=shards,
        log_output=log_output,
        language_model=language_model,
        batch_concurrency=batch_concurrency,
        max_depth=max_depth,
        max_llm_calls=max_llm_calls,
        max_llm_tokens=max_llm_tokens,
        max_cost=max_cost,
    )
    block = await resolve_provider(provider)
    if volume_name is not None:
        block = with_volume(block, volume_name)
    total = len(parts) + (reduce is not None)
    about = ReportSpec("chunk" if reduce is None else "execution")
    async with _Chunks.begun(block, total, options, chunk_label, about) as run:
        run.folder = None if block.volume_name is None else compute_marker_folder(code)
        fingerprint = await run.fingerprint()
        if run.folder is not None:
            await run.read_markers(run.folder)
        await run.drive(_executions(code, parts, fingerprint, run))
        if reduce is not None:
            reduction = _reduction(reduce, len(parts), fingerprint, run)
            if run.failed:
                run.not_run([reduction], f"{len(run.failed)} of {len(parts)} chunks have no result")
            else:
                await run.drive(iter([reduction]))
        outcomes = run.outcomes()
        found = report(outcomes, len(parts))
        for path, ids in found.overlaps.items():
            run.log.warning("%s", overlap(path, ids))
    if on_failure == "raise":
        raise_failures(outcomes, "executions")
    return found


def report(outcomes: Outcomes, chunks: int) -> ChunksReport:
    """The report on these outcomes: those of the chunks, and then the reduction's if there is one."""
    places: dict[str, int] = {}
    writers: dict[str, list[str]] = {}
    for place, outcome in enumerate(itertools.islice(outcomes.results, chunks)):
        chunk_id = str(outcome.meta.variables["chunk_id"])
        places[chunk_id] = place
        for path in outcome.meta.files:
            writers.setdefault(path, []).append(chunk_id)
    overlaps = {path: ids for path, ids in writers.items() if len(ids) > 1}
    reduction = outcomes.results[chunks] if len(outcomes.results) > chunks else None
    return ChunksReport(_ById(places, outcomes.results), reduction, overlaps, outcomes.results_path)


def overlap(path: str, ids: list[str]) -> str:
    """What is said of a file that several chunks wrote."""
    shown = ", ".join(ids[:10]) + (f" and {len(ids) - 10} more" if len(ids) > 10 else "")
    return (
        f"{path} on the volume was written by the chunks {shown}, and holds what the last of them left: name the file "
        "after chunk_id"
    )


def _executions(code: str, parts: ChunkSource, fingerprint: dict[str, Any], run: _Chunks) -> Iterator[Execution]:
    for index, (chunk_id, data) in enumerate(parts):
        encoded = {"data": _encoded(data, f"the data of chunk {chunk_id}")}
        variables = {"chunk_id": chunk_id}
        key = compute_key(code, variables, encoded, fingerprint)
        run.keys.update(key.encode())
        yield Execution(index, code, variables, key, encoded, run.mark(compute_marker_name(chunk_id)))


def _reduction(code: str, index: int, fingerprint: dict[str, Any], run: _Chunks) -> Execution:
    encoded = {"results": _encoded(run.submitted(), "what the chunks submitted")}
    key = compute_key(code, {}, encoded, {**fingerprint, "chunks": run.keys.hexdigest()})
    return Execution(index, code, {}, key, encoded, run.mark(REDUCTION))


def _encoded(value: Any, what: str) -> bytes:
    try:
        return strict_json({"value": value})[len(b'{"value":') : -1]
    except NotJson as error:
        raise ConfigurationError(f"{what} is not JSON: {error}") from None


class _Chunks(Run):
    """A run whose evidence of what is complete lies on the volume, where there is one."""

    folder: str | None = None  # of the markers

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys = hashlib.sha256()  # of the chunks' keys, in order
        self._markers: dict[str, CompletionMarker] = {}
        self._executed = False

    async def read_markers(self, folder: str) -> None:
        """Looks, in a sandbox, at what the volume says is complete. Raises what opening a sandbox raises."""
        with suppress(TimeoutError):  # the deadline: nothing will be run
            async with asyncio.timeout_at(self.until):
                self._markers = await self._read_markers(folder)

    async def _read_markers(self, folder: str) -> dict[str, CompletionMarker]:
        attempt = 0
        while True:
            attempt += 1
            lane = self.lane()
            try:
                await lane.acquire()
                return await read_markers(await lane.open_sandbox(), folder)
            except RlmBatchError as error:
                if not self.policy.should_retry(error, attempt) or self.policy.is_too_late(error):
                    raise
                wait = get_requested_wait(error) + compute_backoff(attempt)
            finally:
                await self.close(lane)
            await asyncio.sleep(wait)

    def mark(self, name: str) -> MarkerLocation | None:
        """Where a marker of that name belongs; None without a volume."""
        return None if self.folder is None else MarkerLocation(f"{self.folder}/{name}")

    def recall(self, execution: Execution) -> Result | None:
        mark = execution.marker
        if mark is None:
            found = super().recall(execution) if self._counts(execution) else None
        else:
            marker = self._markers.pop(mark.path.rpartition("/")[2], None)
            found = None
            if marker is not None and marker.is_intact and marker.key == execution.key and self._counts(execution):
                found = super().recall(execution) or self._from(marker, execution)
            mark.is_stale = marker is not None and found is None
        self._executed = self._executed or found is None
        return found

    def _counts(self, execution: Execution) -> bool:
        """A reduction of chunks that were run again is run again, whatever they submitted: their files are new."""
        return not (self._executed and "chunk_id" not in execution.variables)

    def _from(self, marker: CompletionMarker, execution: Execution) -> Result:
        """The result of an execution that was complete, but whose line the ledger does not have."""
        meta = Meta(
            variables=execution.variables,
            provider=self.provider.provider_name,
            submitted=marker.submitted,
            files=marker.files,
        )
        result = Result(marker.outputs, meta)
        self.keep(execution, result)
        return result

    def submitted(self) -> dict[str, dict[str, Any]]:
        """The chunks' fields by id."""
        return {
            outcome.meta.variables["chunk_id"]: outcome.outputs
            for outcome in self.done
            if not isinstance(outcome, Failure) and "chunk_id" in outcome.meta.variables
        }
