"""Tests of threads, subprocesses and forks. Processes that an execution leaves running end with the execution."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError
from rlm_batch.sandbox.interpreter import Interpreter

from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def test_threads_coroutines_and_subprocesses_work(interpreter: Interpreter) -> None:
    code = """
        import asyncio, subprocess, sys
        from concurrent.futures import ThreadPoolExecutor
        async def main():
            process = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
            said, _ = await process.communicate()
            return said.decode(), await asyncio.gather(*(asyncio.sleep(0.01, i) for i in range(3)))
        with ThreadPoolExecutor(8) as pool:
            squares = list(pool.map(lambda x: x * x, range(20)))
        said = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True).stdout
        lines = subprocess.check_output("seq 3 | sort -r", shell=True, text=True).split()
        SUBMIT(squares=squares, said=said, lines=lines, awaited=asyncio.run(main()))
        """
    for context in (None, "c"):
        assert (await interpreter.execute(dedent(code), context=context)).outputs == {
            "squares": [i * i for i in range(20)],
            "said": "42\n",
            "lines": ["3", "2", "1"],
            "awaited": ["hello\n", [0, 1, 2]],
        }


async def test_an_execution_waits_for_its_threads(interpreter: Interpreter) -> None:
    code = """
        import atexit, threading, time
        def late():
            time.sleep(0.1)
            print("late")
        threading.Thread(target=late).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        atexit.register(print, "at exit")
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "late\nat exit\n"


async def test_multiprocessing_works_with_fork(interpreter: Interpreter) -> None:
    code = """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def work(end, i):
            print("in", i)
            end.send(i * i)
        answers = []
        for i in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, i))
            process.start()
            answers.append(ours.recv())
            process.join()
            assert process.exitcode == 0
        SUBMIT(answers=answers)
        """
    result = await interpreter.execute(dedent(code))
    assert result.answers == [0, 1, 4]
    assert result.meta.stdout == "in 0\nin 1\nin 2\n"


async def test_a_fork_that_reaches_the_end_of_the_code_ends_only_itself(
    interpreter: Interpreter,
) -> None:
    code = """
        import os
        if os.fork() == 0:
            print("in the fork", flush=True)
        else:
            _, status = os.wait()
            SUBMIT(status=status)
        """
    for context in (None, "c"):
        result = await interpreter.execute(dedent(code), context=context)
        assert result.outputs == {"status": 0}
        assert result.meta.stdout == "in the fork\n"
        assert (await interpreter.execute("SUBMIT(fine=1)", context=context)).fine


async def test_a_forked_process_cannot_submit_and_fails_alone(interpreter: Interpreter) -> None:
    code = """
        import os, sys
        reads, writes = os.pipe()
        def submit():
            try:
                SUBMIT(who="fork")
            except BaseException as error:
                os.write(writes, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        for run in (submit, lambda: 1 / 0, lambda: sys.exit(5), lambda: os._exit(6), lambda: os.abort()):
            if os.fork() == 0:
                run()
        ends = sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5))
        SUBMIT(said=os.read(reads, 1000).decode(), ends=ends)
        """
    result = await interpreter.execute(dedent(code))
    assert "main process" in result.said
    assert result.ends == [-6, 0, 1, 5, 6]
    assert "ZeroDivisionError: division by zero" in result.meta.stderr


# Each code leaves a process that holds a lock forever, and that creates a file when it has the lock.
HOLD = "import fcntl, os, time; f = open('lock', 'w'); fcntl.flock(f, 2); open('held', 'w'); time.sleep(1000)"
LEAVING = {
    "a subprocess": """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", hold])
        """,
    "a daemon": """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                exec(hold, {})
            os._exit(0)
        os.wait()
        """,
    "a fork deaf to signals": """
        import os, signal
        if os.fork() == 0:
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            os.setsid()
            exec(hold, {})
        """,
    "a background job of a shell": """
        import shlex, subprocess, sys
        subprocess.run(["sh", "-c", f"nohup {sys.executable} -c {shlex.quote(hold)} >/dev/null 2>&1 &"], check=True)
        """,
}  # fmt: skip
UNTIL_HELD = """
import os, time
while not os.path.exists("held"):
    time.sleep(0.01)
os.unlink("held")
"""
TAKE_LOCK = "import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)"
IS_HELD = """
import fcntl
try:
    fcntl.flock(open("lock", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    SUBMIT(True)
SUBMIT(False)
"""


async def test_processes_that_an_execution_leaves_end_with_it(interpreter: Interpreter) -> None:
    """Check that the lock becomes free. `test_timeout` checks a lock after a timeout."""
    for name, leaving in LEAVING.items():
        result = await interpreter.execute(dedent(leaving) + UNTIL_HELD + "SUBMIT(left=True)", {"hold": HOLD})
        assert result.left, name
        await interpreter.execute(TAKE_LOCK)
    for end, kind in {"raise ValueError('left')": CodeError, "os._exit(3)": CodeCrashed}.items():
        with pytest.raises(kind):
            await interpreter.execute(dedent(LEAVING["a daemon"]) + UNTIL_HELD + end, {"hold": HOLD})
        await interpreter.execute(TAKE_LOCK)


async def test_processes_that_a_context_leaves_run_until_it_is_forgotten(interpreter: Interpreter) -> None:
    await interpreter.execute(dedent(LEAVING["a daemon"]) + UNTIL_HELD, {"hold": HOLD}, context="c")
    assert (await interpreter.execute(IS_HELD)).output is True
    await interpreter.forget_context("c")
    await interpreter.execute(TAKE_LOCK)


async def test_ending_many_daemons_touches_no_other_execution(interpreter: Interpreter) -> None:
    interpreter.tools["wait"] = gate = Gate()
    busy = "import subprocess; p = subprocess.Popen(['sleep', '1000']); wait(); SUBMIT(is_there=p.poll() is None)"
    crowd = """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    open(f"held{os.getpid()}", "w")
                    time.sleep(1000)
                os._exit(0)
        while len([name for name in os.listdir() if name.startswith("held")]) < 20:
            time.sleep(0.01)
        """
    other = asyncio.ensure_future(interpreter.execute(busy))
    await gate.is_reached.wait()
    await interpreter.execute(dedent(crowd))
    gate.open()
    assert (await other).is_there


async def test_code_can_reap_its_zombies(interpreter: Interpreter) -> None:
    code = """
        import os
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        SUBMIT(reaped=len([os.wait() for _ in range(10)]))
        """
    assert (await interpreter.execute(dedent(code))).reaped == 10
