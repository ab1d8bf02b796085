"""Threads, subprocesses and forks work, and what an execution leaves running is gone after it."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import CodeError, ExecutionTimeout
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


async def test_threads_and_pools_work(interpreter: Interpreter) -> None:
    code = """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            SUBMIT(squares=list(pool.map(lambda x: x * x, range(20))))
        """
    assert (await interpreter.execute(dedent(code))).squares == [i * i for i in range(20)]


async def test_threads_that_still_run_at_the_end_of_the_code_are_waited_for(interpreter: Interpreter) -> None:
    code = """
        import atexit, threading, time
        def late():
            time.sleep(0.2)
            print("late")
        threading.Thread(target=late).start()
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        atexit.register(print, "at exit")
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "late\nat exit\n"


async def test_coroutines_work(interpreter: Interpreter) -> None:
    code = """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
            said, _ = await process.communicate()
            return said.decode(), await asyncio.gather(*(asyncio.sleep(0.01, i) for i in range(3)))
        SUBMIT(asyncio.run(main()))
        """
    for context in (None, "c"):
        assert (await interpreter.execute(dedent(code), context=context)).output == ["hello\n", [0, 1, 2]]


async def test_submit_inside_a_coroutine_ends_the_execution(interpreter: Interpreter) -> None:
    code = """
        import asyncio
        async def main():
            await asyncio.sleep(0.01)
            SUBMIT(x=1)
        asyncio.run(main())
        """
    assert (await interpreter.execute(dedent(code))).x == 1


@pytest.mark.every_provider
async def test_subprocesses_work(interpreter: Interpreter) -> None:
    code = """
        import subprocess, sys
        said = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True).stdout
        lines = subprocess.check_output("seq 3 | sort -r", shell=True, text=True).split()
        SUBMIT(said=said, lines=lines)
        """
    assert (await interpreter.execute(dedent(code))).outputs == {"said": "42\n", "lines": ["3", "2", "1"]}


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


async def test_a_forked_process_that_reaches_the_end_of_the_code_ends_nothing_but_itself(
    interpreter: Interpreter,
) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            print("in the fork", flush=True)
        else:
            _, status = os.wait()
            time.sleep(0.1)
            SUBMIT(status=status)
        """
    for context in (None, "c"):
        result = await interpreter.execute(dedent(code), context=context)
        assert result.outputs == {"status": 0}
        assert result.meta.stdout == "in the fork\n"
        assert (await interpreter.execute("SUBMIT(fine=1)", context=context)).fine


async def test_a_forked_process_cannot_submit(interpreter: Interpreter) -> None:
    code = """
        import os
        reads, writes = os.pipe()
        if os.fork() == 0:
            try:
                SUBMIT(who="fork")
            except BaseException as error:
                os.write(writes, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.wait()
        SUBMIT(who="parent", said=os.read(reads, 1000).decode())
        """
    result = await interpreter.execute(dedent(code))
    assert result.who == "parent"
    assert "own process" in result.said


async def test_a_forked_process_that_fails_fails_for_itself(interpreter: Interpreter) -> None:
    code = """
        import os, sys
        for fail in (lambda: 1 / 0, lambda: sys.exit(5), lambda: os._exit(6), lambda: os.abort()):
            if os.fork() == 0:
                fail()
        SUBMIT(ends=sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)))
        """
    result = await interpreter.execute(dedent(code))
    assert result.ends == [-6, 1, 5, 6]
    assert "ZeroDivisionError: division by zero" in result.meta.stderr


# Each of these leaves a process behind that holds a lock for ever, and says when it has it.
HOLD = "import fcntl, os, time; f = open('lock', 'w'); fcntl.flock(f, 2); open('held', 'w'); time.sleep(1000)"
LEAVING = {
    "a subprocess": """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", hold])
        """,
    "a subprocess in a session of its own": """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", hold], start_new_session=True, close_fds=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        """,
    "a grandchild": """
        import subprocess, sys
        program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {hold!r}]).wait()"
        subprocess.Popen([sys.executable, "-c", program])
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
ENDS = {
    "SUBMIT": "SUBMIT(left=True)",
    "an error": "raise ValueError('left')",
    "a crash": "os._exit(3)",
    "a timeout": "time.sleep(1000)",
}
UNTIL_HELD = """
import os, time
while not os.path.exists("held"):
    time.sleep(0.01)
os.unlink("held")
"""
RELEASED = """
import fcntl, time
file = open("lock", "w")
until = time.monotonic() + patience
while True:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        SUBMIT(released=True)
    except BlockingIOError:
        if time.monotonic() > until:
            SUBMIT(released=False)
        time.sleep(0.01)
"""


@pytest.mark.own_machine
async def test_the_lock_shows_a_process_that_is_still_there(interpreter: Interpreter) -> None:
    code = dedent(LEAVING["a daemon"]) + UNTIL_HELD
    await interpreter.execute(code, {"hold": HOLD}, context="c")
    assert not (await interpreter.execute(RELEASED, {"patience": 0.3})).released


@pytest.mark.parametrize("end", ENDS)
async def test_what_an_execution_left_running_is_gone_after_it(interpreter: Interpreter, end: str) -> None:
    for name, leaving in LEAVING.items():
        code = dedent(leaving) + UNTIL_HELD + ENDS[end]
        try:
            await interpreter.execute(code, {"hold": HOLD}, timeout=2 if end == "a timeout" else None)
        except (CodeError, ExecutionTimeout) as error:
            assert end != "SUBMIT"
            assert isinstance(error, ExecutionTimeout) == (end == "a timeout")  # noqa: PT017
        assert (await interpreter.execute(RELEASED, {"patience": 5})).released, name
        if end != "SUBMIT":
            break


async def test_what_a_context_left_running_is_gone_when_it_is_forgotten(interpreter: Interpreter) -> None:
    code = dedent(LEAVING["a daemon"]) + UNTIL_HELD
    await interpreter.execute(code, {"hold": HOLD}, context="c")
    await interpreter.forget_context("c")
    assert (await interpreter.execute(RELEASED, {"patience": 5})).released


async def test_a_crowd_of_daemons_is_gone_and_others_are_not_touched(interpreter: Interpreter) -> None:
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
    busy = "import subprocess, time; p = subprocess.Popen(['sleep', '0.8']); time.sleep(0.5); SUBMIT(code=p.wait())"
    _, result = await asyncio.gather(interpreter.execute(dedent(crowd)), interpreter.execute(busy))
    assert result.code == 0


async def test_zombies_of_the_code_are_its_own(interpreter: Interpreter) -> None:
    code = """
        import os, time
        for _ in range(10):
            if os.fork() == 0:
                os._exit(0)
        time.sleep(0.1)
        SUBMIT(reaped=len([os.wait() for _ in range(10)]))
        """
    assert (await interpreter.execute(dedent(code))).reaped == 10
