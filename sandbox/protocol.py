"""The host's end of the wire to one driver, without the reading and writing: frames in, frames out, outcomes.

`interpreter` reads and writes on an event loop, `pipe_transport` on a pair of descriptors.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .errors import CodeCrashed, ConfigurationError, OutcomeUnknown, PrepareError, SandboxLost, SandboxStartError
from .intake.collected_files import LOST, CollectedFiles
from .intake.large_json import Parts, read_json
from .intake.reports import Reports, ShouldPrune
from .meta import NOTHING_ASKED, Meta, QuerySummary
from .outcomes.decoding import decode_end
from .outcomes.preparation import check_preparation
from .outcomes.shown import decode_shown
from .requests.code_text import clean_code
from .result import Result
from .wire.collection import COLLECT_TIMEOUT_SECONDS
from .wire.displays import check_displays
from .wire.frames import MAX_CALL_BYTES, BadFrameError, FrameReader, encode_frame_parts
from .wire.names import COMMIT_TIMEOUT_SECONDS, MAX_REPORTED_FILES
from .wire.strict_json import NotJsonError, encode_fields, loads

if TYPE_CHECKING:
    from .driver_settings import Preparation
    from .intake.calls import Call, CallLimit
    from .sandbox_api import Sandbox

START_TIMEOUT_SECONDS = 60.0  # for the driver to answer in a sandbox that its provider calls started
STALL_SECONDS = (
    60.0  # in which a driver on this machine takes some of its input, unless it is frozen: it does nothing else
)
ANSWER_GRACE_SECONDS = 30.0  # beyond a timeout, after which a driver that has not reported it is taken for lost
SIGKILL = 9

# A driver hands on 64 KiB of output at a time, of which JSON may make six times that.
MAX_OUTPUT_BODY_BYTES = 512 * 1024

MAX_ARGUMENTS = 1_000  # of a call: Python binds them one by one, and holds the event loop meanwhile

NO_FILES = b"[]"  # as a driver names those that were written

Tools = Mapping[str, Callable[..., Any]]
Frame = tuple[dict[str, Any], bytes]


@dataclass(slots=True, eq=False)
class PendingExecution:
    """An execution that has been sent, with its output so far.

    `end` is its last frame, once it is there; `refusal` says what its code has overdone, upon which the host ends it.
    `queries` is what it has asked of a model, once that is known.
    """

    id: int
    sandbox: Sandbox
    variables: dict[str, Any]
    timeout: float | None
    context: str | None
    tools: Tools
    on_output: Callable[[str, str], None] | None
    output_fields: list[dict[str, str]] | None = None
    collected: CollectedFiles | None = None
    queries: QuerySummary = NOTHING_ASKED
    output: dict[str, list[str]] = field(default_factory=lambda: {"stdout": [], "stderr": []})
    files: bytes = NO_FILES
    value: bytes | None = None
    displays: list[bytes] = field(default_factory=list[bytes])
    end: Frame | None = None
    refusal: str = ""
    reports: Reports = field(default_factory=Reports)
    listener_error: Exception | None = None
    caller_context: contextvars.Context = field(default_factory=contextvars.copy_context)  # that its tools see
    _output_sizes: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})  # in characters
    _display_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Whether its driver has said all of it: its end, and where it brings files home those."""
        if self.end is None:
            return False
        return self.collected is None or self.collected.has_ended or self.end[0].get("collects") is not True

    def end_collection(self) -> None:
        """Takes no more of its files, of which not all have come where it is not over."""
        if self.collected is not None:
            self.collected.end("" if self.is_over else LOST)

    @property
    def has_shown(self) -> bool:
        """Whether the code has shown anything beside its output."""
        return self.value is not None or bool(self.displays)

    def add_output(self, stream: str, text: str, dropped: int) -> None:
        """Notes what the code has written, and hands it to the listener; one that fails is not called again.

        What is more than its driver would hand on is passed over: it is not our driver any more.
        """
        text = text[: max(0, self.sandbox.settings.output_cap - self._output_sizes[stream])]
        if not text:
            return
        self._output_sizes[stream] += len(text)
        if dropped:
            text = f"\n[... {dropped:,} characters dropped ...]\n{text}"
        self.output[stream].append(text)
        if self.on_output is not None:
            try:
                self.on_output(stream, text)
            except Exception as error:  # noqa: BLE001 - it is raised where the execution was asked for
                self.on_output, self.listener_error = None, error

    def add_display(self, body: bytes) -> None:
        """Notes what the code has displayed. Raises BadFrameError for more than its driver would hand on."""
        self._display_bytes += len(body)
        check_displays(len(self.displays) + 1, self._display_bytes)
        self.displays.append(body)

    def build_meta(self, **more: Any) -> Meta:
        """The meta, with the output that has come; `more` are fields that its end tells. Made once: it is not cheap."""
        sandbox = self.sandbox
        if self.collected is not None:
            more |= {"collected": tuple(self.collected.paths), "not_collected": tuple(self.collected.problems)}
        return Meta(
            variables=self.variables,
            provider=sandbox.provider,
            sandbox_id=sandbox.id,
            isolation=sandbox.isolation,
            layers=sandbox.layers,
            stdout="".join(self.output["stdout"]),
            stderr="".join(self.output["stderr"]),
            queries=self.queries,
            reports=tuple(self.reports.values.items()),
            pruned=self.reports.is_pruned,
            **more,
        )

    def bind_tool(self, call: Call, limit: CallLimit) -> Parts[Callable[[], Any]]:
        """The tool that the code calls, with its arguments. The code may have written them: any error is possible."""
        arguments = yield from read_json(call.take_body())
        limit.measure(call, arguments)
        args: list[Any] = arguments["args"]
        kwargs: dict[str, Any] = arguments["kwargs"]
        if type(args) is not list or type(kwargs) is not dict:
            raise ValueError("a call without arguments")
        if len(args) > MAX_ARGUMENTS or len(kwargs) > MAX_ARGUMENTS:
            raise ValueError(f"a call with more than {MAX_ARGUMENTS:,} arguments: pass them in a list")
        return functools.partial(self.tools[call.header["name"]], *args, **kwargs)


class DriverProtocol:
    """The state of one driver's wire: numbers for what is sent, executions for what comes back.

    `closed_reason` is why nothing more can be sent, empty for as long as it can. `preparation` is the code that runs
    before the first execution, as if it were one, None where there is none.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.preparation: PendingExecution | None = None
        self.pending: dict[int, PendingExecution] = {}
        self.is_ready = False
        self.closed_reason = ""
        self.is_spent = False  # what runs goes on, and nothing else can be begun
        self._frames = FrameReader(MAX_CALL_BYTES)
        self._execution_numbers = itertools.count(1)
        self._frame_numbers = itertools.count(0)
        self._last_number = 0  # of the driver's frames

    def close(self, reason: str) -> None:
        """Notes why nothing more can be sent; the first reason stays."""
        self.closed_reason = self.closed_reason or reason

    def close_at_hangup(self) -> None:
        """Closes, because the driver has ended its wire."""
        stderr = self.sandbox.read_stderr_tail()
        self.close(f"its process has ended: {stderr}" if stderr else "its process has ended")

    # -- to the driver

    def encode(self, header: dict[str, Any], body: bytes | None = None) -> bytes:
        """A frame's bytes, with the number that makes a repetition known. They must be sent in this order."""
        return b"".join(self._encode_in_parts(header, body))

    def _encode_in_parts(self, header: dict[str, Any], body: bytes | list[bytes] | None = None) -> list[bytes]:
        header["n"] = next(self._frame_numbers)
        return encode_frame_parts(header, body)

    def encode_start(self) -> bytes:
        """The first frame: the settings of the sandbox's driver."""
        settings = self.sandbox.settings
        body = {item.name: getattr(settings, item.name) for item in fields(settings)}
        return self.encode({"op": "start", "id": 0}, encode_fields(body))

    def add_preparation(
        self, preparation: Preparation, on_output: Callable[[str, str], None] | None = None
    ) -> tuple[PendingExecution, bytes]:
        """The code that runs before the first execution, and its frame."""
        self.sandbox.expect_execution(is_preparation=True)
        pending = self.preparation = self._add_pending({}, preparation.timeout, None, {}, on_output)
        body = encode_fields({"code": clean_code(preparation.code)})
        return pending, self.encode({"op": "prepare", "id": pending.id, "timeout": pending.timeout}, body)

    def add_execution(
        self,
        body: list[bytes],
        variables: dict[str, Any],
        timeout: float | None,
        context: str | None,
        tools: Tools,
        on_output: Callable[[str, str], None] | None = None,
        output_fields: list[dict[str, str]] | None = None,
        should_prune: ShouldPrune | None = None,
        collected: CollectedFiles | None = None,
    ) -> tuple[PendingExecution, list[bytes]]:
        """An execution, and its frame in parts. Raises SandboxLost where nothing more can be sent."""
        if self.closed_reason:
            raise SandboxLost(
                f"the sandbox had gone before the code was sent ({self.closed_reason}): run it in a new one"
            )
        self.sandbox.expect_execution()
        reports = Reports(should_prune)
        tools = {"report": reports.add, **tools}
        pending = self._add_pending(variables, timeout, context, tools, on_output, output_fields)
        pending.reports, pending.collected = reports, collected
        header: dict[str, Any] = {"op": "execute", "id": pending.id, "timeout": timeout, "context": context}
        if collected is not None:
            collected.limit_bytes(self.sandbox.disk_mib)
            header["collect"], header["collect_bytes"] = collected.patterns, collected.max_bytes
        return pending, self._encode_in_parts(header, body)

    def _add_pending(
        self,
        variables: dict[str, Any],
        timeout: float | None,
        context: str | None,
        tools: Tools,
        on_output: Callable[[str, str], None] | None,
        output_fields: list[dict[str, str]] | None = None,
    ) -> PendingExecution:
        number = next(self._execution_numbers)
        pending = self.pending[number] = PendingExecution(
            number, self.sandbox, variables, timeout, context, tools, on_output, output_fields
        )
        return pending

    def encode_cancel(self, pending: PendingExecution) -> bytes:
        """The frame that ends an execution."""
        return self.encode({"op": "cancel", "id": pending.id})

    def encode_forget(self, context: str) -> bytes:
        """The frame that ends a context, whose name begins anew with the next execution."""
        return self.encode({"op": "forget", "id": 0, "context": context})

    def encode_reply(self, call: Call, body: bytes) -> bytes:
        """The frame that answers a call of the code's."""
        return self.encode({"op": "reply", "id": call.header["id"], "call": call.header["call"]}, body)

    # -- from the driver

    def receive(self, data: bytes) -> list[tuple[PendingExecution, Frame]]:
        """Takes the driver's bytes; returns the calls and ends in them. Bytes that are no frame close the wire.

        Of a wire that is closed nothing is taken. Bodies are not read here, but for those of output, which are short.
        """
        events: list[tuple[PendingExecution, Frame]] = []
        if self.closed_reason:
            return events
        try:
            for header, body in self._frames.feed(data):
                self._take_frame(header, body, events)
        except BadFrameError as error:
            self.close(f"it sent what is no frame ({error})")
        return events

    def _take_frame(
        self, header: dict[str, Any], body: bytes | None, events: list[tuple[PendingExecution, Frame]]
    ) -> None:
        op, number, frame_number = header.get("op"), header.get("id"), header.get("n")
        if type(op) is not str or type(number) is not int or type(frame_number) is not int:
            raise BadFrameError("a header without its fields")
        if frame_number <= self._last_number:
            return
        self._last_number = frame_number
        if op == "ready":
            self.is_ready = True
            return
        pending = self.pending.get(number)
        if pending is None:
            return  # a beat, or of an execution that nobody waits for any more
        if op == "output":
            stream, dropped, text = header.get("stream"), header.get("dropped"), _read_output(body or b'""')
            if stream not in ("stdout", "stderr") or type(dropped) is not int or type(text) is not str:
                raise BadFrameError("output that is no text")
            pending.add_output(stream, text, dropped)
        elif op == "files":
            pending.files = body or NO_FILES
        elif op == "value":
            pending.value = body
        elif op == "display":
            pending.add_display(body or b"")
        elif op == "end" and type(header.get("status")) is str:
            pending.end = (header, body or b"null")
            self._end_when_over(pending, pending.end, events)
        elif op == "collect" and pending.collected is not None:
            pending.collected.take(body or b"")
        elif op == "collected" and pending.collected is not None:
            pending.collected.end(_describe_unfinished(body or b'""'))
            if pending.end is not None:
                self._end_when_over(pending, pending.end, events)
        elif op == "call" and type(header.get("call")) is int and type(header.get("name")) is str:
            events.append((pending, (header, body or b"null")))
        else:
            raise BadFrameError(f"a frame of kind {op[:80]!r} that is none of a driver's")

    def _end_when_over(
        self, pending: PendingExecution, end: Frame, events: list[tuple[PendingExecution, Frame]]
    ) -> None:
        if pending.is_over:
            del self.pending[pending.id]
            events.append((pending, end))

    def take_result(self, pending: PendingExecution) -> Parts[Result]:
        """The result of an execution that nobody waits for any longer. Raises its error, with `meta`.

        OutcomeUnknown where the driver has not answered.
        """
        self.pending.pop(pending.id, None)  # where it is there yet: nothing more is taken of it
        pending.end_collection()
        if pending.refusal:
            meta = pending.build_meta()
            refused = CodeCrashed(pending.refusal, stdout=meta.stdout)
            refused.meta = meta
            raise refused
        if pending.end is None:
            raise self._make_unknown_error(pending)
        if pending.listener_error is not None:
            raise pending.listener_error
        header, body = self._note_limit(pending.end)
        if header["status"] == "unprepared" or "loss" in header:  # contexts that there are go on
            self.is_spent = True
        files = () if pending.files == NO_FILES else (yield from _read_file_names(pending.files))
        shown = (yield from decode_shown(pending.value, pending.displays)) if pending.has_shown else {}
        build_meta = functools.partial(pending.build_meta, files=files, **shown)
        output_fields = None if pending.reports.is_pruned else pending.output_fields
        result = yield from decode_end(header, body, build_meta, pending.timeout, output_fields)
        if result.meta.pruned and not result.outputs:
            result.meta = replace(result.meta, submitted=False)
        return result

    def check_prepared(self) -> Parts[None]:
        """Raises PrepareError where the preparation failed, and SandboxStartError where the driver has not said so."""
        pending = self.preparation
        if pending is None:
            return
        if pending.listener_error is not None:
            raise pending.listener_error
        if pending.refusal:
            raise PrepareError(f"prepare was ended: {pending.refusal}", stdout=pending.build_meta().stdout)
        if pending.end is None:
            reason = self.closed_reason
            raise SandboxStartError(f"sandbox {self.sandbox.id} went away before prepare had ended ({reason})")
        header, body = self._note_limit(pending.end)
        yield from check_preparation(header, body, pending.build_meta(), pending.timeout)

    def _note_limit(self, end: Frame) -> Frame:
        """An execution's end, with the sandbox's limit that it was killed for if so, and the option for more memory."""
        header, body = end
        if header["status"] != "crashed":
            return {**header, "memory_option": self.sandbox.memory_option, "limits": self.sandbox.limits}, body
        limit = self.sandbox.find_exceeded_limit() if header.get("signal") == SIGKILL else ""
        if limit == "disk_mib":  # its files are still there, and whoever comes next would be killed
            self.close("its files took more than its disk_mib")
        memory_option = self.sandbox.kill_memory_option
        return {**header, "limit": limit, "memory_option": memory_option, "limits": self.sandbox.limits}, body

    def check_ready(self, is_sent: bool = False) -> None:
        """Raises SandboxStartError for a driver that has ended, or not answered in time, before it was ready.

        OutcomeUnknown where it was sent an execution, and may have begun that.
        """
        if self.is_ready:
            return
        self.close(f"it did not answer within {START_TIMEOUT_SECONDS:.0f} s")
        if is_sent and self.pending and self.sandbox.may_run_unheard():
            raise self._make_unknown_error(next(iter(self.pending.values())))
        raise SandboxStartError(f"the driver did not start in sandbox {self.sandbox.id}: {self.closed_reason}")

    def _make_unknown_error(self, pending: PendingExecution) -> OutcomeUnknown:
        unknown = OutcomeUnknown(
            f"sandbox {self.sandbox.id} went away before the code had answered ({self.closed_reason}); what the "
            "code did is unknown. Pass idempotent=True if it may run twice"
        )
        unknown.meta = pending.build_meta()
        return unknown

    def compute_answer_timeout(self, pending: PendingExecution) -> float | None:
        """Seconds after which a driver that has not reported an execution's end is taken for lost."""
        if pending.timeout is None:
            return None
        collecting = 0.0 if pending.collected is None else COLLECT_TIMEOUT_SECONDS
        return pending.timeout + self._compute_grace() + collecting

    def close_at_silence(self, pending: PendingExecution) -> None:
        """Closes, because an execution has outlived its timeout by far."""
        self.close(f"it has not answered {self._compute_grace():.0f} s after the timeout of {pending.timeout or 0:g} s")

    def _compute_grace(self) -> float:
        return ANSWER_GRACE_SECONDS + (COMMIT_TIMEOUT_SECONDS if self.sandbox.settings.commit else 0.0)


def _read_output(body: bytes) -> Any:
    if len(body) > MAX_OUTPUT_BODY_BYTES:
        raise BadFrameError(f"output of {len(body):,} bytes at once")
    try:
        return loads(body.decode("utf-8")) if body.startswith(b'"') else None
    except ValueError:
        return None


def _describe_unfinished(body: bytes) -> str:
    """Why not all files of an execution have come, as its driver says; empty where they have."""
    reason = _read_output(body)
    if reason == "":
        return ""
    return (
        f"not all of its files were collected: {reason if isinstance(reason, str) else 'its driver does not say why'}"
    )


def _read_file_names(body: bytes) -> Parts[tuple[str, ...]]:
    """Names of files; the code may have written them, and anything else is none."""
    try:
        value = yield from read_json(body)
    except (ValueError, RecursionError):
        return ()
    names: list[Any] = value if isinstance(value, list) else []  # type: ignore[reportUnknownVariableType]
    return tuple(name for name in names[:MAX_REPORTED_FILES] if isinstance(name, str))


def resolve_timeout(timeout: float | None, default: float | None) -> float | None:
    """The timeout that is in force, in seconds; None is none. Raises ConfigurationError."""
    seconds = default if timeout is None else timeout
    if seconds == math.inf:
        return None
    if seconds is not None and not seconds > 0:
        raise ConfigurationError(f"timeout is {seconds!r}: it is a number of seconds above zero, or None for no limit")
    return seconds


def encode_value(name: str, value: Any) -> bytes:
    """A reply's body for what a tool returned."""
    try:
        return encode_fields({"value": value})
    except NotJsonError as error:
        return encode_fields({"error": {"type": "TypeError", "message": f"{name} returned no JSON: {error}"}})


def encode_exception(error: BaseException) -> bytes:
    """A reply's body for what a tool raised."""
    try:
        # A KeyError's text is the repr of its key, and the code is raised a KeyError with this for its key.
        text = str(error.args[0] if type(error).__str__ is KeyError.__str__ and len(error.args) == 1 else error)
        message = text.encode("utf-8", "replace").decode("utf-8")
    except Exception:  # noqa: BLE001 - an exception may do anything when it is asked for its text
        message = "(its message could not be read)"
    return encode_fields({"error": {"type": type(error).__name__, "message": message}})
