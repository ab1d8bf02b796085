"""The run of a flow from the terminal: the checks of its parameters, its progress, and its report."""

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx

from ..blocks.registry import make_unsaved_provider
from ..flows.parameters import FlowParameters
from ..flows.plan import Outcomes
from ..flows.prefect_server import is_server_failure
from ..flows.registry import load_flow
from ..flows.reporting.failure_reasons import FailureReason, FailureReasons
from ..flows.reporting.table import MAX_SHOWN_ROWS
from ..flows.reports import MAX_REASONS, Report
from ..flows.search.plan import find_sampler_class
from ..sandbox.errors import ConfigurationError, ExecutionsFailed, NotRun
from ..sandbox.outcomes.server_message import describe_server_error
from ..sandbox.outcomes.text_escape import escape_text
from ..sandbox.result import Failure
from ..tasks.host_tools import load_tools
from ..tasks.redrawn_lines import redraw_lines
from .option_names import is_foreign, name_options
from .output import OutputFormat, count, print_json, print_outputs, print_table
from .progress import ProgressDisplay, print_reading

T = TypeVar("T")
DELIVERY_SECONDS = 10.0  # seconds to deliver events to a server that failed only once
MAX_PRINTED_LINES = 5  # lines of the code's output that are shown with a failure


def run_flow(
    model: type[FlowParameters[Any]],
    files: list[str],
    output: OutputFormat,
    values: dict[str, Any],
    name: str | None = None,
    run_tags: Sequence[str] = (),
) -> int:
    """Run a flow, print its report, and return the exit status.

    Args:
        model: The flow's parameter model.
        files: The files of code. If each execution runs one of them, they name the rows of the table.
        output: The form of the printed outcomes.
        values: The parameters that the command line set.
        name: The flow run's name; None for a name by Prefect.
        run_tags: The flow run's tags.
    """
    for text in run_tags if name is None else (name, *run_tags):
        if not text.strip() or not text.isprintable() or "/" in text:
            raise ConfigurationError(f"{text!r} cannot be a name or a tag of a run: use printable text without /")
    _import_from_working_directory(values.get("tools") or {}, values.get("sampler") or "")
    parameters = model.parse(values)
    # The engine imports Prefect, which takes a second. Refuse a wrong input or provider before that.
    make_unsaved_provider(values.get("provider", "local"), values.get("provider_options"))
    plan = None if parameters.reads_blocks() else parameters.make_plan(print_reading)
    display = ProgressDisplay()

    async def start() -> Report[Any]:
        from prefect import tags

        from ..flows.prefect_flow import call_flow

        flow: Any = load_flow(model.flow_name)
        if name is not None:
            flow = flow.with_options(flow_run_name=lambda: name)  # In a text, Prefect would replace {}.
        with tags(*run_tags):
            return await call_flow(flow, parameters, display, plan)

    failed: ExecutionsFailed | None = None
    try:
        report = run_with_display(start, display, values)
    except ExecutionsFailed as error:
        failed = error
        report = parameters.build_report(Outcomes(error.results, error.failures, error.results_path, display.spec))
    if plan is None or not plan.runs_each_code:
        files = []
    _print_report(report, output, files)
    collected = sum(len(outcome.meta.collected) for outcome in report.outcomes)
    if collected:
        print(f"{count(collected, 'file')} collected, in files/ of the results", file=sys.stderr)
    sys.stdout.flush()
    if failed is not None:
        _print_failures(failed, files if len(files) > 1 else [])
    stream = sys.stderr if output.is_json else sys.stdout
    print(f"Results of {escape_text(display.run_name)}: {report.results_path}", file=stream)
    return 0 if failed is None else 1


def _import_from_working_directory(tools: dict[str, str], sampler: str) -> None:
    """Import the tools and the sampler of the user, whose modules may be in the working directory.

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
            for row, cell in zip(rows, ["file", *files], strict=False):  # `rows` may have only the first executions.
                row.insert(1, cell)
        if rows:
            print_table(rows, len(report.rows_outcomes))
        description = report.describe()
        if description:
            print(description)
        if output.shows_output:
            print_outputs(report.outcomes)
    for note in report.list_notes():
        print(name_options(note), file=sys.stderr)


def _print_failures(failed: ExecutionsFailed, files: list[str]) -> None:
    """Print each distinct reason with an example, the number of executions that did not run, and how to see more."""
    not_run: list[Failure] = []
    reasons_of_failures = FailureReasons()
    for failure in failed.failures:
        if isinstance(failure.error, NotRun):
            not_run.append(failure)
        else:
            reasons_of_failures.add(failure.meta.index or 0, failure)
    reasons = reasons_of_failures.sort()
    lines = [f"{len(failed.failures) - len(not_run):,} of {len(failed.results):,} failed:"]
    for reason in reasons[:MAX_REASONS]:
        lines += ["", *_describe_reason(reason, files)]
    if len(reasons) > MAX_REASONS:
        lines += ["", f"... and {len(reasons) - MAX_REASONS:,} more reasons"]
    if not_run:
        summary = name_options(not_run[0].error.summary)
        lines += ["", f"{len(not_run):,} did not run, the first is number {not_run[0].meta.index}: {summary}"]
    path, number = shlex.quote(failed.results_path), failed.failures[0].meta.index
    lines += ["", f"All of one execution: rlm-batch report {path} --execution {number}"]
    print("\n".join(lines), file=sys.stderr)


def _describe_reason(reason: FailureReason, files: list[str]) -> list[str]:
    """Return lines with the reason, one traceback, the last lines that the code printed, and advice."""
    error, meta = reason.first.error, reason.first.meta
    text = reason.describe(files)
    if not is_foreign(error.summary):
        text = name_options(text)
    lines = [text, *reason.list_frames()]
    printed = meta.stderr.rstrip() or meta.stdout.rstrip()
    for line in redraw_lines(printed)[-MAX_PRINTED_LINES:]:
        escaped = escape_text(line, keep="\t")
        lines.append(f"  | {escaped}")
    advice = getattr(error, "advice", "")
    if advice:
        lines.append(escape_text(name_options(advice)))
    return lines


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
            if not is_server_failure(error):
                raise
            where = f"; the results so far are in {display.results_path}" if display.results_path else ""
            reason = describe_server_error(error)
            _exit_after_delivery(2)
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


def _exit_after_delivery(status: int) -> None:
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
