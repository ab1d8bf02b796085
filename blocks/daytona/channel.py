"""The connection to a driver in Daytona. Output arrives through a command's log, and API calls send the input."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import daytona

from ...sandbox.errors import SandboxLost
from ...sandbox.wire.frames import MAX_CALL_BYTES, BadFrameError, FrameReader, encode_frame
from ..retry import call_with_retries
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
TAKE_BYTES = 16 * 1024  # bytes of the log between two turns of the event loop; they can hold a thousand frames


class DaytonaChannel:
    """The connection to a driver that runs as a command of a session.

    After a lost connection the log starts again from its beginning. An input whose answer was lost is sent again.
    Host and driver ignore frames that they have already received.
    """

    def __init__(
        self,
        remote: daytona.AsyncSandbox,
        launch: Callable[[list[bytes]], Awaitable[tuple[str, str]]],
        receive: Callable[[bytes], None],
        closed: Callable[[str], None],
    ) -> None:
        self._remote = remote
        self._launch = launch  # function that starts the driver, and removes from its argument the frames that it sent
        self._command = ("", "")  # session and command id, set when the driver has started
        self._receive = receive
        self._closed = closed
        self._frames = FrameReader(MAX_CALL_BYTES)
        self._is_broken = False
        self._last_number = 0
        self._end_reason = ""
        self._queue: asyncio.Queue[tuple[bytes, asyncio.Future[None]]] = asyncio.Queue()
        self._body_number = 0
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
        frames = [data]
        if not self._tasks:
            frames = [encode_frame(header, body) for header, body in _split_frames(data)]
            try:
                self._command = await self._launch(frames)
            except StartLostError as error:
                self._end(str(error))
                if frames:
                    raise self._make_lost_error() from error
                return
            self._tasks = [asyncio.create_task(work()) for work in (self._follow, self._send_all, self._keep_awake)]
        queued = [(frame, asyncio.get_running_loop().create_future()) for frame in frames]
        for item in queued:
            self._queue.put_nowait(item)
        await asyncio.gather(*(done for _, done in queued))

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
            self._settle(self._queue.get_nowait()[1], is_delivered=False)

    def _settle(self, done: asyncio.Future[None], is_delivered: bool) -> None:
        """Complete the future of a frame. `is_delivered` is also True for a frame that may have arrived."""
        if done.done():
            return
        if is_delivered:
            done.set_result(None)
        else:
            done.set_exception(self._make_lost_error())

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
        finally:  # An event loop that ends cancels this task, and then waits for the senders.
            self._end("its connection was cancelled")

    async def _send_next(self) -> None:
        """Send the next frames as one input."""
        queued, is_delivered = [await self._queue.get()], False
        try:
            frames = [await self._shrink(queued[0][0])]
            while not self._queue.empty() and sum(map(len, frames)) < INPUT_LIMIT_BYTES:
                queued.append(self._queue.get_nowait())
                frames.append(await self._shrink(queued[-1][0]))
            is_delivered = True
            is_delivered = await self._send_input(b"".join(frames)[:-1].decode("utf-8"))  # The daemon appends "\n".
        except daytona.DaytonaError as error:
            self._end(f"it takes no input: {get_message(error)}")
        finally:
            for _, done in queued:
                self._settle(done, is_delivered)

    async def _send_input(self, text: str) -> bool:
        """Send an input. Send a lost one again, because the driver ignores frames that it already has.

        If it cannot be sent, close the channel. Return whether the driver may have the input.
        """
        give_up_at, is_refused = time.monotonic() + GIVE_UP_SECONDS, True

        def choose_delay(error: Exception, attempt: int) -> float | None:
            nonlocal is_refused
            is_refused = is_refused and get_status(error) in (400, 401, 403, 404, 410, 429)
            is_over = self._end_reason or time.monotonic() > give_up_at or not is_transient(error)
            return None if is_over else get_delay(error, attempt)

        process, (session, command) = self._remote.process, self._command
        try:
            await call_with_retries(
                lambda: process.send_session_command_input(session, command, text, CALL_SECONDS), choose_delay
            )
        except daytona.DaytonaError as error:
            if get_status(error) == 410:  # The log's end gives a better reason.
                await asyncio.wait(self._tasks[:1], timeout=LAST_WORDS_SECONDS)
            self._end(f"it takes no input: {get_message(error)}")
            return not is_refused
        return True

    async def _shrink(self, data: bytes) -> bytes:
        """Return a small frame unchanged. Upload the body of a large one and return a frame that names the file."""
        if len(data) <= INPUT_LIMIT_BYTES:
            return data
        ((header, body),) = _split_frames(data)
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
        """Receive the driver's output until its command ends or its log cannot be followed."""
        (session, command), process = self._command, self._remote.process
        attempt, last_number, last_progress = 0, 0, time.monotonic()
        while True:
            self._frames, self._is_broken = FrameReader(MAX_CALL_BYTES), False  # The log starts from its beginning.
            failure: Exception | None = None
            try:
                await process.get_session_command_logs_async(session, command, self._on_stdout, self._on_stderr)
            except daytona.DaytonaError as error:
                failure = error
                if isinstance(error.__cause__, BadFrameError):
                    return self._end(f"it sent invalid data ({error.__cause__})")
            if self._last_number > last_number:
                attempt, last_number, last_progress = 0, self._last_number, time.monotonic()
            try:
                state = await retry_call(
                    lambda: process.get_session_command(session, command, CALL_SECONDS), remote=self._remote
                )
                if state.exit_code is not None and failure is None:
                    self.is_complete = state.exit_code != LOST_RACE_STATUS
                    last_words = f": {self.stderr_tail.strip()}" if self.stderr_tail.strip() else ""
                    return self._end(f"its process has ended with status {state.exit_code}{last_words}")
            except daytona.DaytonaError as error:
                if not is_transient(error):
                    return self._end(f"Daytona says: {get_message(error)}")
                failure = error
            if time.monotonic() > last_progress + GIVE_UP_SECONDS:
                reason = get_message(failure) if failure else "it ends again and again"
                return self._end(f"its log cannot be followed: {reason}")
            await asyncio.sleep(get_delay(failure or Exception(), attempt) if attempt else 0.0)
            attempt += 1

    async def _on_stdout(self, text: str) -> None:
        # After an exception here, the SDK calls again with the rest of its buffer, which contains its stream markers.
        if self._is_broken:
            return
        self._is_broken = True
        data = text.encode("utf-8")
        for start in range(0, len(data), TAKE_BYTES):
            for header, body in self._frames.feed(data[start : start + TAKE_BYTES]):
                number, path = header.get("n"), header.pop("file", None)
                if type(number) is not int or (path is not None and type(path) is not str):
                    raise BadFrameError("a header without its fields")
                if number <= self._last_number:
                    continue
                if path is not None:
                    body = await self._fetch(path)
                self._last_number = number
                self._receive(encode_frame(header, body))
            await asyncio.sleep(0)
        self._is_broken = False

    async def _fetch(self, path: str) -> bytes:
        """Download a body that was too large for the log."""
        body = await retry_call(lambda: self._remote.fs.download_file(path, int(SETUP_SECONDS)), remote=self._remote)
        with suppress(daytona.DaytonaError):  # A call whose answer was lost may have deleted the file.
            await retry_call(lambda: self._remote.fs.delete_file(path, False, CALL_SECONDS))
        return body or b""

    async def _on_stderr(self, text: str) -> None:
        self.stderr_tail = (self.stderr_tail + text)[-2000:]


def _split_frames(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """Split the data into frames. The headers no longer have the body's length."""
    frames: list[tuple[dict[str, Any], bytes]] = []
    for header, body in FrameReader().feed(data):
        header.pop("body", None)
        frames.append((header, body or b""))
    return frames
