"""Running a flow from the terminal: checked first, watched while it runs, and told at the end."""

import asyncio
import dataclasses
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

import httpx
from prefect.exceptions import TerminationSignal
from prefect.settings import get_current_settings

from ..blocks.language_model.model_access import LIMITS, is_saved_model, open_model_access
from ..blocks.registry import make_unsaved_provider
from ..blocks.volume import check_volume_name
from ..flows.inputs.spilling import spill_long_parameters
from ..flows.reporting.table import format_cell, format_rows
from ..flows.validation import load_flow, open_flow_inputs
from ..sandbox.errors import ConfigurationError, ExecutionsFailed, NotRun
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.result import Outcome, Result
from ..tasks.host_tools import load_tools
from ..tasks.redrawn_lines import redraw_lines
from ..tasks.server_errors import describe_server_error
from .outcome_output import OutputFormat, print_json, print_json_lines, print_outputs
from .progress import ProgressDisplay, print_reading
from .table import MAX_TABLE_ROWS, print_table

DELIVERY_SECONDS = 10.0  # for a server that only failed once


def run_flow(flow: str, files: list[str], output: OutputFormat, parameters: dict[str, Any]) -> int:
    """Runs the flow of that name, prints what it has come to, and returns the exit status.

    `files` are those that its code was in. Tools are found in the working directory too, behind all else: while they
    are imported, and not any more when a library looks for an optional module that is not installed.
    """
    if parameters.get("tools") is not None:
        sys.path.append(os.getcwd())
        try:
            load_tools(parameters["tools"])
        finally:
            sys.path.remove(os.getcwd())
    match flow:
        case "sweep":
            return _run_sweep(output, parameters)
        case "rlm":
            return _run_rlm(output, parameters)
        case "chunks":
            return _run_chunks(output, parameters)
        case _:
            code_files = files if parameters.get("inputs") is None else []
            return _run_and_print_rows(flow, parameters, output, code_files)


def _run_sweep(output: OutputFormat, parameters: dict[str, Any]) -> int:
    """Prints the trials."""
    from ..flows.search.plan import parse_objectives
    from ..flows.sweep import report

    objective, direction, space = parameters["objective"], parameters["direction"], parameters["space"]
    display = ProgressDisplay(parse_objectives(objective, direction))
    found, failed = _check_and_run("sweep", parameters, display)
    if failed is not None:
        found = report(failed.results, objective, direction, failed.results_path, space)
    if output.is_json:
        print_json_lines(found.trials, found.best_trials)
    else:
        print_table(found.rows(MAX_TABLE_ROWS, shows_output=True), len(found.trials), mark=found.mark)
    return _print_end(found.results_path, failed, output, found.trials)


def _run_rlm(output: OutputFormat, parameters: dict[str, Any]) -> int:
    """Prints the answer."""
    from ..flows.reporting.report import describe_cached, describe_usage
    from ..flows.rlm import RlmAnswer
    from ..sandbox.queries.budget import Usage

    found, failed = _check_and_run("rlm", parameters)
    if failed is not None:
        found = RlmAnswer.from_outcome(failed.results[0], failed.results_path)
    asked = found.queries
    if output.is_json:
        queries = dataclasses.asdict(asked)
        error = None if found.error is None else found.error.summary
        answer = {"answer": found.answer, "answered": found.answered, "error": error}
        print_json({**answer, "trajectory": found.trajectory, "queries": queries})
    elif found.answered:
        print(found)
    elif found.answer:
        print(f"No answer. What the model printed last:\n{found}")
    used = Usage(asked.calls, asked.prompt_tokens, asked.completion_tokens, asked.cost)
    called = describe_usage(used) + describe_cached(asked.cached)
    print(f"{len(found.trajectory)} turns; the model was called {called}", file=sys.stderr)
    return _print_end(found.results_path, failed, output)


def _run_chunks(output: OutputFormat, parameters: dict[str, Any]) -> int:
    """Prints the table of chunks and what the reduction submitted."""
    from ..flows.chunks import overlap, report
    from ..flows.engine.failures import Outcomes

    if parameters["volume_name"] is not None:
        check_volume_name(parameters["volume_name"])
    found, failed = _check_and_run("chunks", parameters)
    if failed is not None:
        count = len(failed.results) - (parameters["reduce"] is not None)
        found = report(Outcomes(failed.results, failed.failures, failed.results_path), count)
    if output.is_json:
        print_json_lines(found.results.values())
        print_json_lines([] if found.reduction is None else [found.reduction])
    else:
        print_table(found.rows(MAX_TABLE_ROWS, shows_output=True), len(found.results))
    if isinstance(found.reduction, Result) and not output.is_json:
        values = [f"{name}={format_cell(value)}" for name, value in found.reduction.outputs.items()]
        print(f"Reduction: {escape_text(', '.join(values))}")
    for path, ids in found.overlaps.items():
        print(overlap(path, ids), file=sys.stderr)
    return _print_end(found.results_path, failed, output, found.results.values())


def run_reap(*, is_json: bool, **parameters: Any) -> int:
    """Runs the reap flow, prints a row for each sandbox and what all have cost, and returns the exit status."""
    from ..flows.cleanup.orphans import describe_removal

    display = ProgressDisplay()
    try:
        _check_and_run("reap", parameters, display)
    finally:
        if is_json:
            for item in display.orphans:
                labels = {"flow_run": item.info.run, "host": item.info.host}
                print_json({"sandbox": item.info.id, **labels, "reason": item.reason, "seconds": item.seconds})
        elif display.orphans:
            rows = [[item.info.id, item.info.host, item.reason] for item in display.orphans]
            print_table([["sandbox", "host", "why"], *rows], len(rows))
    verb = "would be removed" if parameters["dry_run"] else "removed"
    told = describe_removal(display.orphans, parameters["provider"], verb)
    print(told, file=sys.stderr if is_json else sys.stdout)
    return 0


def _run_and_print_rows(flow: str, parameters: dict[str, Any], output: OutputFormat, code_files: list[str]) -> int:
    """The exit status of a flow that returns its outcomes: a row is printed for each, with the file of its code."""
    display = ProgressDisplay()
    outcomes, failed = _check_and_run(flow, parameters, display)
    if failed is not None:
        outcomes = failed.results
    if output.is_json:
        print_json_lines(outcomes)
    else:
        rows = format_rows(outcomes, limit=MAX_TABLE_ROWS, shows_output=len(outcomes) > 1)
        if code_files:
            for row, cell in zip(rows, ["file", *code_files], strict=False):
                row.insert(1, cell)
        print_table(rows, len(outcomes))
    # The step after it has the names of one that submits nothing.
    return _print_end(display.results_path, failed, output, outcomes, counts_silent=flow == "batch")


def _print_end(
    results_path: str,
    failed: ExecutionsFailed | None,
    output: OutputFormat,
    outcomes: Iterable[Outcome] = (),
    *,
    counts_silent: bool = True,
) -> int:
    """Prints what code has printed where that is wanted, how many have submitted nothing, what failed, and where it is.

    Returns the exit status.
    """
    if output.shows_output and not output.is_json:
        print_outputs(outcomes)
    silent = collected = 0
    for outcome in outcomes:
        silent += isinstance(outcome, Result) and not (outcome.meta.submitted or outcome.meta.pruned)
        collected += len(outcome.meta.collected)
    if silent and counts_silent:
        print(f"the code of {silent} never called SUBMIT: there are no fields of it", file=sys.stderr)
    if failed is not None:
        idle = [failure for failure in failed.failures if isinstance(failure.error, NotRun)]
        failures = [failure for failure in failed.failures if not isinstance(failure.error, NotRun)]
        count = len(failures)
        print(f"{count} of {len(failed.results)} failed:", file=sys.stderr)
        for failure in failures[:10]:
            print(f"\n{failure.meta.index}: {type(failure.error).__name__}: {failure.error}", file=sys.stderr)
            printed = failure.meta.stderr.rstrip() or failure.meta.stdout.rstrip()
            for line in redraw_lines(printed)[-5:]:
                print("  |", escape_text(line, keep="\t"), file=sys.stderr)
        if count > 10:
            print(f"\n... and {count - 10} more, in the ledger", file=sys.stderr)
        if idle:
            print(f"\n{len(idle)} more, the first number {idle[0].meta.index}: {idle[0].error}", file=sys.stderr)
    if collected:
        files = "file" if collected == 1 else "files"
        print(f"{collected} {files} came home, below files/ in the results", file=sys.stderr)
    print(f"Results: {results_path}", file=sys.stderr if output.is_json else sys.stdout)
    return 0 if failed is None else 1


def _check_and_run(
    flow_name: str, parameters: dict[str, Any], display: ProgressDisplay | None = None
) -> tuple[Any, ExecutionsFailed | None]:
    """Runs the flow once it is sure that it takes these parameters and inputs; returns its result, or how it failed.

    Other errors that the flow would raise are raised, and sooner.
    """
    flow = load_flow(flow_name)
    short = _check_parameters(flow, parameters)
    # The flow is handed the same readers for as long as they are held here, so that a file is parsed once.
    _inputs = open_flow_inputs(flow_name, parameters, print_reading)
    try:
        return _run(flow, short, display), None
    except ExecutionsFailed as error:
        return None, error


def _check_parameters(flow: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters, long ones as references to files. Raises ConfigurationError for what the flow would refuse."""
    short = spill_long_parameters(parameters)
    flow.check_parameters(short)
    provider = make_unsaved_provider(parameters.get("provider", "local"), parameters.get("provider_options"))
    if provider is not None and parameters.get("shards") is None:  # shards are opened where the workers are
        asyncio.run(provider.check())
    language_model = parameters.get("language_model")
    # What a saved block says is on the server, and shards ask where the workers are.
    if language_model is not None and not is_saved_model(language_model) and parameters.get("shards") is None:
        limits = {name: parameters[name] for name in LIMITS if name in parameters}
        asyncio.run(_check_first_call(language_model, limits, is_recursive=flow.name == "rlm"))
    return short


async def _check_first_call(language_model: str, limits: dict[str, Any], *, is_recursive: bool) -> None:
    access = await open_model_access(language_model, **limits)
    await access.check_first_call(is_recursive=is_recursive)


def _run(flow: Any, parameters: dict[str, Any], display: ProgressDisplay | None = None) -> Any:
    """Runs the flow with its display.

    SIGTERM ends it as Ctrl-C does, before Prefect's own handler for it and after; and so does the terminal's end, but
    under nohup.
    """
    display = display or ProgressDisplay()

    async def run() -> Any:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await flow.with_listener(display)(**parameters)

    with display:
        display.show_start(describe_start())
        try:
            return asyncio.run(run())
        except (asyncio.CancelledError, TerminationSignal, KeyboardInterrupt):
            raise KeyboardInterrupt(_describe_interrupt(display, parameters)) from None
        except (httpx.HTTPError, RuntimeError) as error:
            # Prefect's client has no type of its own for a server that does not tell its version.
            if not isinstance(error, httpx.HTTPError) and "Failed to reach API" not in str(error):
                raise
            where = f"; the results so far are in {display.results_path}" if display.results_path else ""
            reason = describe_server_error(error)
            exit_after_delivery(2)
            raise ConfigurationError(
                f"the Prefect server failed or went away while the flow ran ({reason}){where}: look at it, and run "
                "again with --results-path or --resume to run only the rest"
            ) from error


def describe_start() -> str:
    """What a flow run waits for before it begins: Prefect's server, which is its own where none is named."""
    if os.environ.get("PREFECT_API_URL"):
        return "waiting for the Prefect server"
    has_database = (get_current_settings().home / "prefect.db").exists()
    return "starting Prefect" if has_database else "starting Prefect (half a minute the first time)"


def _describe_interrupt(display: ProgressDisplay, parameters: dict[str, Any]) -> str:
    """What is there although a run was interrupted, and the command that goes on from it."""
    if not display.results_path:
        return "interrupted"
    command = ["rlm-batch", *sys.argv[1:]]
    if parameters.get("results_path") is None:
        command += ["--results-path", display.results_path]
    return f"interrupted; the results so far are in {display.results_path}; this runs the rest:\n{shlex.join(command)}"


def exit_after_delivery(status: int) -> None:
    """Ends the process with that status after some seconds, if it has not ended by then.

    Prefect's client delivers its events at the end of a process, three of each task run, and tries each for some 8 s:
    after a run of sixty executions the process would be there for another 24 minutes.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(DELIVERY_SECONDS, end)
    timer.daemon = True
    timer.start()
