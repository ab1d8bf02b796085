"""The chunks flow: runs one piece of code on each chunk of the data, and another to reduce the results."""

import asyncio
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as parameter_model

from ...blocks.storage.location import PathOrLocation
from ...blocks.volume import check_volume_name
from ...sandbox.outcomes.text_escape import escape_text
from ...sandbox.result import MaybeNone, Outcome, Result
from ...tasks.execution import Execution, add_index, compute_key, number_seed, without_check
from ...tasks.ledger.run_record import ReportSpec
from ...tasks.repeats import REPEAT, Repeats, add_repeat, locate_execution, reads_repeat
from ..inputs.conversion import Code, DataById, DataItem, Items, PathText
from ..inputs.readers import (
    Inputs,
    build_chunks,
    check_provided_variables,
    check_variables,
)
from ..inputs.spilling import read_text_reference
from ..inputs.tables import ProgressReport
from ..parameters import CommandLineForm, FlowParameters, Options, RepeatCount, Types, VolumeName
from ..plan import CodeForEach, Outcomes, Plan, label_execution, plan_items
from ..reduction import encode_json, execute_reduction
from ..reporting.groups import group_outcomes
from ..reports import Report

if TYPE_CHECKING:
    from ..engine.run import Run


CHUNK_VARIABLES = ("chunk_id", "data")
MAX_IDS = 10  # chunks that a note names


@dataclass(frozen=True)
class ChunksReport(Report[Outcome]):
    """A chunked job's results by chunk id (a text), and the result of `reduce`.

    `report[id]` is a chunk's outcome. A loop over the report visits the chunks' outcomes in order. The report prints as
    a table of chunks and fields.

    Attributes:
        results: A `Result` or `Failure` for each chunk, by its id, in the order of the data. With `repeats`, a result
            has the mean of each numeric field over the repeats, and its statistics in further fields such as
            `loss.std`: `count`, `mean`, `std`, `se`, `min` and `max`.
        reduction: The outcome of `reduce`; None without `reduce`.
        overlaps: Files on the volume that several chunks wrote, with the chunks' ids. Each file has the content of the
            last write. Files that a subprocess wrote are missing.
        results_path: The ledger's directory or location.
        spec: The number of repeats.
        repeated: With `repeats`, the outcomes of all executions of chunks, in order; otherwise empty.
    """

    results: Mapping[str, Outcome]
    reduction: Outcome | MaybeNone = field()  # It has no default here, unlike in `Report`.
    overlaps: dict[str, list[str]]
    results_path: str
    spec: ReportSpec = field(default_factory=ReportSpec)
    repeated: Sequence[Outcome] = ()

    @classmethod
    def from_outcomes(cls, outcomes: Outcomes) -> Self:
        """Return the report on the outcomes of the chunks, and of the reduction if there is one."""
        spec = outcomes.spec
        chunks, reduction = outcomes.split()
        results, repeated = chunks, ()
        if spec.repeats is not None:
            results, repeated = list(group_outcomes(chunks, spec)), chunks
        positions: dict[str, int] = {}
        writers: dict[str, list[str]] = {}  # ids of chunks by the file that they wrote
        for index, outcome in enumerate(chunks):
            chunk_id = str(outcome.meta.variables["chunk_id"])
            positions[chunk_id] = index if spec.repeats is None else index // spec.repeats.count
            for path in outcome.meta.files:
                ids = writers.setdefault(path, [])
                if chunk_id not in ids[-1:]:  # Repeats of a chunk follow each other.
                    ids.append(chunk_id)
        overlaps = {path: ids for path, ids in writers.items() if len(ids) > 1}
        return cls(_ById(positions, results), reduction, overlaps, outcomes.results_path, spec, repeated)

    @property
    def rows_outcomes(self) -> Collection[Outcome]:
        """The outcomes that have a row in the table: one for each chunk."""
        return self.results.values()

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """The chunks' outcomes, in order. With repeats, those of one chunk follow each other."""
        return self.repeated or list(self.results.values())

    def __getitem__(self, chunk_id: str | int) -> Outcome:  # type: ignore[override]
        return self.results[str(chunk_id)]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.results.values())

    def list_overlaps(self) -> list[str]:
        """Return a sentence about each file that several chunks wrote."""
        notes: list[str] = []
        for path, ids in self.overlaps.items():
            shown = ", ".join(ids[:MAX_IDS])
            if len(ids) > MAX_IDS:
                shown += f" and {len(ids) - MAX_IDS} more"
            note = f"several chunks ({shown}) wrote {path} on the volume, and only the last content remains"
            notes.append(escape_text(f"{note}: use chunk_id in the file's name"))
        return notes

    def list_notes(self) -> list[str]:
        """Return sentences about chunks without fields and about files that several chunks wrote."""
        return [*self.list_overlaps(), *super().list_notes()]


class _ById(Mapping[str, Outcome]):
    """A mapping from chunk ids to outcomes, which reads an outcome of a sharded job only when it is used."""

    def __init__(self, positions: dict[str, int], outcomes: Sequence[Outcome]) -> None:
        self._positions, self._outcomes = positions, outcomes

    def __getitem__(self, chunk_id: str) -> Outcome:
        return self._outcomes[self._positions[chunk_id]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)


@parameter_model(frozen=True)
class ChunksParameters(Options, FlowParameters[ChunksReport]):
    """Run the code once for each chunk, with `chunk_id` (text) and `data`, and `reduce` once at the end.

    The chunks are `chunks`, a dict of data by id, or `data`, which is cut into lists of `chunk_size` items with the ids
    "0", "1" and so on. A job with the results of an earlier run executes only chunks without a result for their code
    and data. `reduce` reads the chunks' results in `results`, a dict by chunk id, and their files on the volume. It
    runs if no chunk failed. With `repeats`, a value of `results` is a list with the fields of each repeat.

    Returns:
        The report: the results by chunk id, and the result of `reduce`. With `on_failure="return"`, failed chunks are
        `Failure`.

    Raises:
        ConfigurationError: A parameter is wrong. Nothing has run.
        ExecutionsFailed: All executions have ended and some failed, with `on_failure="raise"` (the default).
    """

    code: Annotated[
        Code,
        Field(description="Python code that reads chunk_id and data, and submits its fields."),
        CommandLineForm("code file", is_argument=True),
    ]
    chunks: Annotated[
        DataById | PathText | None,
        Field(description="Data of each chunk by its id, or a path to JSON, CSV or Parquet with id and data."),
        CommandLineForm("path"),
    ] = None
    data: Annotated[
        Items[DataItem] | PathText | None,
        Field(description="Items to divide into chunks, or a path to JSON, CSV or Parquet with one in each line."),
        CommandLineForm("path"),
    ] = None
    chunk_size: Annotated[int | None, Field(ge=1, description="Items of the data in each chunk.")] = None
    volume_name: VolumeName = None
    reduce: Annotated[
        Code | None,
        Field(description="Code that runs once after all chunks, with their fields in results."),
        CommandLineForm("code file"),
    ] = None
    types: Types = None
    repeats: RepeatCount = None

    flow_name = "chunks"
    prefect_name = "rlm-chunks"
    one_of = ("chunks", "data")
    needs = {"data": "chunk_size", "chunk_size": "data"}  # noqa: RUF012

    @cached_property
    def options(self) -> Options:
        """The shared parameters, with the volume among the provider's options."""
        options = super().options
        if self.volume_name is None:
            return options
        volume = {"volume_name": check_volume_name(self.volume_name)}
        return replace(options, provider_options={**(options.provider_options or {}), **volume})  # type: ignore[dict-item]

    def make_plan(self, report: ProgressReport | None = None, run_ledger: PathOrLocation | None = None) -> Plan:
        """Read the chunks and return the plan to execute them. Raises ConfigurationError."""
        code = read_text_reference(self.code)
        reduce = None if self.reduce is None else read_text_reference(self.reduce)
        options = self.options
        provided = CHUNK_VARIABLES if self.repeats is None else (*CHUNK_VARIABLES, REPEAT)
        check_provided_variables(code, provided, needs_all=options.preparation is None)
        check_variables("", [CHUNK_VARIABLES], options)
        check_provided_variables(reduce, ("results",), needs_all=options.preparation is None)
        parts = build_chunks(self.chunks, self.data, self.chunk_size, self.types)
        spec = ReportSpec("chunk").with_repeats(self.repeats, len(parts))
        return plan_items(
            CodeForEach(code, parts),
            len(parts),
            spec,
            execute=partial(execute_chunks, code, parts, reduce),
            label=partial(label_execution, "chunk"),
        )

    def build_report(self, outcomes: Outcomes) -> ChunksReport:
        """Return the report: the outcomes of the chunks, and the outcome of the reduction if there is one."""
        return ChunksReport.from_outcomes(outcomes)


async def execute_chunks(code: str, parts: Inputs, reduce: str | None, run: "Run") -> None:
    """Execute the chunks, and then the reduction if there is one and no chunk failed."""
    fingerprint = await run.compute_fingerprint()
    hash_of_keys = hashlib.sha256()

    def list_chunks() -> Iterator[Execution]:
        for execution in _build_executions(run, code, parts, fingerprint):
            hash_of_keys.update(execution.key.encode())
            yield execution

    await run.executor.execute_all(list_chunks(), run.cache.find_result)
    if reduce is not None:
        fingerprint = {**fingerprint, "chunks": hash_of_keys.hexdigest()}
        submitted = await asyncio.to_thread(_collect_submitted, run.store.outcomes, run.plan.report_spec.repeats)
        failures = run.store.failures
        skipped = f"{len(failures)} of {run.plan.total} executions have no result" if failures else ""
        await execute_reduction(run, reduce, submitted, fingerprint, skipped)
    report = ChunksReport.from_outcomes(run.collect_outcomes())
    for note in report.list_overlaps():
        run.log.warning("%s", note)


def _build_executions(run: "Run", code: str, parts: Inputs, fingerprint: dict[str, Any]) -> Iterator[Execution]:
    """Yield the executions of the chunks.

    The first repeat has the key of a job without repeats, unless the code reads the number of the repeat.
    """
    repeats = run.plan.report_spec.repeats
    needs_repeat = repeats is not None and reads_repeat(code)
    count = 1 if repeats is None else repeats.count
    for number, part in enumerate(parts):
        chunk_id = part["chunk_id"]
        encoded = {"data": encode_json(part["data"], f"the data of chunk {chunk_id}")}
        for repeat in range(count):
            index = number * count + repeat
            place = locate_execution(repeats, index)
            variables = {"chunk_id": chunk_id}
            if needs_repeat:
                variables = add_repeat(variables, repeat)
            key_settings = add_index(fingerprint, number_seed(index, place))
            if repeat and not needs_repeat:
                key_settings = {**key_settings, REPEAT: repeat}
            key = compute_key(code, variables, encoded, key_settings)
            unchecked_key = ""
            if "check" in key_settings:
                unchecked_key = compute_key(code, variables, encoded, without_check(key_settings))
            yield Execution(index, code, variables, key, encoded, unchecked_key=unchecked_key, place=place)


def _collect_submitted(outcomes: Sequence[Outcome], repeats: Repeats | None) -> dict[str, Any]:
    """Return the chunks' fields by id: a dict for each chunk, or with repeats a list with a dict for each repeat."""
    submitted: dict[str, Any] = {}
    for outcome in outcomes:
        chunk_id = outcome.meta.variables.get("chunk_id")
        if chunk_id is None or not isinstance(outcome, Result):
            continue
        if repeats is None:
            submitted[chunk_id] = outcome.outputs
        else:
            submitted.setdefault(chunk_id, []).append(outcome.outputs)
    return submitted
