"""A shell in a local sandbox, in the terminal of this process.

The shell runs on a pseudo-terminal of its own: code that could reach this process's terminal could type into it.
"""

import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from dataclasses import asdict

from ...sandbox.caller import name_parameter
from ...sandbox.cancellation import run_shielded
from ...sandbox.driver_bundle import TERMINAL_MODULES, build_driver_code
from ...sandbox.errors import SandboxLost, SandboxStartError
from ...sandbox.wire.pipes import READ_BYTES
from ..host_terminal import build_shell_command, get_terminal_size, relay_terminal
from .deletion import kill_processes
from .handle import LocalSandboxHandle
from .launch.driver_process import START_ENVIRONMENT
from .watcher import watch


async def run_terminal(handle: LocalSandboxHandle, until: float) -> int:
    """Run a shell in a sandbox without a driver, at most until then, in epoch seconds, and return its exit status.

    Raises SandboxStartError, or SandboxLost if the shell was killed from outside.
    """
    settings = asdict(handle.settings)
    settings["environment"]["TERM"] = os.environ.get("TERM", "dumb")
    command = build_shell_command(handle.settings.cwd)
    request = json.dumps({"settings": settings, "command": command}).encode()
    ours, its = pty.openpty()
    try:
        os.set_blocking(ours, False)
        _resize(ours, *get_terminal_size())
        try:
            process = await asyncio.create_subprocess_exec(
                *handle.launch.build_command("a shell in a local sandbox", TERMINAL_MODULES, f", terminal={its}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=handle.launch.directory,
                env=START_ENVIRONMENT,
                pass_fds=[its],
                start_new_session=True,
            )
        finally:
            os.close(its)
        try:
            await asyncio.to_thread(handle.group.add, process.pid)
            if handle.watched is not None:  # The handle's `keep` and `remove` end this.
                handle.watched.pid = process.pid
                watch(handle.watched)
            status = await _relay(process, ours, build_driver_code(TERMINAL_MODULES) + request, until)
            if limit := handle.find_exceeded_limit():
                print(f"Processes were killed, because the sandbox exceeded {name_parameter(limit)}.", file=sys.stderr)
            return status
        finally:
            await run_shielded(_end(process, handle))
    finally:
        os.close(ours)


async def _end(process: asyncio.subprocess.Process, handle: LocalSandboxHandle) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
    # A program may have left the shell's session. This ends the keeper, too, which the handle's `keep` starts again.
    await kill_processes(handle.folder)


async def _relay(process: asyncio.subprocess.Process, terminal: int, start: bytes, until: float) -> int:
    loop = asyncio.get_running_loop()
    has_shown = False

    async def send(data: bytes) -> None:
        while data:
            try:
                data = data[os.write(terminal, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.01)  # The shell reads nothing now.

    async def resize(rows: int, columns: int) -> None:
        _resize(terminal, rows, columns)

    async with relay_terminal(send, resize) as write:

        def show() -> bool:
            """Show what the shell has written, and return whether there was something."""
            nonlocal has_shown
            try:
                write(os.read(terminal, READ_BYTES))
            except BlockingIOError:
                return False
            except OSError:  # No process has the terminal open.
                loop.remove_reader(terminal)
                return False
            has_shown = True
            return True

        loop.add_reader(terminal, show)
        try:
            async with asyncio.timeout(max(0.0, until - time.time())):
                status, errors = await process.communicate(start)
        except TimeoutError:
            status, errors = b"", b""
            write(b"\r\nThe hour of this sandbox is over.\r\n")
        finally:
            loop.remove_reader(terminal)
        while show():
            pass
    if not status and process.returncode is not None:
        if has_shown:
            raise SandboxLost("the shell was killed from outside, as by rlm-batch reap --kept")
        raise SandboxStartError(f"the shell did not start: {errors.decode('utf-8', 'replace').strip()[-500:]}")
    return int(status or 1)


def _resize(terminal: int, rows: int, columns: int) -> None:
    """Set the size of a pseudo-terminal, which tells the programs on it."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
