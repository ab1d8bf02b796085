"""The run of a flow from the terminal: the checks of its parameters, its progress, and its report."""

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx

from ..blocks.registry import make_unsaved_provider
from ..flows.parameters import FlowParameters
from ..flows.plan import Outcomes
from ..flows.registry import load_flow
from ..flows.reporting.failure_reasons import FailureReasons
from ..flows.reporting.table import MAX_SHOWN_ROWS
from ..flows.reports import MAX_REASONS, Report
from ..flows.search.plan import find_sampler_class
from ..sandbox.errors import ConfigurationError, ExecutionsFailed, NotRun
from ..sandbox.outcomes.server_message import describe_server_error
from ..sandbox.outcomes.text_escape import escape_text
from ..tasks.host_tools import load_tools
from ..tasks.redrawn_lines import redraw_lines
from .option_names import is_foreign, name_options
from .output import OutputFormat, count, print_json, print_outputs, print_table
from .progress import ProgressDisplay, print_reading

T = TypeVar("T")
DELIVERY_SECONDS = 10.0  # seconds to deliver events to a server that failed only once


def run_flow(model: type[FlowParameters[Any]], files: list[str], output: OutputFormat, values: dict[str, Any]) -> int:
    """Run a flow, print its report, and return the exit status.

    Args:
        model: The flow's parameter model.
        files: The files of code. They name the rows if each execution runs a different file.
        output: The form of the printed outcomes.
        values: The parameters that the command line set.
    """
    _import_from_working_directory(values.get("tools") or {}, values.get("sampler") or "")
    parameters = model.parse(values)
    # The engine imports Prefect, which takes a second. Refuse a wrong input or provider before that.
    make_unsaved_provider(values.get("provider", "local"), values.get("provider_options"))
    plan = None if parameters.reads_blocks() else parameters.make_plan(print_reading)
    display = ProgressDisplay()

    async def start() -> Report[Any]:
        from ..flows.prefect_flow import call_flow

        return await call_flow(load_flow(model.flow_name), parameters, display, plan)

    failed: ExecutionsFailed | None = None
    try:
        report = run_with_display(start, display, values)
    except ExecutionsFailed as error:
        failed = error
        report = parameters.build_report(Outcomes(error.results, error.failures, error.results_path, display.spec))
    files = files if plan is not None and plan.runs_each_code else []
    _print_report(report, output, files)
    collected = sum(len(outcome.meta.collected) for outcome in report.outcomes)
    if collected:
        print(f"{count(collected, 'file')} collected, in files/ of the results", file=sys.stderr)
    sys.stdout.flush()
    if failed is not None:
        _print_failures(failed, files if len(files) > 1 else [])
    print(
        f"Results of {escape_text(display.run_name)}: {report.results_path}",
        file=sys.stderr if output.is_json else sys.stdout,
    )
    return 0 if failed is None else 1


def _import_from_working_directory(tools: dict[str, str], sampler: str) -> None:
    """Import the tools and the sampler by its import path, which may be in the working directory.

    The directory is on the path only during the import. Later, a library that looks for an optional module must not
    find a file there.
    """
    sys.path.append(os.getcwd())
    try:
        load_tools(tools)
        if ":" in sampler:
            find_sampler_class(sampler)
    finally:
        sys.path.remove(os.getcwd())


def _print_report(report: Report[Any], output: OutputFormat, files: list[str]) -> None:
    """Print the outcomes as a table or as JSON, and the notes on them."""
    if output.is_json:
        for line in report.to_json_lines():
            print_json(line)
    else:
        rows = report.rows(MAX_SHOWN_ROWS, shows_output=len(report.outcomes) > 1, shows_usage=output.shows_usage)
        if files:
            for row, cell in zip(rows, ["file", *files], strict=False):
                row.insert(1, cell)
        if rows:
            print_table(rows, len(report.rows_outcomes))
        if text := report.describe():
            print(text)
        if output.shows_output:
            print_outputs(report.outcomes)
    for note in report.list_notes():
        print(name_options(note), file=sys.stderr)


def _print_failures(failed: ExecutionsFailed, files: list[str]) -> None:
    """Print each distinct reason with one traceback and the last lines that its code printed, and how to see more."""
    idle = [failure for failure in failed.failures if isinstance(failure.error, NotRun)]
    failures = [failure for failure in failed.failures if not isinstance(failure.error, NotRun)]
    grouped = FailureReasons()
    for failure in failures:
        grouped.add(failure.meta.index or 0, failure)
    reasons = grouped.sort()
    lines = [f"{len(failures):,} of {len(failed.results):,} failed:"]
    for reason in reasons[:MAX_REASONS]:
        text = reason.describe(files)
        lines += ["", text if is_foreign(reason.first.error.summary) else name_options(text), *reason.list_frames()]
        meta, advice = reason.first.meta, getattr(reason.first.error, "advice", "")
        printed = meta.stderr.rstrip() or meta.stdout.rstrip()
        lines += [f"  | {escape_text(line, keep=chr(9))}" for line in redraw_lines(printed)[-5:]]
        lines += [escape_text(name_options(advice))] if advice else []
    if len(reasons) > MAX_REASONS:
        lines += ["", f"... and {len(reasons) - MAX_REASONS:,} more reasons"]
    if idle:
        summary = name_options(idle[0].error.summary)
        lines += ["", f"{len(idle):,} did not run, the first is number {idle[0].meta.index}: {summary}"]
    path, number = shlex.quote(failed.results_path), failed.failures[0].meta.index
    lines += ["", f"All of one execution: rlm-batch report {path} --execution {number}"]
    print("\n".join(lines), file=sys.stderr)


def run_with_display(
    start: Callable[[], Coroutine[Any, Any, T]], display: ProgressDisplay, values: dict[str, Any]
) -> T:
    """Run the flow that `start` starts, with its display, and return its result."""
    with display:
        from prefect.exceptions import TerminationSignal

        try:
            return run_until_interrupted(start)
        except (TerminationSignal, KeyboardInterrupt):
            raise KeyboardInterrupt(_describe_interrupt(display, values)) from None
        except (httpx.HTTPError, RuntimeError) as error:
            # Prefect's client raises a plain RuntimeError if a server does not report its version.
            if not isinstance(error, httpx.HTTPError) and "Failed to reach API" not in str(error):
                raise
            where = f"; the results so far are in {display.results_path}" if display.results_path else ""
            reason = describe_server_error(error)
            exit_after_delivery(2)
            raise ConfigurationError(
                f"the Prefect server failed during the run ({reason}){where}: check the server, then run again with "
                "--results-path or --resume to run only the rest"
            ) from error


def run_until_interrupted(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an async function in an event loop, and return its result.

    SIGTERM and the end of the terminal (SIGHUP) cancel it as Ctrl-C does. Under nohup, SIGHUP does nothing.

    Raises:
        KeyboardInterrupt: The function was cancelled.
    """

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _describe_interrupt(display: ProgressDisplay, values: dict[str, Any]) -> str:
    """Return a message with the results of an interrupted run, and the command that resumes it."""
    if not display.results_path:
        return "interrupted"
    command = ["rlm-batch", *sys.argv[1:]]
    if values.get("results_path") is None:
        command += ["--results-path", display.results_path]
    return f"interrupted; the results so far are in {display.results_path}. To run the rest:\n{shlex.join(command)}"


def exit_after_delivery(status: int) -> None:
    """End the process with this status after `DELIVERY_SECONDS`, if it has not ended by then.

    At process exit Prefect's client delivers three events per task run, and tries each for about 8 s. After a run of
    sixty executions an unreachable server would delay the exit by 24 minutes.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(DELIVERY_SECONDS, end)
    timer.daemon = True
    timer.start()
