"""A context keeps its state from execution to execution, until its process has ended or it is forgotten."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, CodeSyntaxError, ExecutionTimeout, StateLost, SubmitError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

STUBBORN = """
import time
while True:
    try:
        time.sleep(1000)
    except BaseException:
        pass
"""


@pytest.mark.every_provider
async def test_names_stay(interpreter: Interpreter) -> None:
    await interpreter.execute("import math\nx = 20\ndef double(n): return 2 * n", {"y": 1}, context="c")
    result = await interpreter.execute("SUBMIT(double(x) + y, pi=math.pi > 3)", context="c")
    assert result.outputs == {"output": 41, "pi": True}


async def test_names_stay_after_errors_and_submits(interpreter: Interpreter) -> None:
    for code, kind in (
        ("x = 1; 1 / 0", CodeError),
        ("y = = 2", CodeSyntaxError),
        ("SUBMIT(x=object())", SubmitError),
        ("exit(3)", CodeCrashed),
    ):
        with pytest.raises(kind):
            await interpreter.execute(code, context="c")
    await interpreter.execute("x += 1; SUBMIT()", context="c")
    assert (await interpreter.execute("SUBMIT(x=x)", context="c")).x == 2


async def test_contexts_are_apart_from_each_other_and_from_the_rest(interpreter: Interpreter) -> None:
    await interpreter.execute("x = 'a'", context="a")
    await interpreter.execute("x = 'b'", context="b")
    assert (await interpreter.execute("SUBMIT(x=x)", context="a")).x == "a"
    assert (await interpreter.execute("SUBMIT(x=x)", context="b")).x == "b"
    assert (await interpreter.execute("SUBMIT(known='x' in globals())")).known is False


async def test_executions_of_one_context_run_one_after_the_other(interpreter: Interpreter) -> None:
    await interpreter.execute("order = []", context="c")
    code = "import time; time.sleep(0.02); order.append(i); SUBMIT(order=order)"
    results = await asyncio.gather(*(interpreter.execute(code, {"i": i}, context="c") for i in range(5)))
    assert [result.order for result in results] == [list(range(i + 1)) for i in range(5)]


async def test_variables_replace_names_and_functions_see_them(interpreter: Interpreter) -> None:
    await interpreter.execute("def get(): return x", {"x": 1}, context="c")
    assert (await interpreter.execute("SUBMIT(x=get())", {"x": 2}, context="c")).x == 2


WAITING = {
    "asleep": "import time; time.sleep(1000)",
    "busy": "while True: pass",
    "in a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waiting for a subprocess": "import subprocess; subprocess.run(['sleep', '1000'])",
    "in a loop of coroutines": "import asyncio; asyncio.run(asyncio.sleep(1000))",
    "awaited": "import asyncio; await asyncio.sleep(1000)",
    "in a task beside the one that waits": """
import asyncio
async def spin():
    while True:
        pass
await asyncio.gather(asyncio.sleep(1000), spin())
""",
    "awaited again after its end": """
import asyncio
while True:
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        pass
""",
    "in a task that nobody awaits": """
import asyncio
async def spin():
    while True:
        await asyncio.sleep(0)
async def main():
    task = asyncio.create_task(spin())
    await asyncio.sleep(1000)
asyncio.run(main())
""",
    "waiting for the host": "forever()",
    "printing": "while True: print('x' * 1000)",
    "calling the host": "while True: quick()",
}


async def test_a_timeout_interrupts_and_keeps_the_state(provider: SandboxProvider) -> None:
    async def forever() -> None:
        await asyncio.sleep(1000)

    tools = {"forever": forever, "quick": lambda: None}

    few = asyncio.Semaphore(3)  # each has a second to be interrupted in, and all are busy

    async def interrupted(interpreter: Interpreter, name: str) -> None:
        async with few:
            await interpreter.execute("kept = []", context=name)
            for i in range(2):
                with pytest.raises(ExecutionTimeout) as caught:
                    await interpreter.execute(f"kept.append({i})\n{WAITING[name]}", context=name, timeout=0.4)
                assert "lost" not in str(caught.value), name
            assert (await interpreter.execute("SUBMIT(kept=kept)", context=name)).kept == [0, 1], name

    async with provider.interpreter(timeout=20, tools=tools) as interpreter:
        await asyncio.gather(*(interrupted(interpreter, name) for name in WAITING))


PACKAGE = {
    "__init__.py": "from .words import *\nfrom .pause import *\n__all__ = words.__all__ + pause.__all__\n",
    "words.py": "from . import letters\n__all__ = ['WORDS']\nWORDS = [letters.A]\n",
    "letters.py": "A = 'a'\n",
    "pause.py": "import sys, time\n__all__ = []\ntime.sleep(sys.pause)\n",
}


async def test_a_package_whose_import_was_interrupted_can_be_imported_again(interpreter: Interpreter) -> None:
    write = """
        import os, sys, tempfile
        folder = tempfile.TemporaryDirectory()
        sys.path.append(folder.name)
        os.mkdir(f"{folder.name}/halves")
        for name, text in files.items():
            with open(f"{folder.name}/halves/{name}", "w") as file:
                file.write(text)
        sys.pause = 1000
        """
    await interpreter.execute(dedent(write), {"files": PACKAGE}, context="c")
    with pytest.raises(ExecutionTimeout):
        await interpreter.execute("import halves", context="c", timeout=0.5)
    result = await interpreter.execute(
        "sys.pause = 0\nimport halves\nfolder.cleanup()\nSUBMIT(halves.WORDS)", context="c"
    )
    assert result.output == ["a"]


async def test_code_that_swallows_the_interrupt_is_killed_and_the_state_is_lost(interpreter: Interpreter) -> None:
    await interpreter.execute("x = 1", context="c")
    with pytest.raises(ExecutionTimeout, match="state that earlier executions had left is lost"):
        await interpreter.execute(STUBBORN, context="c", timeout=0.3)
    for _ in range(2):
        with pytest.raises(StateLost, match="Start again from the first step"):
            await interpreter.execute("SUBMIT(x=x)", context="c")
    assert (await interpreter.execute("SUBMIT(x=2)", context="d")).x == 2
    assert (await interpreter.execute("SUBMIT(x=3)")).x == 3


@pytest.mark.every_provider
async def test_a_crash_loses_the_state_and_says_so(interpreter: Interpreter) -> None:
    await interpreter.execute("x = 1", context="c")
    with pytest.raises(CodeCrashed, match=r"status 3.* lost"):
        await interpreter.execute("import os; os._exit(3)", context="c")
    with pytest.raises(StateLost, match="status 3"):
        await interpreter.execute("SUBMIT(x=x)", context="c")


async def test_a_process_that_ends_between_two_executions_has_lost_the_state(interpreter: Interpreter) -> None:
    code = """
        import fcntl, os, threading, time
        held = open("held", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        def end():
            while not os.path.exists("go"):
                time.sleep(0.02)
            os._exit(4)
        threading.Thread(target=end).start()
        """
    await interpreter.execute(dedent(code), context="c")
    code = "import fcntl\nopen('go', 'w').close()\nfcntl.flock(open('held'), fcntl.LOCK_EX)"  # which its end lets go of
    await interpreter.execute(code)
    await asyncio.sleep(0.3)  # for the driver to be told of its end
    with pytest.raises(StateLost, match="status 4"):
        await interpreter.execute("SUBMIT()", context="c")


async def test_a_forgotten_context_begins_anew(interpreter: Interpreter) -> None:
    for pause in (0.0, 0.2):
        await interpreter.execute("x = 1", context="c")
        await interpreter.forget_context("c")
        await asyncio.sleep(pause)
        assert (await interpreter.execute("SUBMIT(known='x' in globals())", context="c")).known is False
        assert (await interpreter.execute("x = 1; SUBMIT(x=x)", context="c")).x == 1
        await interpreter.forget_context("c")


async def test_forgetting_begins_anew_after_the_state_was_lost(interpreter: Interpreter) -> None:
    with pytest.raises(CodeCrashed):
        await interpreter.execute("import os; os._exit(3)", context="c")
    await interpreter.forget_context("c")
    assert (await interpreter.execute("SUBMIT(x=1)", context="c")).x == 1


async def test_forgetting_what_never_was_is_no_error(interpreter: Interpreter) -> None:
    await interpreter.forget_context("never")
    assert (await interpreter.execute("SUBMIT(x=1)", context="never")).x == 1


async def test_forgetting_ends_what_runs(interpreter: Interpreter) -> None:
    heard = asyncio.Event()
    running = asyncio.ensure_future(
        interpreter.execute("print('on')\n" + STUBBORN, context="c", on_output=lambda *_: heard.set())
    )
    await heard.wait()
    await interpreter.forget_context("c")
    with pytest.raises(CodeError):
        await running
    assert (await interpreter.execute("SUBMIT(x=1)", context="c")).x == 1


async def test_a_thread_of_an_earlier_execution_cannot_submit_in_a_later_one(interpreter: Interpreter) -> None:
    early = """
        import threading, time
        go, done = threading.Event(), threading.Event()
        def late(submit=SUBMIT):
            go.wait()
            try:
                submit(x="early")
            except BaseException:
                done.set()
        threading.Thread(target=late, daemon=True).start()
        """
    await interpreter.execute(dedent(early), context="c")
    result = await interpreter.execute("go.set()\ndone.wait()\ntime.sleep(0.1)\nSUBMIT(x='later')", context="c")
    assert result.x == "later"


# A thread that the first execution leaves waits for the second, and then tries what `forge` does.
FIRST = """
import threading
go, done = threading.Event(), threading.Event()
def late():
    go.wait()
    try:
        forge()
    finally:
        done.set()
{forge}
threading.Thread(target=late, daemon=True).start()
"""
FORGERIES = {
    "the name that the second finds": """
def forge():
    SUBMIT(x="forged")
""",
    "a thread of its own": """
def forge():
    thread = threading.Thread(target=lambda: SUBMIT(x="forged"))
    thread.start()
    thread.join()
""",
    # Every text that Python shows it of the driver and of the running threads, and what it knew of its own execution.
    "every token that it finds": """
import json, os, re, sys
def find_texts():
    seen, texts, left = set(), set(), [SUBMIT, llm_query, rlm_query, globals()]
    for frame in sys._current_frames().values():
        while frame is not None:
            left += frame.f_locals.values()
            frame = frame.f_back
    while left and len(seen) < 20_000:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str):
            texts.update(re.findall(r"[0-9a-f]{8,}(?:[.][0-9]+)?", thing))
        elif isinstance(thing, dict):
            left += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            left += thing
        else:
            cells = getattr(thing, "__closure__", None)
            left += [cell.cell_contents for cell in cells] if isinstance(cells, tuple) else []
            left.append(getattr(thing, "__self__", None))
            left.append(getattr(thing, "__dict__", None))
            if type(thing).__module__.startswith("_rlm_batch"):
                left += [getattr(thing, name, None) for name in dir(thing) if not name.startswith("__")]
    return texts
earlier = find_texts()
def forge():
    texts = earlier | find_texts()
    texts |= {f"{text.partition('.')[0]}.{n}" for text in texts for n in range(20)}
    for text in texts:
        header = json.dumps({"op": "submit", "token": text, "body": 14}).encode()
        os.write(4, header + b'\\n{"x":"forged"}\\n')
""",
    "that the sandbox could not be confined": """
import json, os
def forge():
    body = b'{"message":"forged"}'
    os.write(4, json.dumps({"op": "end", "status": "setup", "body": len(body)}).encode() + b"\\n" + body + b"\\n")
""",
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_thread_of_an_earlier_execution_cannot_give_a_later_one_its_result(
    interpreter: Interpreter, forgery: str
) -> None:
    await interpreter.execute(FIRST.replace("{forge}", FORGERIES[forgery]), context="c")
    result = await interpreter.execute("go.set()\ndone.wait()\nSUBMIT(x='later')", context="c")
    assert result.x == "later"
    assert (await interpreter.execute("y = 1", context="c")).outputs == {}


async def test_threads_that_an_execution_starts_are_its_own_in_a_context_too(interpreter: Interpreter) -> None:
    """Also those of a pool that an earlier execution has made, and of a thread that another thread starts."""
    await interpreter.execute(
        "import _thread, threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(4)\ndef rest(): time.sleep(20)",
        context="c",
    )
    ways = (
        "threading.Thread(target=lambda: SUBMIT(x=1)).start(); rest()",
        "pool.submit(lambda: SUBMIT(x=1)); rest()",
        "_thread.start_new_thread(SUBMIT, (), {'x': 1}); rest()",
        "threading.Thread(target=lambda: threading.Thread(target=SUBMIT, kwargs={'x': 1}).start()).start(); rest()",
    )
    for way in ways:
        assert (await interpreter.execute(way, context="c")).outputs == {"x": 1}, way


INTERRUPT_LOST = """
import signal, threading, time
handle, numbers = signal.getsignal(signal.SIGINT), []
def lose_first(number, frame):
    numbers.append(number)
    if len(numbers) > 1:
        handle(number, frame)
signal.signal(signal.SIGINT, lose_first)
threading.Thread(target=lambda: SUBMIT(x=1)).start()
time.sleep(20)
"""


@pytest.mark.full
async def test_the_state_is_kept_where_the_interrupt_of_a_thread_that_submits_comes_to_nothing(
    interpreter: Interpreter,
) -> None:
    """As one does that comes just before the main thread sleeps."""
    await interpreter.execute("kept = 1", context="c")
    assert (await interpreter.execute(INTERRUPT_LOST, context="c")).outputs == {"x": 1}
    assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1


async def test_a_thread_of_an_earlier_execution_works_on(provider: SandboxProvider) -> None:
    async with provider.interpreter(timeout=20, tools={"add": lambda a, b: a + b}) as interpreter:
        early = """
            import queue, threading
            asked, answered = queue.Queue(), queue.Queue()
            def serve():
                while True:
                    answered.put(add(asked.get(), 1))
            threading.Thread(target=serve, daemon=True).start()
            """
        await interpreter.execute(dedent(early), context="c")
        for i in range(3):
            result = await interpreter.execute("asked.put(i); SUBMIT(answered.get())", {"i": i}, context="c")
            assert result.output == i + 1


async def test_classes_of_a_context_can_be_pickled(interpreter: Interpreter) -> None:
    code = "import dataclasses, pickle\n@dataclasses.dataclass\nclass Point:\n    x: int\ndata = pickle.dumps(Point(3))"
    await interpreter.execute(code, context="c")
    assert (await interpreter.execute("SUBMIT(x=pickle.loads(data).x)", context="c")).x == 3


async def test_a_traceback_shows_the_lines_of_the_execution_that_wrote_them(interpreter: Interpreter) -> None:
    await interpreter.execute("def fail():\n    raise ValueError('first')  # of the first", context="c")
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("x = 1\nfail()  # of the second", context="c")
    assert "# of the first" in caught.value.traceback
    assert "# of the second" in caught.value.traceback
    assert caught.value.line == 2


async def test_a_hundred_executions_of_one_context(interpreter: Interpreter) -> None:
    await interpreter.execute("n = 0", context="c")
    for _ in range(100):
        await interpreter.execute("n += 1", context="c")
    assert (await interpreter.execute("SUBMIT(n=n)", context="c")).n == 100
