"""The command `rlm-batch`: its environment, its commands, and its exit status.

0: success. 1: some executions failed. 2: wrong usage or setup. 130: interrupted. 141: closed standard output.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from .standard_streams import open_standard_streams

if TYPE_CHECKING:
    from rich.console import Console

# The command sets these variables before it imports Prefect. Prefect's log lines would hide the command's output, and
# the server still gets them. Prefect's internal lines are a page for each event that no server receives.
QUIET_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_CLI_PROMPT": "false",
    # Prefect would report its first import on a terminal.
    "DO_NOT_TRACK": "1",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command in `arguments`, by default those of the process, and exit with the command's status."""
    with open_standard_streams():
        status = _run_until_interrupted(arguments)
    if arguments is None:
        atexit.register(_end_process, status)  # The last function that is registered is called first.
    sys.exit(status)


def _end_process(status: int) -> None:
    """Call the other functions registered with `atexit`, then end the process without the end of Python.

    The end of Python would look through all objects for garbage several times, for up to 0.5 s of CPU. It would also
    abort the process if a thread that waits for a server is then in pydantic's compiled code.
    """
    atexit.unregister(_end_process)
    # A function that was registered before the command began is called too: OpenTelemetry's exports the last spans.
    atexit._run_exitfuncs()  # type: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader closed the pipe, or the stream is closed.
            stream.flush()
    os._exit(status)


def _run_until_interrupted(arguments: list[str] | None) -> int:
    """Run the command, and return its exit status, also after an interrupt.

    If `arguments` is None, the process ends with the command, so the handler of Ctrl-C is replaced.
    """
    message: str | None = None
    try:
        status = _run_command(arguments)
    except KeyboardInterrupt as interrupt:
        status, message = 130, str(interrupt) or "interrupted"
    replaces_handler = arguments is None and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    if replaces_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C does not cut the message short.
    if message is not None:
        _print_error(message)
    if replaces_handler:
        # Only Prefect's work at process exit remains, and a second Ctrl-C skips it.
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))
    return status


def _run_command(arguments: list[str] | None) -> int:
    """Run the command, print its error if it fails, and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    _prepare_process(shows_log=words[:1] == ["worker"])
    from cyclopts import CycloptsError

    from ..sandbox.errors import RlmBatchError
    from .commands import app

    try:
        status = app(
            arguments,
            exit_on_error=False,
            print_error=False,
            # `_print_error` prints errors instead. For its own console cyclopts would import rich.
            error_console=cast("Console", object()),
            result_action="return_value",
        )
        sys.stdout.flush()
        output_error = getattr(sys.stdout, "error", None)
        if output_error is not None:
            _print_error(
                f"standard output could not be written ({output_error.strerror}): some or all of it is missing"
            )
    except CycloptsError as error:
        command = " ".join(["rlm-batch", *(error.command_chain or ())])
        _print_error(f"{str(error).removesuffix('.')} (see {command} --help)")
        return 2
    except BrokenPipeError:
        return _end_output()
    except SystemExit:
        has_reader = not isinstance(getattr(sys.stdout, "error", None), BrokenPipeError)
        if has_reader:
            raise
        return _end_output()  # rich turns a BrokenPipeError into SystemExit.
    except (RlmBatchError, OSError) as error:
        from .option_names import describe_error

        _print_error(describe_error(error))
        return 2
    return status if isinstance(status, int) else 0


def _end_output() -> int:
    """Discard further output, whose reader has closed the pipe as `head` does, and return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # At exit Python would try to write the rest.
    return 128 + signal.SIGPIPE


def _prepare_process(*, shows_log: bool) -> None:
    """Set the environment variables, filters and proxies of the process, before Prefect and HTTP clients read them."""
    for name, value in QUIET_PREFECT.items():
        if not (shows_log and "LOGGING" in name):
            os.environ.setdefault(name, value)
    if os.path.expanduser("~") == "~":  # Without HOME and an entry in passwd Prefect cannot be imported.
        os.environ["HOME"] = "/"  # Container engines set the same value.
    # For Prefect, a log line that does not reach the server is a logging error, which Python would print.
    logging.raiseExceptions = False
    # Commands that need Prefect's directory print their own error with advice.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
    from ..flows.child_process import GARBAGE_THRESHOLD, ignore_settings_files, keep_absolute
    from ..flows.proxies import exclude_loopback

    # HTTP clients read the proxy variables when they are created, in this process and in its child processes.
    exclude_loopback(os.environ)
    gc.set_threshold(GARBAGE_THRESHOLD)
    os.environ["PATH"] = keep_absolute(os.environ.get("PATH", os.defpath))  # No programs from the working directory.
    ignored = ignore_settings_files()
    if ignored:
        _print_error(
            f"ignored Prefect's settings in {', '.join(ignored)} of the working directory, because they can run "
            "code: set environment variables, or a profile (prefect config set)"
        )


def _print_error(text: str) -> None:
    from ..sandbox.outcomes.text_escape import escape_text

    escaped = escape_text(text, keep="\n")
    print(f"rlm-batch: {escaped}", file=sys.stderr)


if __name__ == "__main__":
    main()
