"""The processes that send the files of executions, as the supervisor sees them; they are confined like code."""

from __future__ import annotations

from ..wire.collection import COLLECT_TIMEOUT_SECONDS
from ..wire.strict_json import dumps, loads
from .child_process import Execution, fork_child
from .processes import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .child_process import ChildProcess
    from .collection import Collection
    from .confinement import Confinement
    from .event_loop import EventLoop

COLLECTOR_FRAMES = ("collect", "end")


def fork_collector(
    number: int,
    collection: Collection,
    output_cap: int,
    confinement: Confinement,
    loop: EventLoop,
    supervisor_fds: list[int],
) -> ChildProcess:
    """Fork a child that sends the files of the execution with this number. Raises OSError."""
    sending = Execution(number, COLLECT_TIMEOUT_SECONDS, output_cap)

    def send() -> None:
        collection.send(sending.token)

    process = fork_child(send, confinement, loop, supervisor_fds)
    process.is_collector, process.frame_kinds, process.execution = True, COLLECTOR_FRAMES, sending
    sending.start_clock()
    return process


def encode_collected(number: int, reason: str) -> tuple[dict[str, Any], bytes]:
    """Return the frame that ends an execution's files; `reason` says why some are missing, or is empty."""
    return {"op": "collected", "id": number}, dumps(reason).encode("utf-8", "replace")


def encode_collector_end(
    process: ChildProcess, sending: Execution, code: int | None, number: int | None
) -> tuple[dict[str, Any], bytes]:
    """Return the frame that ends an execution's files, for a child that ended with this exit status or signal."""
    reason = ""
    if process.unconfined is not None:
        reason = loads(process.unconfined.decode("utf-8"))["message"]
    elif sending.end_cause == "timeout":
        reason = f"it took more than {COLLECT_TIMEOUT_SECONDS:g} s"
    elif code != 0:
        reason = f"the process that reads them {describe_end(code, number)}"
    return encode_collected(sending.id, reason)
