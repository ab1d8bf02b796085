"""What engines say when something fails, in a line, and which of our errors it becomes."""

from ...sandbox.errors import SandboxStartError
from ...sandbox.outcomes.text_escape import escape_text

# The engine's own failure; a program that cannot be run; one that is not there. Others are the program's.
ENGINE_STATUSES = (125, 126, 127)


def get_last_line(text: str) -> str:
    """The complaint in what a program wrote on its standard error: its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return escape_text(lines[-1][-1000:]).removeprefix("Error: ") if lines else ""


def describe_end(status: int | None, stderr: str) -> str:
    """How the engine's client for a container ended, with what it complained of."""
    words = get_last_line(stderr)
    if status is not None and status < 0:
        return f"the engine's client was killed by signal {-status}"
    end = "its container has ended" + (f" with status {status}" if status else "")
    return f"{end}: {words}" if words else end


def make_start_error(sandbox_id: str, status: int | None, stderr: str) -> SandboxStartError:
    """The error of a container whose driver did not start."""
    return SandboxStartError(f"the driver did not start in container {sandbox_id}: {describe_end(status, stderr)}")
