"""The connection to a driver in Daytona. Output arrives through a command's log, and API calls send the input."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import daytona

from ...sandbox.errors import SandboxLost
from ...sandbox.wire.frames import MAX_CALL_BYTES, BadFrameError, FrameReader, encode_frame
from .errors import (
    CALL_SECONDS,
    GIVE_UP_SECONDS,
    SETUP_SECONDS,
    get_delay,
    get_message,
    get_status,
    is_transient,
    retry_call,
)
from .launch import INPUT_LIMIT_BYTES, LOST_RACE_STATUS, StartLostError, name_folder

IDLE_MINUTES = 5  # minutes without a call before Daytona ends a sandbox, such as that of a dead host
KEEP_AWAKE_SECONDS = IDLE_MINUTES * 60 / 3  # seconds between calls that keep a used sandbox awake
LAST_WORDS_SECONDS = 5.0  # seconds for a log to end, which happens a second or more after its command ended
TAKE_BYTES = 16 * 1024  # bytes of the log that are read before other tasks run; they can hold a thousand frames
STDERR_CHARACTERS = 2000
# Statuses of an input's refusal after which the driver cannot have the input
REFUSED_STATUSES = (400, 401, 403, 404, 410, 429)


class DaytonaChannel:
    """The connection to a driver that runs as a command of a session.

    The driver's frames arrive as the command's log. After a lost connection the log starts again from its beginning,
    and an input whose answer was lost is sent again. Host and driver ignore frames that they have already received.
    """

    def __init__(
        self,
        remote: daytona.AsyncSandbox,
        launch: Callable[[list[bytes]], Awaitable[tuple[str, str]]],
        receive: Callable[[bytes], None],
        closed: Callable[[str], None],
    ) -> None:
        self._remote = remote
        self._launch = launch  # function that starts the driver, and removes the frames that it sent from its argument
        self._command = ("", "")  # session and command id, set when the driver has started
        self._receive = receive
        self._closed = closed
        self._frames = FrameReader(MAX_CALL_BYTES)
        self._ignores_log = False  # True after an invalid frame, until the log starts again
        self._last_number = 0  # number of the last frame that was received
        self._end_reason = ""
        self._queue: asyncio.Queue[tuple[bytes, asyncio.Future[None]]] = asyncio.Queue()
        self._body_number = 0  # number of the last body that was uploaded as a file
        self.stderr_tail = ""
        self.is_complete = False  # True if the driver has ended and its whole output was received
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, data: bytes) -> None:
        """Send the bytes, after those of earlier sends. The first frames start the driver.

        If the driver may have received the bytes but can no longer be heard, close the channel without an error.

        Raises:
            SandboxLost: The driver did not receive the bytes.
            SandboxStartError: The driver did not start.
        """
        if self._end_reason:
            raise self._make_lost_error()
        frames = [data] if self._tasks else await self._start(data)
        deliveries: list[asyncio.Future[None]] = []
        for frame in frames:
            delivery = asyncio.get_running_loop().create_future()
            self._queue.put_nowait((frame, delivery))
            deliveries.append(delivery)
        await asyncio.gather(*deliveries)

    async def _start(self, data: bytes) -> list[bytes]:
        """Start the driver with the first frames, and return the frames that are still to be sent."""
        frames = [encode_frame(header, body) for header, body in _split_frames(data)]
        try:
            self._command = await self._launch(frames)
        except StartLostError as error:
            self._end(str(error))
            if frames:  # These frames were not part of the start, so the driver cannot have them.
                raise self._make_lost_error() from error
            return []
        self._tasks = [asyncio.create_task(work()) for work in (self._follow, self._send_all, self._keep_awake)]
        return frames

    async def close(self) -> None:
        """Stop following the log and sending."""
        self._end_reason = self._end_reason or "it was shut down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end(self._end_reason)

    def _end(self, reason: str) -> None:
        """Close the channel, if it is open, and fail the sends whose frames are in the queue."""
        if not self._end_reason:
            self._end_reason = reason
            self._closed(reason)
        while not self._queue.empty():
            _, delivery = self._queue.get_nowait()
            self._settle(delivery, may_have_arrived=False)

    def _settle(self, delivery: asyncio.Future[None], may_have_arrived: bool) -> None:
        """Complete the delivery of a frame, with SandboxLost if the frame cannot have arrived."""
        if delivery.done():
            return
        if may_have_arrived:
            delivery.set_result(None)
        else:
            delivery.set_exception(self._make_lost_error())

    def _make_lost_error(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self._remote.id} was lost ({self._end_reason}): run the code in a new one")

    async def _keep_awake(self) -> None:
        """Tell Daytona regularly that the sandbox is in use, because code may wait longer than the idle limit."""
        while True:
            await asyncio.sleep(KEEP_AWAKE_SECONDS)
            with suppress(daytona.DaytonaError):
                await retry_call(lambda: self._remote.refresh_activity(CALL_SECONDS))

    # -- to the driver

    async def _send_all(self) -> None:
        try:
            while not self._end_reason:
                await self._send_next()
        finally:
            # If the event loop's end cancels this task, the queued sends must fail: the loop waits for them. An earlier
            # reason stays.
            self._end("its connection was cancelled")

    async def _send_next(self) -> None:
        """Send the next frames as one input."""
        frame, delivery = await self._queue.get()
        deliveries = [delivery]
        may_have_arrived = False
        try:
            data = await self._shrink(frame)
            while not self._queue.empty() and len(data) < INPUT_LIMIT_BYTES:
                frame, delivery = self._queue.get_nowait()
                deliveries.append(delivery)
                data += await self._shrink(frame)
            may_have_arrived = True  # This counts if the next call is cancelled.
            may_have_arrived = await self._send_input(data.removesuffix(b"\n").decode("utf-8"))
        except daytona.DaytonaError as error:
            self._end(f"it takes no input: {get_message(error)}")
        finally:
            for delivery in deliveries:
                self._settle(delivery, may_have_arrived)

    async def _send_input(self, text: str) -> bool:
        """Send an input, to which the daemon appends a newline. Return True if the driver may have it.

        A lost input is sent again, because the driver ignores frames that it already has. If no attempt succeeds, close
        the channel.
        """
        session, command = self._command
        give_up_at = time.monotonic() + GIVE_UP_SECONDS
        may_have_arrived = False
        attempt = 0
        while True:
            try:
                await self._remote.process.send_session_command_input(session, command, text, CALL_SECONDS)
                return True
            except daytona.DaytonaError as error:
                status = get_status(error)
                if status not in REFUSED_STATUSES:
                    may_have_arrived = True
                if self._end_reason or time.monotonic() > give_up_at or not is_transient(error):
                    if status == 410:  # The log's end gives a better reason.
                        await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_SECONDS)
                    self._end(f"it takes no input: {get_message(error)}")
                    return may_have_arrived
                delay = get_delay(error, attempt)
            await asyncio.sleep(delay)
            attempt += 1

    async def _shrink(self, data: bytes) -> bytes:
        """Return a small frame as it is. Upload the body of a large one, and return a frame with its file's path."""
        if len(data) <= INPUT_LIMIT_BYTES:
            return data
        header, body = _split_frames(data)[0]
        self._body_number += 1
        # The file is next to the driver's folder: an upload creates parent folders, and that folder's existence marks a
        # driver as started.
        header["file"] = f"{name_folder(self._remote.id)}.in.{self._body_number}"
        await retry_call(
            lambda: self._remote.fs.upload_file(body, header["file"], int(SETUP_SECONDS)), remote=self._remote
        )
        return encode_frame(header)

    # -- from the driver

    async def _follow(self) -> None:
        """Read the driver's log, again and again, until its command has ended or its log cannot be read."""
        process = self._remote.process
        session, command = self._command
        last_number = 0
        last_progress = time.monotonic()
        attempt = 0
        while True:
            try:
                failure = await self._read_log()
            except BadFrameError as error:
                return self._end(f"it sent invalid data ({error})")
            if self._last_number > last_number:  # The driver has been heard since the last round.
                last_number = self._last_number
                last_progress = time.monotonic()
                attempt = 0
            try:
                state = await retry_call(
                    lambda: process.get_session_command(session, command, CALL_SECONDS), remote=self._remote
                )
            except daytona.DaytonaError as error:
                if not is_transient(error):
                    return self._end(f"Daytona says: {get_message(error)}")
                failure = error
            else:
                if state.exit_code is not None and failure is None:
                    return self._end_with_process(state.exit_code)
            if time.monotonic() > last_progress + GIVE_UP_SECONDS:
                reason = "it ends again and again" if failure is None else get_message(failure)
                return self._end(f"its log cannot be followed: {reason}")
            if attempt > 0:
                await asyncio.sleep(get_delay(failure or Exception(), attempt))
            attempt += 1

    async def _read_log(self) -> daytona.DaytonaError | None:
        """Read the log from its beginning to its end. Return the error that interrupts it. Raise BadFrameError."""
        self._frames = FrameReader(MAX_CALL_BYTES)
        self._ignores_log = False
        try:
            await self._remote.process.get_session_command_logs_async(*self._command, self._on_stdout, self._on_stderr)
        except daytona.DaytonaError as error:
            if isinstance(error.__cause__, BadFrameError):
                raise error.__cause__ from None
            return error
        return None

    def _end_with_process(self, status: int) -> None:
        """Close the channel after the end of the driver, whose whole log was read."""
        self.is_complete = status != LOST_RACE_STATUS
        last_words = self.stderr_tail.strip()
        reason = f"its process has ended with status {status}"
        self._end(f"{reason}: {last_words}" if last_words else reason)

    async def _on_stdout(self, text: str) -> None:
        # After an exception here, the SDK calls again with the rest of its buffer, which contains its stream markers.
        if self._ignores_log:
            return
        self._ignores_log = True
        data = text.encode("utf-8")
        for start in range(0, len(data), TAKE_BYTES):
            for header, body in self._frames.feed(data[start : start + TAKE_BYTES]):
                await self._receive_frame(header, body)
            await asyncio.sleep(0)
        self._ignores_log = False

    async def _receive_frame(self, header: dict[str, Any], body: bytes | None) -> None:
        """Pass on a frame of the driver, unless it was already received. Raise BadFrameError or DaytonaError."""
        number = header.get("n")
        path = header.pop("file", None)  # the file of a body that is too large for the log
        if type(number) is not int or not isinstance(path, str | None):
            raise BadFrameError("a header without its fields")
        if number <= self._last_number:
            return
        if path is not None:
            body = await self._download_body(path)
        self._last_number = number
        self._receive(encode_frame(header, body))

    async def _download_body(self, path: str) -> bytes:
        """Download a frame's body, and delete its file."""
        body = await retry_call(lambda: self._remote.fs.download_file(path, int(SETUP_SECONDS)), remote=self._remote)
        with suppress(daytona.DaytonaError):  # A call whose answer was lost may have deleted the file.
            await retry_call(lambda: self._remote.fs.delete_file(path, False, CALL_SECONDS))
        return body or b""

    async def _on_stderr(self, text: str) -> None:
        self.stderr_tail = (self.stderr_tail + text)[-STDERR_CHARACTERS:]


def _split_frames(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Split the data into frames. The headers no longer have the body's length."""
    frames: list[tuple[dict[str, Any], bytes]] = []
    for header, body in FrameReader().feed(data):
        header.pop("body", None)
        frames.append((header, body or b""))
    return frames
