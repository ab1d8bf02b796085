"""Handling of the engines' errors: one line from their output, and the errors of this package."""

from ...sandbox.errors import SandboxStartError
from ...sandbox.outcomes.text_escape import escape_text

# The engine failed, the program cannot be run, or the program is missing. Other statuses are the program's.
ENGINE_STATUSES = (125, 126, 127)


def get_last_line(text: str) -> str:
    """Return the last line of a program's standard error, which is the reason for its failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return escape_text(lines[-1][-1000:]).removeprefix("Error: ") if lines else ""


def describe_end(status: int | None, stderr: str) -> str:
    """Describe how the engine's client for a container ended, with its error message."""
    words = get_last_line(stderr)
    if status is not None and status < 0:
        return f"the engine's client was killed by signal {-status}"
    end = "its container has ended" + (f" with status {status}" if status else "")
    return f"{end}: {words}" if words else end


def make_start_error(sandbox_id: str, status: int | None, stderr: str) -> SandboxStartError:
    """Make the error for a container whose driver did not start."""
    return SandboxStartError(f"the driver did not start in container {sandbox_id}: {describe_end(status, stderr)}")
