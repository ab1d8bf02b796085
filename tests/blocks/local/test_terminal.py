"""A terminal in a kept local sandbox, and its end with the sandbox's."""

import sys
import time
from pathlib import Path

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.inventory import lock_kept_folder
from rlm_batch.sandbox.errors import RlmBatchError

from ...infra.pseudo_terminal import TerminalCommand
from ...infra.requirements import mark_level

pytestmark = pytest.mark.anyio

PROMPT = r"[$#] $"
LEVELS = ("bubblewrap", "landlock", "none")
OPEN = """
import asyncio, sys
from rlm_batch import LocalSandbox

sandbox = LocalSandbox(isolation=sys.argv[1])
sys.exit(asyncio.run(sandbox.open_terminal(input("sandbox: "))))
"""


async def keep_sandbox(seconds: float, level: str = "auto") -> Path:
    """Keep a sandbox in which code has written 8 MiB, and return its folder."""
    interpreter = LocalSandbox(isolation=level).interpreter()  # type: ignore[arg-type]
    await interpreter.execute("open('large', 'w').write('x' * (8 << 20))")
    folder = Path(interpreter.sandbox.folder)  # type: ignore[attr-defined]
    await interpreter.keep(time.time() + seconds)
    return folder


def start_program(level: str = "auto") -> TerminalCommand:
    """Start a program that asks for the name of a kept sandbox and opens a terminal in it."""
    return TerminalCommand([sys.executable, "-c", OPEN, level])


def open_terminal(folder: Path, level: str = "auto") -> TerminalCommand:
    terminal = start_program(level)
    terminal.send(f"{folder.name}\n")
    return terminal


@pytest.mark.parametrize("level", [pytest.param(level, marks=mark_level(level)) for level in LEVELS])
async def test_a_shell_shows_no_error_and_its_end_by_a_signal(no_process_left: None, level: str) -> None:
    folder = await keep_sandbox(600, level)
    with open_terminal(folder, level=level) as terminal:
        terminal.wait_for(r"Ctrl-D ends the shell\.\r\n")
        assert "\n" not in terminal.wait_for(PROMPT).string
        terminal.send("kill -9 $$\n")
        assert terminal.wait() == 137
    await LocalSandbox().delete_sandbox(folder.name)


async def test_two_terminals_cannot_take_a_kept_sandbox_at_the_same_time(no_process_left: None) -> None:
    folder = await keep_sandbox(600)
    with lock_kept_folder(folder.name) as locked:
        assert locked == folder
        with pytest.raises(RlmBatchError, match="another terminal is open"), lock_kept_folder(folder.name):
            pass
    with lock_kept_folder(folder.name):
        pass
    await LocalSandbox().delete_sandbox(folder.name)


@pytest.mark.full
async def test_nothing_is_left_if_the_sandbox_is_removed_while_a_terminal_is_open(no_process_left: None) -> None:
    folder = await keep_sandbox(600)
    with open_terminal(folder) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("n=0; while :; do n=$((n+1)); mkdir -p $n; echo x >$n/file; done\n")
        await LocalSandbox().delete_sandbox(folder.name)
        assert terminal.wait() in (137, 143)
    await LocalSandbox().delete_sandbox(folder.name)
    assert not folder.exists()
