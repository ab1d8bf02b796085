"""Subprocesses that run until they exit, with bounded output."""

import asyncio
import os
import subprocess

MAX_OUTPUT_BYTES = 16 << 20  # kept of each stream, because a program may write without limit


async def run_command(
    *command: str,
    timeout: float | None = None,
    environment: dict[str, str] | None = None,
    merge_stderr: bool = False,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its exit status and output. Kill it if this call times out or is cancelled.

    `timeout` is in seconds; then the call raises TimeoutError.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if merge_stderr else asyncio.subprocess.PIPE,
        env=environment,
        cwd=cwd,
        start_new_session=True,  # Only the flow handles Ctrl-C in the terminal.
    )
    try:
        async with asyncio.timeout(timeout):
            output = await asyncio.gather(_read_tail(process.stdout), _read_tail(process.stderr))
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    stdout, stderr = (data.decode("utf-8", "replace") for data in output)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


async def _read_tail(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream until it ends, and return its last `MAX_OUTPUT_BYTES`."""
    data = bytearray()
    if stream is None:
        return b""
    while piece := await stream.read(1 << 16):
        data += piece
        if len(data) > 2 * MAX_OUTPUT_BYTES:
            del data[:-MAX_OUTPUT_BYTES]
    return bytes(data[-MAX_OUTPUT_BYTES:])
