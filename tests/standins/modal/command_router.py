"""The command router: commands in sandboxes, their streams, and their volumes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Stream
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from .calls import refuse_unmodelled_calls, unary
from .sandboxes import PIECE, Box, Command
from .standin import Standin


@refuse_unmodelled_calls(TaskCommandRouterBase)
class CommandRouter(TaskCommandRouterBase):
    """The calls at the address that the client got with a sandbox."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin

    def authorize(self, metadata: Any, _request: Any) -> None:
        if not metadata.get("authorization"):
            raise GRPCError(Status.UNAUTHENTICATED, "the token is missing")

    def _command(self, request: Any) -> tuple[Box, Command]:
        box = self.standin.of_task(request.task_id)
        if request.exec_id not in box.commands:
            raise GRPCError(Status.NOT_FOUND, f"Exec {request.exec_id} not found")
        return box, box.commands[request.exec_id]

    @unary
    async def TaskExecStart(self, request: Any) -> Any:
        box = self.standin.of_task(request.task_id)
        await asyncio.sleep(max(0.0, box.ready_at - time.monotonic()))
        await self.standin.once(
            f"exec {request.exec_id}",
            lambda: self.standin.launcher.start(box, self.standin.images[box.image]["packages"], request),
        )
        return router_pb2.TaskExecStartResponse()

    @unary
    async def TaskExecWait(self, request: Any) -> Any:
        _, command = self._command(request)
        await command.ended.wait()
        assert command.status is not None
        kind = router_pb2.TaskExecWaitResponse
        return kind(code=command.status) if command.status >= 0 else kind(signal=-command.status)

    async def TaskExecStdioRead(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        after = await self.standin.faults.before("TaskExecStdioRead", stream)
        self.authorize(stream.metadata, request)
        box, command = self._command(request)
        standard_error = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        output, at = command.outputs[2 if standard_error else 1], request.offset
        self.standin.streams.add(stream)
        try:
            while True:
                changed = output.changed
                if at < len(output.data):
                    data = bytes(output.data[at : at + PIECE])
                    await stream.send_message(router_pb2.TaskExecStdioReadResponse(data=data))
                    at += len(data)
                    if after is not None:
                        self.standin.faults.strike(after, stream)
                elif output.ended:
                    if box.ending and standard_error is False:
                        raise GRPCError(Status.NOT_FOUND, "the sandbox has ended")
                    return
                else:
                    await changed.wait()
        finally:
            self.standin.streams.discard(stream)

    async def _feed(self, command: Command, offset: int, data: bytes, eof: bool) -> None:
        async with command.writing:
            if offset > command.written:
                raise GRPCError(Status.FAILED_PRECONDITION, f"offset {offset}, and {command.written} were written")
            fresh = data[command.written - offset :]
            writer = command.stdin
            assert writer is not None
            if command.ended.is_set():
                raise GRPCError(Status.FAILED_PRECONDITION, "the process has ended")
            try:
                if fresh:
                    command.written += len(fresh)
                    writer.write(fresh)
                    await writer.drain()
                if eof and not writer.is_closing():
                    writer.close()
            except (ConnectionError, BrokenPipeError):
                raise GRPCError(Status.FAILED_PRECONDITION, "the process has closed its input") from None

    @unary
    async def TaskExecStdinWrite(self, request: Any) -> Any:
        _, command = self._command(request)
        await asyncio.shield(self._feed(command, request.offset, request.data, request.eof))
        return router_pb2.TaskExecStdinWriteResponse()

    @unary
    async def TaskExecStdinStatus(self, request: Any) -> Any:
        _, command = self._command(request)
        writer = command.stdin
        closed = writer is None or writer.is_closing()
        return router_pb2.TaskExecStdinStatusResponse(num_bytes_written=command.written, closed=closed)

    async def TaskExecStdinWriteStream(self, stream: Stream[Any, Any]) -> None:
        first = await stream.recv_message()
        assert first is not None
        assert stream.metadata is not None
        after = await self.standin.faults.before("TaskExecStdinWriteStream", stream)
        self.authorize(stream.metadata, first.start)
        _, command = self._command(first.start)
        offset = first.start.offset
        while (message := await stream.recv_message()) is not None:
            last = message.WhichOneof("payload") == "end" if "payload" in message.DESCRIPTOR.oneofs_by_name else False
            last = last or message.HasField("end")
            await self._feed(command, offset, message.data, last)
            offset += len(message.data)
            if last:
                break
        if after is not None:
            self.standin.faults.strike(after, stream)
        await stream.send_message(router_pb2.TaskExecStdinWriteStreamResponse())

    @unary
    async def TaskReloadVolumes(self, request: Any) -> Any:
        box = self.standin.of_task(request.task_id)
        for mount in box.mounts:
            busy = await asyncio.to_thread(open_below, mount.folder)
            if busy:
                raise GRPCError(
                    Status.FAILED_PRECONDITION, f"there are open files preventing the operation: {', '.join(busy)}"
                )
            await asyncio.to_thread(mount.reload)
            self.standin.events.append({"cause": "reload", "sandbox": box.id, "volume": mount.volume.name, "files": []})
        return router_pb2.TaskReloadVolumesResponse()


def open_below(folder: Path) -> list[str]:
    """List open files below a directory."""
    # A descriptor's link names the path in the process's own mount namespace, so compare device and inode instead.
    inside = {(stat.st_dev, stat.st_ino): path.name for path in folder.rglob("*") if (stat := path.lstat())}
    names: list[str] = []
    for link in Path("/proc").glob("[0-9]*/fd/*") if inside else ():
        with contextlib.suppress(OSError):
            stat = link.stat()
            if (stat.st_dev, stat.st_ino) in inside:
                names.append(inside[stat.st_dev, stat.st_ino])
    return names
