"""The chunks flow: one piece of code over the parts of some data, on a durable volume, and one that reduces them."""

import asyncio
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Unpack

from prefect import get_run_logger
from pydantic import Field

from ..sandbox.errors import ConfigurationError
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.requests.encoded_variable import EncodedVariable, encode_variable
from ..sandbox.result import MaybeNone, Outcome, Result
from ..sandbox.wire.strict_json import NotJsonError
from ..tasks.execution import Execution, add_index, compute_key
from ..tasks.ledger.run_record import ReportSpec
from .decorator import batch_flow
from .engine.execution_labels import chunk_label
from .engine.failures import Outcomes, raise_failures
from .engine.job import locate_run_ledger, open_job
from .inputs.conversion import Code, DataById, Items, PathText
from .inputs.readers import (
    ChunkSource,
    build_chunks,
    check_provided_variables,
    get_column_types,
    resolve_types_of,
)
from .inputs.spilling import read_text_reference
from .parameters import Options, SharedParameters, Types, VolumeName
from .reporting.export import build_data_frame
from .reporting.table import align_rows, format_rows, render_outcomes


@dataclass(frozen=True, slots=True)
class ChunksReport:
    """A chunked job's results by chunk id, which is text, and what `reduce` submitted.

    `reduction` is None where there was no `reduce`. `overlaps` are the files on the volume that several chunks wrote,
    with the chunks' ids: such a file holds what the last of them left. Known are the files that Python code opened by
    itself, and no subprocess's. Printed, it is a table of chunks and fields.
    """

    results: Mapping[str, Outcome]
    reduction: Outcome | MaybeNone
    overlaps: dict[str, list[str]]
    results_path: str

    def __getitem__(self, chunk_id: str | int) -> Outcome:
        return self.results[str(chunk_id)]

    def rows(self, limit: int | None = None, *, shows_output: bool = False) -> list[list[str]]:
        """The table's rows of text, the header first; with a `limit` so many of the first.

        With `shows_output` they have the last line that the code printed, where any did.
        """
        return format_rows(list(itertools.islice(self.results.values(), limit)), shows_output=shows_output)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with a row for each chunk. Raises ConfigurationError where pandas is not installed."""
        return build_data_frame(list(self.results.values()))

    def _repr_html_(self) -> str:
        return render_outcomes(list(self.results.values()))

    def __str__(self) -> str:
        return align_rows(self.rows())


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
    code: Annotated[Code, Field(description="Python code that reads chunk_id and data, and submits its fields")],
    chunks: Annotated[
        DataById | PathText | None,
        Field(description="The data of each chunk by its id, or a path to JSON lines, CSV or Parquet with id and data"),
    ] = None,
    data: Annotated[
        Items[Any] | PathText | None,
        Field(description="Data to be cut into chunks, or a path to JSON lines, CSV or Parquet: a line is an item"),
    ] = None,
    chunk_size: Annotated[int | None, Field(ge=1, description="Items of the data in one chunk")] = None,
    volume_name: VolumeName = None,
    reduce: Annotated[
        Code | None, Field(description="Code that runs once when all chunks are done, with their fields as results")
    ] = None,
    types: Types = None,
    **parameters: Unpack[SharedParameters],
) -> ChunksReport:
    """Runs the code once for each chunk, with `chunk_id` (text) and `data`, and `reduce` once at the end.

    The chunks are `chunks`, data by id, or `data` that is cut into lists of `chunk_size` items, whose ids are "0", "1"
    and so on. `reduce` finds what the chunks submitted as `results`, a dict by chunk id, and their files on the volume;
    it runs if none of them failed. A job that is run again with the same `results_path` executes only what has no
    result there. What the other parameters mean is in docs/reference.md.

    Raises ExecutionsFailed when all are done and some failed (with `on_failure="return"` a `Failure` stands in their
    place), and ConfigurationError before anything runs.
    """
    code = read_text_reference(code)  # type: ignore[arg-type]  # a text by now
    reduce = None if reduce is None else read_text_reference(reduce)  # type: ignore[arg-type]
    options = Options.from_parameters(parameters)
    check_provided_variables(code, ("chunk_id", "data"), needs_all=options.prepare is None)
    check_provided_variables(reduce, ("results",), needs_all=options.prepare is None)
    source: Any = data if chunks is None else chunks
    how = resolve_types_of(source, types, locate_run_ledger(options))
    parts = build_chunks(chunks, data, chunk_size, how, get_run_logger().info)  # type: ignore[arg-type]  # by now lists
    async with open_job(
        total=len(parts) + (reduce is not None),
        options=options,
        label=chunk_label,
        volume_name=volume_name,
        report_spec=ReportSpec("chunk" if reduce is None else "execution"),
        column_types=get_column_types(parts),
    ) as job:
        fingerprint = await job.compute_fingerprint()
        keys = hashlib.sha256()
        await job.executor.execute_all(_build_executions(code, parts, fingerprint, keys), job.cache.find_result)
        if reduce is not None:
            submitted = await asyncio.to_thread(_collect_submitted, job.store.outcomes)
            encoded = {"results": await asyncio.to_thread(_encode, submitted, "what the chunks submitted")}
            key = compute_key(reduce, {}, encoded, {**add_index(fingerprint, len(parts)), "chunks": keys.hexdigest()})
            reduction = Execution(len(parts), reduce, {}, key, encoded)
            if failed := job.store.failures:
                job.skip([reduction], f"{len(failed)} of {len(parts)} chunks have no result")
            else:
                await job.executor.execute_all(iter([reduction]), job.cache.find_result)
        outcomes = job.collect_outcomes()
        found = report(outcomes, len(parts))
        for path, ids in found.overlaps.items():
            job.context.log.warning("%s", overlap(path, ids))
    if options.on_failure == "raise":
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
    return escape_text(
        f"{path} on the volume was written by the chunks {shown}, and holds what the last of them left: name the file "
        "after chunk_id"
    )


def _build_executions(code: str, parts: ChunkSource, fingerprint: dict[str, Any], keys: Any) -> Iterator[Execution]:
    """The executions of the chunks, made as they are asked for; `keys` is a hash that takes in the key of each."""
    for index, (chunk_id, data) in enumerate(parts):
        encoded = {"data": _encode(data, f"the data of chunk {chunk_id}")}
        variables = {"chunk_id": chunk_id}
        key = compute_key(code, variables, encoded, add_index(fingerprint, index))
        keys.update(key.encode())
        yield Execution(index, code, variables, key, encoded)


def _encode(value: Any, description: str) -> EncodedVariable:
    try:
        return encode_variable(value)
    except NotJsonError as error:
        raise ConfigurationError(f"{description} is not JSON: {error}") from None


def _collect_submitted(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """The chunks' fields by id."""
    return {
        outcome.meta.variables["chunk_id"]: outcome.outputs
        for outcome in outcomes
        if isinstance(outcome, Result) and "chunk_id" in outcome.meta.variables
    }
