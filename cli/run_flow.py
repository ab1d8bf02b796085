"""Running a flow from the terminal: checked first, watched while it runs, and told at the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

from ..blocks.registry import make_unsaved_provider
from ..blocks.storage.location_parsing import parse_scheme
from ..blocks.volume import check_name
from ..sandbox.errors import ConfigurationError, ExecutionsFailed
from ..sandbox.result import Failure, Result
from ..sandbox.text_escape import escape_text
from .progress import TABLE_ROWS, Display, show_table
from .shutdown import ServerGone

if TYPE_CHECKING:
    from ..flows.sweep import SweepReport


TAG = re.compile(r"\.(?:constrained-\w+|literal\[[^]]*\])(?=:)")  # which of a parameter's types pydantic speaks of


def run_sweep(parameters: dict[str, Any]) -> int:
    """Runs the sweep flow, prints its table, and returns the exit status."""
    from ..flows.sweep import report, space, sweep

    _check(sweep, parameters)
    if not _wants_server(parameters["points"]):
        space(parameters["grid"], parameters["points"])
    try:
        found: SweepReport = _run(sweep, parameters)
    except ExecutionsFailed as error:
        failed = error
        found = report(error.results, parameters["objective"], parameters["direction"], error.results_path)
    else:
        failed = None
    show_table(found.rows(TABLE_ROWS), len(found.trials), mark="best")
    return _end(found.results_path, failed)


def run_batch(parameters: dict[str, Any], files: list[str]) -> int:
    """Runs the batch flow, prints its table, and returns the exit status."""
    from ..flows.batch import batch, executions
    from ..flows.reporting.text_table import format_rows

    _check(batch, parameters)
    if not _wants_server(parameters["inputs"]):
        executions(parameters["code"], parameters["inputs"])
    display = Display()
    failed: ExecutionsFailed | None = None
    try:
        outcomes = _run(batch, parameters, display)
    except ExecutionsFailed as error:
        failed, outcomes = error, error.results
    rows = format_rows(outcomes, limit=TABLE_ROWS)
    show_table(_with_files(rows, files) if parameters["inputs"] is None else rows, len(outcomes))
    return _end(display.results_path, failed)


def run_rlm(parameters: dict[str, Any]) -> int:
    """Runs the rlm flow, prints the answer, and returns the exit status."""
    from ..flows.reporting.report import describe_usage
    from ..flows.rlm import RlmAnswer, question, rlm
    from ..sandbox.budget import Usage

    _check(rlm, parameters)
    question(*(parameters[name] for name in ("query", "context", "context_file", "context_volume_path")))
    display = Display()
    try:
        found: RlmAnswer = _run(rlm, parameters, display)
    except ExecutionsFailed as error:
        return _end(error.results_path, error)
    print(escape_text(str(found), keep="\n\t"))
    asked = found.queries
    used = Usage(asked.calls, asked.prompt_tokens, asked.completion_tokens, asked.cost)
    print(f"{len(found.trajectory)} turns; the model was called {describe_usage(used)}", file=sys.stderr)
    return _end(found.results_path, None)


def run_chunks(parameters: dict[str, Any]) -> int:
    """Runs the chunks flow, prints its table and what the reduction submitted, and returns the exit status."""
    from ..flows.chunks import chunks, overlap, report
    from ..flows.engine.failures import Outcomes
    from ..flows.inputs.chunking import build_chunks
    from ..flows.reporting.text_table import format_cell

    _check(chunks, parameters)
    if parameters["volume_name"] is not None:
        check_name(parameters["volume_name"])
    if not _wants_server(parameters["chunks"]) and not _wants_server(parameters["data"]):
        build_chunks(parameters["chunks"], parameters["data"], parameters["chunk_size"])
    failed: ExecutionsFailed | None = None
    try:
        found = _run(chunks, parameters)
    except ExecutionsFailed as error:
        count = len(error.results) - (parameters["reduce"] is not None)
        failed, found = error, report(Outcomes(error.results, error.failures, error.results_path), count)
    show_table(found.rows(TABLE_ROWS), len(found.results))
    if isinstance(found.reduction, Result):
        values = ", ".join(
            f"{escape_text(name)}={escape_text(format_cell(value))}" for name, value in found.reduction.outputs.items()
        )
        print(f"Reduction: {values}")
    for path, ids in found.overlaps.items():
        print(escape_text(overlap(path, ids)), file=sys.stderr)
    return _end(found.results_path, failed)


def run_sequence(parameters: dict[str, Any], files: list[str]) -> int:
    """Runs the sequence flow, prints a row for each step, and returns the exit status."""
    from ..flows.reporting.text_table import format_rows
    from ..flows.sequence import sequence, texts

    _check(sequence, parameters)
    texts(parameters["steps"])
    display = Display()
    failed: ExecutionsFailed | None = None
    try:
        outcomes = _run(sequence, parameters, display)
    except ExecutionsFailed as error:
        failed, outcomes = error, error.results
    show_table(_with_files(format_rows(outcomes, limit=TABLE_ROWS), files), len(outcomes))
    return _end(display.results_path, failed)


def run_reap(parameters: dict[str, Any]) -> int:
    """Runs the reap flow, prints a row for each sandbox and what all have cost, and returns the exit status."""
    from ..flows.cleanup.orphans import OrphanedSandbox, describe_removal
    from ..flows.reap import listener, reap

    _check(reap, parameters)
    told: list[OrphanedSandbox] = []
    listener.set(told.extend)
    try:
        _run(reap, parameters)
    finally:
        if told:
            rows = [[found.info.id, found.info.labels.get("rlm-batch-host", ""), found.reason] for found in told]
            show_table([["sandbox", "host", "why"], *rows], len(rows))
    print(describe_removal(told, parameters["provider"], "would be removed" if parameters["dry_run"] else "removed"))
    return 0


def _with_files(rows: list[list[str]], files: list[str]) -> list[list[str]]:
    """The rows of a table, each with the file that its code came from."""
    (first, *header), *rest = rows
    return [[first, "file", *header], *([row[0], file, *row[1:]] for row, file in zip(rest, files, strict=False))]


def _end(results_path: str, failed: ExecutionsFailed | None) -> int:
    if failed is not None:
        total, count = len(failed.results), len(failed.failures)
        print(f"{count} of {total} failed:", file=sys.stderr)
        for failure in failed.failures[:10]:
            said = escape_text(f"{type(failure.error).__name__}: {failure.error}", keep="\n\t")
            print(f"\n{failure.meta.index}: {said}", file=sys.stderr)
            _show_output(failure)
        if count > 10:
            print(f"\n... and {count - 10} more, in the ledger", file=sys.stderr)
    print(f"Results: {results_path}")
    return 0 if failed is None else 1


def _show_output(failure: Failure) -> None:
    lines = failure.meta.stderr.rstrip().splitlines() or failure.meta.stdout.rstrip().splitlines()
    for line in lines[-5:]:
        print("  |", escape_text(line, keep="\t"), file=sys.stderr)


def _wants_server(location: str | None) -> bool:
    """Whether its file can only be read once there is a Prefect server, which has the block that it is reached with."""
    return location is not None and parse_scheme(location) == "block"


def _check(flow: Any, parameters: dict[str, Any]) -> None:
    """What the flow would refuse once it runs, refused before a server is started for it."""
    from prefect.exceptions import ParameterTypeError

    from ..flows.inputs.spilling import spill_long_parameters

    try:
        flow.validate_parameters(spill_long_parameters(parameters))
    except ParameterTypeError as error:
        problems = [TAG.sub("", line.strip(" -")) for line in str(error).splitlines()[1:] if line.strip()]
        raise ConfigurationError("; ".join(problems) or str(error)) from None
    provider = make_unsaved_provider(parameters["provider"])
    if provider is not None and parameters.get("shards") is None:  # shards are opened where the workers are
        asyncio.run(provider.check())


def _run(flow: Any, parameters: dict[str, Any], display: Display | None = None) -> Any:
    """Runs the flow with its display. SIGTERM ends it as Ctrl-C does, before Prefect's own handler for it and after."""
    import httpx
    from prefect.exceptions import TerminationSignal

    display = display or Display()

    async def run() -> Any:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await flow.with_listener(display)(**parameters)

    with display:
        display.starting(embedded=not os.environ.get("PREFECT_API_URL"))
        try:
            return asyncio.run(run())
        except (asyncio.CancelledError, TerminationSignal):
            raise KeyboardInterrupt from None
        except (httpx.HTTPError, RuntimeError) as error:
            # Prefect's client has no type of its own for a server that does not tell its version.
            if not isinstance(error, httpx.HTTPError) and "Failed to reach API" not in str(error):
                raise
            where = f"; the results so far are in {display.results_path}" if display.results_path else ""
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise ServerGone(
                f"the Prefect server failed or went away while the flow ran ({said}){where}: look at it, and run again "
                "with --results-path or --resume to run only the rest"
            ) from error
