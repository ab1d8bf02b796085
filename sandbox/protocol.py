"""The host's side of the protocol with one driver, without I/O: it encodes and decodes frames and builds results.

`interpreter` does the I/O on an event loop, `pipe_transport` on a pair of descriptors.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import CodeCrashed, ConfigurationError, OutcomeUnknown, PrepareError, SandboxLost, SandboxStartError
from .intake.calls import Call
from .intake.collected_files import LOST, CollectedFiles
from .intake.reports import Reports
from .meta import NOTHING_ASKED, Meta
from .model_reply import read_program
from .outcomes.decoding import decode_end
from .outcomes.ending import build_error, read_json
from .requests.execution_request import ExecutionRequest
from .result import Result
from .wire.collection import COLLECT_TIMEOUT_SECONDS
from .wire.frames import MAX_CALL_BYTES, BadFrameError, FrameReader, encode_frame_parts
from .wire.names import COMMIT_TIMEOUT_SECONDS
from .wire.strict_json import NotJsonError, encode_fields, loads
from .wire.submission import check_displays

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .intake.calls import CallQueue
    from .sandbox_api import Sandbox

START_TIMEOUT_SECONDS = 60.0  # seconds for the driver to answer after the provider started it
# Seconds in which a driver on this machine reads some of its input, unless the driver is frozen.
STALL_SECONDS = 60.0
ANSWER_GRACE_SECONDS = 30.0  # seconds after a timeout until a driver that has not reported it counts as lost

# A driver sends at most 64 KiB of output in a frame. JSON escapes can make the body six times as long.
MAX_OUTPUT_BODY_BYTES = 512 * 1024

MAX_ARGUMENTS = 1_000  # per call: Python binds arguments one by one, which blocks the event loop

REENTERED = "a tool or on_output cannot run code in the interpreter that waits for it: use another interpreter"

Frame = tuple[dict[str, Any], bytes]


@dataclass(slots=True, eq=False)
class PendingExecution:
    """An execution that was sent, and its output so far.

    Attributes:
        ended: Set when the execution has ended or was refused, or when its connection is closed.
        calls: Answers the code's calls of host functions on an event loop.
        files: JSON of the files that the code wrote on the volume.
        value: JSON of the value of the last expression.
        end: The driver's last frame for the execution; None before that frame.
        refusal: The limit that the code exceeded. The host then ends the execution.
        listener_error: The exception that `on_output` raised.
        caller_context: Context variables for the tools.
    """

    id: int
    protocol: DriverProtocol
    request: ExecutionRequest
    collected: CollectedFiles | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    calls: CallQueue | None = None
    output: dict[str, list[str]] = field(default_factory=lambda: {"stdout": [], "stderr": []})
    files: bytes = b""
    value: bytes | None = None
    displays: list[bytes] = field(default_factory=list[bytes])
    end: Frame | None = None
    refusal: str = ""
    reports: Reports = field(init=False)
    listener_error: Exception | None = None
    caller_context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _output_sizes: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})  # characters
    _display_bytes: int = 0
    _unfinished: dict[str, str] = field(default_factory=dict[str, str])  # last lines, in which a secret may begin

    def __post_init__(self) -> None:
        self.reports = Reports(self.request.should_prune)
        if self.request.collect:
            disk_mib = self.protocol.sandbox.disk_mib
            self.collected = CollectedFiles(list(self.request.collect), self.request.collect_to, disk_mib)

    def refuse(self, reason: str) -> None:
        """End the execution because the code exceeded a limit."""
        self.refusal = reason
        self.ended.set()

    @property
    def is_over(self) -> bool:
        """Return True if the driver has sent everything: the end, and the collected files if it collects any."""
        if self.end is None:
            return False
        if self.collected is None or self.collected.has_ended:
            return True
        header, _ = self.end
        return header.get("collects") is not True  # otherwise, collected files follow

    def end_collection(self) -> None:
        """Accept no more collected files. The result reports a loss if the execution was not over."""
        if self.collected is None:
            return
        if self.is_over:
            self.collected.end()
        else:
            self.collected.end(LOST)

    def add_output(self, stream: str, text: str, dropped: int) -> None:
        """Add output of the code and pass it to the listener. A listener that raises is not called again."""
        # Only a driver that was tampered with sends more than its own cap.
        room = max(0, self.protocol.sandbox.settings.output_cap - self._output_sizes[stream])
        text = text[:room]
        if not text:
            return
        self._output_sizes[stream] += len(text)
        hide = self.protocol.sandbox.hide
        unfinished = self._unfinished.pop(stream, "")
        if dropped:
            if hide is not None:
                unfinished, text = hide.hide_before_cut(unfinished), hide.hide_after_cut(text)
            text = f"\n[... {dropped:,} characters dropped ...]\n{text}"
        if hide is not None:  # A secret may be in two pieces of output, but not in two lines.
            text = unfinished + text
            end = max(text.rfind("\n"), text.rfind("\r")) + 1
            text, self._unfinished[stream] = hide(text[:end]), text[end:]
        self._pass_on(stream, text)

    def finish_output(self) -> None:
        """Pass on the last lines that have no end."""
        hide = self.protocol.sandbox.hide
        while hide is not None and self._unfinished:
            stream, text = self._unfinished.popitem()
            self._pass_on(stream, hide(text))

    def _pass_on(self, stream: str, text: str) -> None:
        self.output[stream].append(text)
        if text and self.request.on_output is not None and self.listener_error is None:
            try:
                self.request.on_output(stream, text)
            except Exception as error:  # noqa: BLE001 - `take_result` raises it for the caller
                self.listener_error = error

    def add_display(self, body: bytes) -> None:
        """Add a display of the code. Raise BadFrameError if there are more displays than our driver sends."""
        self._display_bytes += len(body)
        check_displays(len(self.displays) + 1, self._display_bytes)
        self.displays.append(body)

    def build_meta(self, **usage: Any) -> Meta:
        """Build the meta from the output so far, and from fields that only the end of the code tells."""
        self.finish_output()
        sandbox = self.protocol.sandbox
        query_summary = NOTHING_ASKED
        if self.request.queries is not None:
            query_summary = self.request.queries.session.summarize()
        if self.collected is not None:
            usage["collected"] = tuple(self.collected.paths)
            usage["not_collected"] = tuple(self.collected.problems)
        return Meta(
            variables=self.request.variables or {},
            provider=sandbox.provider,
            sandbox_id=sandbox.id,
            isolation=sandbox.isolation,
            layers=sandbox.layers,
            stdout="".join(self.output["stdout"]),
            stderr="".join(self.output["stderr"]),
            queries=query_summary,
            reports=tuple(self.reports.values.items()),
            pruned=self.reports.is_pruned,
            **usage,
        )

    def bind_tool(self, call: Call) -> Callable[[], Any]:
        """Return a function that calls the tool with the code's arguments.

        The code can forge the arguments, so this may raise any exception.
        """
        arguments = read_json(call.take_body())
        args: list[Any] = arguments["args"]
        kwargs: dict[str, Any] = arguments["kwargs"]
        if type(args) is not list or type(kwargs) is not dict:
            raise ValueError("a call without arguments")
        if len(args) > MAX_ARGUMENTS or len(kwargs) > MAX_ARGUMENTS:
            raise ValueError(f"a call with more than {MAX_ARGUMENTS:,} arguments: pass them in a list")
        tools = {"report": self.reports.add, **self.request.tools}
        return functools.partial(tools[call.header["name"]], *args, **kwargs)


class DriverProtocol:
    """The state of one driver's connection: frame numbers, pending executions and the reason for its end.

    Attributes:
        answered: Set when the driver is ready or the connection is closed.
        pending: Executions that have not ended, by number.
        closed_reason: Why nothing more can be sent; empty while sending is possible.
        is_spent: True if no execution can start, but running ones continue.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.answered = asyncio.Event()
        self.pending: dict[int, PendingExecution] = {}
        self.is_ready = False
        self.closed_reason = ""
        self.is_spent = False
        self._frames = FrameReader(MAX_CALL_BYTES)
        self._execution_numbers = itertools.count(1)
        self._frame_numbers = itertools.count(0)
        self._last_number = 0  # number of the driver's latest frame

    def close(self, reason: str) -> None:
        """Record why nothing more can be sent, and end all waits. A later call does not replace the reason."""
        if not self.closed_reason:
            self.closed_reason = reason
        self.answered.set()
        for pending in list(self.pending.values()):
            pending.ended.set()

    def close_at_hangup(self) -> None:
        """Close the connection because the driver has ended it."""
        reason = "its process has ended"
        stderr = self.sandbox.read_stderr_tail()
        if stderr:
            reason += f": {stderr}"
        self.close(reason)

    # -- to the driver

    def encode(self, header: dict[str, Any], body: bytes | None = None) -> bytes:
        """Encode a frame with the next number. Send frames in the order of encoding: the driver ignores older ones."""
        return b"".join(self._encode_in_parts(header, body))

    def _encode_in_parts(self, header: dict[str, Any], body: bytes | list[bytes] | None = None) -> list[bytes]:
        header["n"] = next(self._frame_numbers)
        return encode_frame_parts(header, body)

    def encode_start(self) -> bytes:
        """Encode the first frame: the settings of the driver."""
        settings = self.sandbox.settings
        body = {item.name: getattr(settings, item.name) for item in fields(settings)}
        return self.encode({"op": "start", "id": 0}, encode_fields(body))

    def add_preparation(
        self, preparation: Preparation, on_output: Callable[[str, str], None] | None = None
    ) -> tuple[PendingExecution, list[bytes]]:
        """Register the code that runs before the first execution. Return it and its frame in parts."""
        request = ExecutionRequest(preparation.code, timeout=preparation.timeout, on_output=on_output)
        request.body = [encode_fields({"code": read_program(preparation.code)})]
        return self._add_pending(request, {"op": "prepare"})

    def add_execution(self, request: ExecutionRequest) -> tuple[PendingExecution, list[bytes]]:
        """Register a completed request. Return it and its frame in parts. Raise SandboxLost if nothing can be sent."""
        if request.queries is not None:
            request.queries.session.hide = self.sandbox.hide
        return self._add_pending(request, {"op": "execute", "context": request.context})

    def _add_pending(self, request: ExecutionRequest, header: dict[str, Any]) -> tuple[PendingExecution, list[bytes]]:
        if self.closed_reason:
            raise SandboxLost(
                f"the sandbox was lost before the code was sent ({self.closed_reason}): run it in a new one"
            )
        self.sandbox.expect_execution()
        number = next(self._execution_numbers)
        pending = self.pending[number] = PendingExecution(number, self, request)
        header |= {"id": number, "timeout": request.timeout}
        if pending.collected is not None:
            header |= {"collect": pending.collected.patterns, "collect_bytes": pending.collected.max_bytes}
        return pending, self._encode_in_parts(header, request.body)

    def give_up(self, pending: PendingExecution) -> bytes:
        """Ignore all further frames of an execution. Return the frame that ends it; empty if it has ended."""
        was_running = self.pending.pop(pending.id, None) is not None
        if was_running and not self.closed_reason:
            return self.encode({"op": "cancel", "id": pending.id})
        return b""

    def encode_forget(self, context: str) -> bytes:
        """Encode the frame that ends a context. The next execution under its name starts fresh."""
        return self.encode({"op": "forget", "id": 0, "context": context})

    def encode_reply(self, call: Call, body: bytes) -> bytes:
        """Encode the frame that answers a tool call."""
        return self.encode({"op": "reply", "id": call.header["id"], "call": call.header["call"]}, body)

    # -- from the driver

    def receive(self, data: bytes) -> list[tuple[PendingExecution, Call]]:
        """Decode the driver's bytes and return the calls in them. Invalid bytes close the connection.

        A closed connection ignores all bytes.
        """
        calls: list[tuple[PendingExecution, Call]] = []
        if self.closed_reason:
            return calls
        try:
            for header, body in self._frames.feed(data):
                self._take_frame(header, body, calls)
        except BadFrameError as error:
            self.close(f"it sent invalid data ({error})")
        return calls

    def _take_frame(
        self, header: dict[str, Any], body: bytes | None, calls: list[tuple[PendingExecution, Call]]
    ) -> None:
        op = header.get("op")
        execution_number = header.get("id")
        frame_number = header.get("n")
        if type(op) is not str or type(execution_number) is not int or type(frame_number) is not int:
            raise BadFrameError("a header without its fields")
        if frame_number <= self._last_number:
            return  # The connection has repeated a frame.
        self._last_number = frame_number
        if op == "ready":
            self.is_ready = True
            self.answered.set()
            return
        pending = self.pending.get(execution_number)
        if pending is None:
            return  # This is a heartbeat, or a frame of an execution that was given up.
        if op == "output":
            stream = header.get("stream")
            dropped = header.get("dropped")
            text = _read_output(body or b'""')
            if stream not in ("stdout", "stderr") or type(dropped) is not int or type(text) is not str:
                raise BadFrameError("output that is not text")
            pending.add_output(stream, text, dropped)
        elif op == "files":
            pending.files = body or b""
        elif op == "value":
            pending.value = body
        elif op == "display":
            pending.add_display(body or b"")
        elif op == "end" and type(header.get("status")) is str:
            pending.finish_output()
            pending.end = (header, body or b"null")
        elif op == "collect" and pending.collected is not None:
            pending.collected.take(body or b"")
        elif op == "collected" and pending.collected is not None:
            pending.collected.end(_describe_unfinished(body or b'""'))
        elif op == "call" and type(header.get("call")) is int and type(header.get("name")) is str:
            calls.append((pending, Call(header, body or b"null")))
        else:
            raise BadFrameError(f"a frame of kind {op[:80]!r} that is none of a driver's")
        if pending.is_over:
            del self.pending[pending.id]
            pending.ended.set()

    def take_result(self, pending: PendingExecution) -> Result:
        """Return the result of an execution that has ended or that the caller gave up.

        Raises:
            RlmBatchError: The code failed. The error has `meta`.
            OutcomeUnknown: The driver has not answered.
            Exception: `on_output` or `on_event` raised it.
        """
        if pending.refusal:
            meta = pending.build_meta()
            refused = CodeCrashed(pending.refusal, stdout=meta.stdout)
            refused.meta = meta
            raise refused
        if pending.end is None:
            raise self._make_unknown_error(pending)
        if pending.listener_error is not None:
            raise pending.listener_error
        queries = pending.request.queries
        if queries is not None and queries.is_top_level and queries.session.listener_error is not None:
            raise queries.session.listener_error
        header, body = pending.end
        if header["status"] == "unprepared" or "loss" in header:  # The process that `prepare` ran in is lost.
            self.is_spent = True
        return decode_end(pending, header, body)

    def check_prepared(self, pending: PendingExecution) -> None:
        """Raise PrepareError if the preparation failed, and SandboxStartError if the sandbox was lost during it."""
        if pending.listener_error is not None:
            raise pending.listener_error
        if pending.refusal:
            raise PrepareError(f"prepare was ended: {pending.refusal}", stdout=pending.build_meta().stdout)
        if pending.end is None:
            reason = self.closed_reason
            raise SandboxStartError(f"sandbox {self.sandbox.id} was lost before prepare ended ({reason})")
        header, _ = pending.end
        if header["status"] != "finished":
            raise build_error(pending, pending.build_meta(), "prepare")

    def check_ready(self, is_sent: bool = False) -> None:
        """Close the connection and raise an error unless the driver is ready.

        Args:
            is_sent: True if an execution was sent together with the settings.

        Raises:
            SandboxStartError: The driver ended or did not answer in time.
            OutcomeUnknown: The driver did not answer, and the execution that was sent may have begun.
        """
        if self.is_ready:
            return
        self.close(f"it did not answer within {START_TIMEOUT_SECONDS:.0f} s")
        if is_sent and self.pending and self.sandbox.may_run_unheard():
            (pending,) = self.pending.values()
            raise self._make_unknown_error(pending)
        raise SandboxStartError(f"the driver did not start in sandbox {self.sandbox.id}: {self.closed_reason}")

    def _make_unknown_error(self, pending: PendingExecution) -> OutcomeUnknown:
        unknown = OutcomeUnknown(
            f"sandbox {self.sandbox.id} was lost before the code answered ({self.closed_reason}), and "
            f"what the code did is unknown. To run it again, set `idempotent`"
        )
        unknown.meta = pending.build_meta()
        return unknown

    def compute_answer_timeout(self, pending: PendingExecution) -> float | None:
        """Return the seconds after which a driver counts as lost if it has not reported the execution's end."""
        if pending.request.timeout is None:
            return None
        seconds = pending.request.timeout + self._compute_grace()
        if pending.collected is not None:
            seconds += COLLECT_TIMEOUT_SECONDS
        return seconds

    def close_at_silence(self, pending: PendingExecution) -> None:
        """Close the connection because the driver did not report the execution's timeout in time."""
        timeout = pending.request.timeout or 0
        self.close(f"it did not answer within {self._compute_grace():.0f} s after the timeout of {timeout:g} s")

    def _compute_grace(self) -> float:
        if self.sandbox.settings.commit:
            return ANSWER_GRACE_SECONDS + COMMIT_TIMEOUT_SECONDS
        return ANSWER_GRACE_SECONDS


def _read_output(body: bytes) -> Any:
    """Return the text in a body, or None if the body is not a text. Raise BadFrameError if it is too long."""
    if len(body) > MAX_OUTPUT_BODY_BYTES:
        raise BadFrameError(f"output of {len(body):,} bytes at once")
    if not body.startswith(b'"'):
        return None
    try:
        return loads(body.decode("utf-8"))
    except ValueError:
        return None


def _describe_unfinished(body: bytes) -> str:
    """Describe why the driver did not send all collected files; empty if it sent them all."""
    reason = _read_output(body)
    if reason == "":
        return ""
    return f"not all of its files were collected: {reason or 'its driver does not say why'}"


def encode_value(name: str, value: Any) -> bytes:
    """Encode the reply for a value that a tool returned: JSON, or an object that can become JSON, such as a table.

    The code gets a TypeError for another value.
    """
    try:
        return encode_fields({"value": value})
    except NotJsonError as error:
        problem = error
    except BaseException as error:  # noqa: BLE001 - such as a MemoryError, which the code handles
        return encode_exception(error)
    from .requests.object_values import convert_value

    try:
        return encode_fields({"value": convert_value(value)})
    except ConfigurationError as error:  # A table cannot become rows.
        problem = error
    except Exception:  # noqa: BLE001 - methods of the object may raise anything
        pass
    return encode_exception(TypeError(f"{name} returned no JSON: {problem}"))


def encode_exception(error: BaseException) -> bytes:
    """Encode the reply for an exception that a tool raised."""
    try:
        # `str` of a KeyError is the repr of its key. The driver raises a KeyError with this message as its key.
        is_key_error = type(error).__str__ is KeyError.__str__ and len(error.args) == 1
        text = str(error.args[0]) if is_key_error else str(error)
        message = text.encode("utf-8", "replace").decode("utf-8")
    except Exception:  # noqa: BLE001 - `str` of a user's exception can raise anything
        message = "(its message could not be read)"
    return encode_fields({"error": {"type": type(error).__name__, "message": message}})
