"""A shell in a local sandbox, behind the walls of its code. The system call filter keeps it from typing."""

import json
import os
from dataclasses import asdict

from ...sandbox.cancellation import run_shielded
from ...sandbox.driver_bundle import TERMINAL_MODULES, build_driver_code
from ..host_terminal import SHELL, run_in_terminal
from .deletion import kill_processes
from .handle import LocalSandboxHandle
from .launch.driver_process import build_boot_program

# Options of bubblewrap that a shell does not get: without them it can take over the terminal and receive its signals.
DROPPED_OPTIONS = ("--as-pid-1", "--new-session")


async def run_terminal(handle: LocalSandboxHandle) -> int:
    """Run a shell in a sandbox without a driver, and return its exit status."""
    settings = asdict(handle.settings)
    settings["environment"]["TERM"] = os.environ.get("TERM", "dumb")
    code = build_driver_code(TERMINAL_MODULES)
    request = {"settings": settings, "command": SHELL}
    descriptor = os.memfd_create("shell")  # The settings have secrets, and standard input is the terminal.
    try:
        os.write(descriptor, code + json.dumps(request).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        program = build_boot_program("a shell in a local sandbox", len(code), f"descriptor={descriptor}", descriptor)
        command = handle.launch.build_command(program)
        return await run_in_terminal(
            [word for word in command if word not in DROPPED_OPTIONS],
            f"A shell in {handle.settings.cwd}.",
            on_start=handle.hold_to_totals,
            cwd=handle.launch.directory,
            pass_fds=[descriptor],
        )
    finally:
        os.close(descriptor)
        # Kill programs that have left the shell's session. The keeper dies too; the handle's `keep` starts another.
        await run_shielded(kill_processes(handle.folder))
