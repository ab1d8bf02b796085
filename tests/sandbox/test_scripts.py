"""Tests that whole scripts end and leave nothing, whatever they were doing."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch import LocalSandbox

from ..infra.waiting import wait_until
from .conftest import PATIENCE, START_DAEMONS, Run

# This code leaves processes that only SIGKILL ends, inside and outside of its session.
DAEMONS = f"""
import subprocess
{START_DAEMONS}sleeping = subprocess.Popen(["sleep", "1000"], start_new_session=True)
ready()
time.sleep(1000)
"""


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def press_ctrl_c(process: subprocess.Popen[str]) -> str:
    """Interrupt the terminal's process group once, and return what the script writes to stderr before it ends."""
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    return errors


@pytest.mark.strongest_first
@pytest.mark.parametrize("code", [DAEMONS, "plain()", pytest.param("asynchronous()", marks=pytest.mark.full)])
def test_ctrl_c_ends_a_script_that_waits_for_code_or_a_tool(script: Run, local: LocalSandbox, code: str) -> None:
    process = script(f"""
        tools = {{"ready": ready, "plain": plain, "asynchronous": asynchronous}}
        with LocalInterpreter(isolation={local.isolation!r}, timeout=None, tools=tools) as interpreter:
            interpreter.execute({code!r})
        """)
    assert read_line(process) == "ready"
    assert "KeyboardInterrupt" in press_ctrl_c(process)


@pytest.mark.full
def test_ctrl_c_ends_an_async_script_that_waits_for_code_and_tools(script: Run) -> None:
    process = script(f"""
        from rlm_batch import LocalSandbox
        async def main():
            tools = {{"ready": ready, "plain": plain, "asynchronous": asynchronous}}
            async with LocalSandbox().interpreter(timeout=None, tools=tools) as interpreter:
                await asyncio.gather(*map(interpreter.execute, ({DAEMONS!r}, "plain()", "asynchronous()")))
        asyncio.run(main())
        """)
    assert [read_line(process) for _ in range(3)] == ["ready"] * 3
    assert "KeyboardInterrupt" in press_ctrl_c(process)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="by pipes"),
        pytest.param("language_model='ollama_chat/llama3.2'", id="by an event loop", marks=pytest.mark.full),
    ],
)
def test_ctrl_c_that_interrupts_no_system_call_ends_a_script(script: Run, options: str) -> None:
    """Check a signal that interrupts no system call: it arrives just before the call, or in another thread."""
    process = script(f"""
        import signal, threading
        def press():
            ready()
            while open(f"/proc/self/task/{{os.getpid()}}/stat").read().rpartition(")")[2].split()[0] != "S":
                time.sleep(0.01)  # the main thread still runs: it has not begun to wait after this call came
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            time.sleep(1000)
        with LocalInterpreter(timeout=None, tools={{"press": press}}, {options}) as interpreter:
            interpreter.execute("press()")
        """)
    assert read_line(process) == "ready"
    _, errors = process.communicate(timeout=PATIENCE)
    assert "KeyboardInterrupt" in errors


@pytest.mark.full
def test_a_script_ends_while_tools_of_ended_executions_run(script: Run) -> None:
    process = script("""
        from rlm_batch import ExecutionTimeout
        for tool in (plain, asynchronous):
            with LocalInterpreter(timeout=5, tools={"tool": tool}) as interpreter:
                try:
                    interpreter.execute("tool()")
                except ExecutionTimeout:
                    ready()
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output, errors) == (0, "ready\n" * 4, "")


def test_a_script_that_catches_ctrl_c_or_an_alarm_keeps_its_state(script: Run) -> None:
    process = script("""
        import signal
        class TooSlow(Exception):
            pass
        def raise_too_slow(*_):
            raise TooSlow
        signal.signal(signal.SIGALRM, raise_too_slow)
        tools = {"ready": ready, "ring": lambda: os.kill(os.getpid(), signal.SIGALRM)}
        with LocalInterpreter(timeout=None, tools=tools) as interpreter:
            for code in ("ready(); time.sleep(1000)", "ready()\\nwhile True: pass", "ring(); time.sleep(1000)"):
                interpreter.execute("kept = 1; import time")
                try:
                    interpreter.execute(code)
                except (KeyboardInterrupt, TooSlow):
                    print(interpreter.execute("SUBMIT(kept=kept)").kept, flush=True)
        """)
    for _ in range(2):
        assert read_line(process) == "ready"
        os.killpg(process.pid, signal.SIGINT)
        assert read_line(process) == "1"
    assert read_line(process) == "1"
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")


def test_ctrl_c_while_a_tools_thread_starts_keeps_the_state(script: Run) -> None:
    process = script("""
        import signal, threading
        start = threading.Thread.start
        def start_and_interrupt(thread):
            start(thread)
            os.kill(os.getpid(), signal.SIGINT)
        with LocalInterpreter(timeout=None, tools={"ready": ready}) as interpreter:
            interpreter.execute("kept = 1; import time")
            threading.Thread.start = start_and_interrupt
            try:
                interpreter.execute("ready(); time.sleep(1000)")
            except KeyboardInterrupt:
                threading.Thread.start = start
                print(interpreter.execute("SUBMIT(kept=kept)").kept, flush=True)
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (output.split()[-1:], errors) == (["1"], "")


def test_ctrl_c_during_an_upload_keeps_the_state_or_raises_a_clear_error(script: Run) -> None:
    process = script("""
        import signal
        from contextlib import suppress
        from rlm_batch import OutcomeUnknown, SandboxLost
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with LocalInterpreter(isolation="none", timeout=None) as interpreter:
            interpreter.execute("kept = 1")
            def tell(number, parent="self"):
                for task in os.listdir(f"/proc/{parent}/task"):
                    for pid in open(f"/proc/{parent}/task/{task}/children").read().split():
                        with suppress(OSError):  # it ended meanwhile
                            os.kill(int(pid), number)
                            tell(number, pid)
            tell(signal.SIGSTOP)  # what fits in the pipe goes there, and the rest waits
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                interpreter.execute("SUBMIT()", {"text": "x" * 20_000_000})
            except KeyboardInterrupt:
                pass
            finally:
                tell(signal.SIGCONT)
            try:
                print(interpreter.execute("SUBMIT(kept=kept)", timeout=60).kept, flush=True)
            except (SandboxLost, OutcomeUnknown):
                print(1, flush=True)
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (output, errors) == ("1\n", "")


def test_ctrl_c_during_the_start_waits_until_the_sandbox_is_deleted(script: Run, tmp_path: Path) -> None:
    process = script("""
        from rlm_batch.sandbox.sync_interpreter import SyncInterpreter
        async def open_slowly():
            try:
                ready()
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.3)
                open("removed", "w")
        with SyncInterpreter(open_slowly) as interpreter:
            pass
        """)
    assert read_line(process) == "ready"
    assert "KeyboardInterrupt" in press_ctrl_c(process)
    assert (tmp_path / "removed").exists()


@pytest.mark.full
def test_ctrl_c_at_any_moment_of_a_start_leaves_no_sandbox(script: Run, local: LocalSandbox) -> None:
    # If Ctrl-C arrives in a weak reference's callback, Python only prints the KeyboardInterrupt. The hook hides it.
    process = script(f"""
        import signal, sys
        sys.unraisablehook = lambda it: it.exc_type is KeyboardInterrupt or sys.__unraisablehook__(it)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        LocalInterpreter(isolation={local.isolation!r}).start().shutdown()
        for i in range(50):
            interpreter = LocalInterpreter(isolation={local.isolation!r})
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + i * 0.0008)
                    interpreter.start()
                    time.sleep(0.05)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    interpreter.shutdown()
            except KeyboardInterrupt:
                pass
        ready()
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (output, errors) == ("ready\n", "")


@pytest.mark.full
def test_the_background_thread_survives_thousands_of_interrupts(script: Run) -> None:
    process = script("""
        import random, signal
        from rlm_batch.sandbox.sync_interpreter import run_sync
        sys.unraisablehook = lambda it: it.exc_type is KeyboardInterrupt or sys.__unraisablehook__(it)
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        async def sleep_shortly():
            await asyncio.sleep(0.0001)
            return "awake"
        run_sync(sleep_shortly)
        for _ in range(2000):
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0006))
                    run_sync(sleep_shortly)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
        print(run_sync(sleep_shortly))
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (output, errors) == ("awake\n", "")


@pytest.mark.parametrize("end", ["", pytest.param("sys.exit(3)", marks=pytest.mark.full)])
def test_a_script_that_never_shuts_down_leaves_no_sandbox(script: Run, end: str) -> None:
    process = script(f"""
        interpreter = LocalInterpreter(tools={{"ready": lambda: None}})
        interpreter.execute({DAEMONS.replace("time.sleep(1000)", "", 1).removesuffix("time.sleep(1000)" + chr(10))!r})
        ready()
        {end}
        """)
    assert read_line(process) == "ready"
    process.communicate(timeout=PATIENCE)
    assert process.returncode == (3 if end else 0)


@pytest.mark.full
def test_a_tool_that_calls_exit_ends_neither_script_nor_code(script: Run) -> None:
    process = script("""
        from rlm_batch import LocalSandbox
        def leave():
            sys.exit(3)
        async def leave_asynchronously():
            sys.exit(3)
        code = "try:\\n    leave()\\nexcept Exception as error:\\n    SUBMIT(error=str(error))"
        async def main():
            for tool in (leave, leave_asynchronously):
                async with LocalSandbox().interpreter(tools={"leave": tool}) as interpreter:
                    print((await interpreter.execute(code)).error, flush=True)
        for tool in (leave, leave_asynchronously):
            with LocalInterpreter(tools={"leave": tool}) as interpreter:
                print(interpreter.execute(code).error, flush=True)
        asyncio.run(main())
        """)
    output, errors = process.communicate(timeout=PATIENCE)
    assert errors == ""
    assert output.splitlines() == ["SystemExit: 3"] * 4
    assert process.returncode == 0


@pytest.mark.strongest_first
def test_a_killed_host_leaves_no_process(
    script: Run, local: LocalSandbox, processes: Callable[[], dict[int, str]]
) -> None:
    before = set(processes())
    process = script(f"""
        from rlm_batch import LocalSandbox
        import threading
        def run():
            LocalInterpreter(isolation={local.isolation!r}, timeout=None, tools={{"ready": ready}}).execute({DAEMONS!r})
        async def main():
            provider = LocalSandbox(isolation={local.isolation!r})
            async with provider.interpreter(timeout=None, tools={{"ready": ready}}) as interpreter:
                await asyncio.gather(interpreter.execute({DAEMONS!r}), interpreter.execute({DAEMONS!r}, context="c"))
        threading.Thread(target=run, daemon=True).start()
        asyncio.run(main())
        """)
    assert [read_line(process) for _ in range(3)] == ["ready"] * 3
    process.kill()
    process.wait()
    wait_until(lambda: not set(processes()) - before, "no process is left")

    async def remove_folders() -> None:
        """Remove the folders of the two sandboxes, as a user does after a host was killed."""
        sandboxes = await local.list_sandboxes()
        assert len(sandboxes) == 2
        for info in sandboxes:
            await local.delete_sandbox(info.id)

    asyncio.run(remove_folders())
