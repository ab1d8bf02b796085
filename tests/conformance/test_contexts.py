"""Tests that a context keeps its state between executions, until its process ends or it is forgotten."""

import asyncio
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, CodeSyntaxError, ExecutionTimeout, StateLost, SubmitError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS
from .test_timeout import ENDLESS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

STUBBORN = """
import time
while True:
    try:
        time.sleep(1000)
    except BaseException:
        pass
"""
HOLD_LOCK = "import fcntl\nheld = open('lock', 'w')\nfcntl.flock(held, fcntl.LOCK_EX)\n"
TAKE_LOCK = "import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)"


async def test_names_survive_errors_and_are_separate_from_other_contexts(interpreter: Interpreter) -> None:
    await interpreter.execute("import math\nx = 20\ndef add(n): return n + y", {"y": 1}, context="c")
    await interpreter.execute("x = 'of d'", context="d")
    for code, kind in (
        ("x += 1; 1 / 0", CodeError),
        ("y = = 2", CodeSyntaxError),
        ("SUBMIT(x=object())", SubmitError),
        ("exit(3)", CodeCrashed),
    ):
        with pytest.raises(kind):
            await interpreter.execute(code, context="c")
    result = await interpreter.execute("SUBMIT(add(x), pi=math.pi > 3)", {"y": 2}, context="c")
    assert result.outputs == {"output": 23, "pi": True}
    assert (await interpreter.execute("SUBMIT(x)", context="d")).output == "of d"
    assert (await interpreter.execute("SUBMIT('x' in globals())")).output is False


async def test_executions_of_one_context_run_one_after_the_other(interpreter: Interpreter) -> None:
    await interpreter.execute("order = []", context="c")
    code = "import time; time.sleep(0.01); order.append(i); SUBMIT(order=order)"
    results = await asyncio.gather(*(interpreter.execute(code, {"i": i}, context="c") for i in range(5)))
    assert [result.order for result in results] == [list(range(i + 1)) for i in range(5)]


WAITING = {
    **{name: ENDLESS[name] for name in ("asleep", "busy", "in a lock", "waiting for a subprocess")},
    "in a loop of coroutines": ENDLESS["in a loop of coroutines"],
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
    "asleep again after two interrupts": """
import time
for _ in range(2):
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        pass
time.sleep(1000)
""",
    "waiting for the host": "forever()",
    "printing": "while True: print('x' * 1000)",
    "calling the host": "while True: quick()",
}


BUSY = ("busy", "in a task beside the one that waits", "in a task that nobody awaits", "printing", "calling the host")


async def test_a_timeout_keeps_the_state_unless_code_ignores_the_interrupt(
    provider: SandboxProvider,
) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def check_kept(name: str) -> None:
        await interpreter.execute("kept = 1", context=name)
        with pytest.raises(ExecutionTimeout) as caught:
            await interpreter.execute(WAITING[name], context=name, timeout=0.2)
        assert "lost" not in str(caught.value), name
        assert (await interpreter.execute("SUBMIT(kept=kept)", context=name)).kept == 1, name

    async def check_lost() -> None:
        await interpreter.execute("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", context="killed")
        with pytest.raises(ExecutionTimeout, match="The state of earlier executions is lost"):
            await interpreter.execute("import time; time.sleep(1000)", context="killed", timeout=0.2)
        with pytest.raises(StateLost, match="Start again with the first step"):
            await interpreter.execute("SUBMIT()", context="killed")

    async with provider.interpreter(tools={"forever": forever, "quick": lambda: None}) as interpreter:
        await asyncio.gather(check_lost(), *(check_kept(name) for name in WAITING if name not in BUSY))
        for name in BUSY:  # one at a time, because each uses a whole processor
            await check_kept(name)
            await interpreter.forget_context(name)


CATCHING = """
import time
for _ in range(3):
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        print("caught", flush=True)
time.sleep(1000)
"""


async def test_a_cancellation_after_the_timeout_does_not_delay_the_kill(interpreter: Interpreter) -> None:
    caught = asyncio.Event()
    running = asyncio.create_task(
        interpreter.execute(CATCHING, context="c", timeout=0.2, on_output=lambda *_: caught.set())
    )
    await caught.wait()
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(StateLost):  # The cancellation brought no fourth interrupt.
        await interpreter.execute("SUBMIT()", context="c")


async def test_a_crash_loses_the_state_and_the_error_says_so(interpreter: Interpreter) -> None:
    with pytest.raises(CodeCrashed, match=r"status 3.* lost"):
        await interpreter.execute("import os; os._exit(3)", context="c")
    for _ in range(2):
        with pytest.raises(StateLost, match=r"status 3.*Start again with the first step"):
            await interpreter.execute("SUBMIT()", context="c")
    await interpreter.forget_context("c")
    assert (await interpreter.execute("SUBMIT(x=1)", context="c")).x == 1
    assert (await interpreter.execute("SUBMIT(x=2)")).x == 2


async def test_a_process_that_ends_between_executions_loses_the_state(interpreter: Interpreter) -> None:
    code = """
        import os, threading, time
        def end():
            while not os.path.exists("go"):
                time.sleep(0.01)
            os._exit(4)
        threading.Thread(target=end).start()
        """
    await interpreter.execute(HOLD_LOCK + dedent(code), context="c")
    await interpreter.execute("open('go', 'w').close()\n" + TAKE_LOCK)  # the end of the process releases the lock
    # The error is CodeCrashed if the driver has not yet noticed the end.
    with pytest.raises((StateLost, CodeCrashed), match="status 4"):
        await interpreter.execute("SUBMIT()", context="c")
    with pytest.raises(StateLost, match="status 4"):
        await interpreter.execute("SUBMIT()", context="c")


async def test_a_forgotten_context_starts_empty(interpreter: Interpreter) -> None:
    await interpreter.forget_context("c")  # an unknown context
    for has_ended in (False, True):
        await interpreter.execute(HOLD_LOCK, context="c")
        await interpreter.forget_context("c")
        if has_ended:
            await interpreter.execute(TAKE_LOCK)
        assert (await interpreter.execute("SUBMIT(known='held' in globals())", context="c")).known is False
        await interpreter.execute(TAKE_LOCK)
    heard = asyncio.Event()
    running = asyncio.ensure_future(
        interpreter.execute("print('on')\n" + STUBBORN, context="c", on_output=lambda *_: heard.set())
    )
    await asyncio.wait_for(heard.wait(), HANG_SECONDS)
    await interpreter.forget_context("c")
    with pytest.raises(CodeError):
        await running
    assert (await interpreter.execute("SUBMIT(x=1)", context="c")).x == 1


# A thread of the first execution waits for the second one, and then tries to submit a result for it.
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
    "the function that the first finds": """
submit = SUBMIT
def forge():
    submit(x="forged")
""",
    "the function that the second finds": """
def forge():
    SUBMIT(x="forged")
""",
    "a thread of its own": """
def forge():
    thread = threading.Thread(target=lambda: SUBMIT(x="forged"))
    thread.start()
    thread.join()
""",
    # This code tries as tokens all texts that it finds in the driver and in running threads, in both executions.
    "every token that it finds": """
import json, os, re, sys
def read(thing, name):
    try:
        return getattr(thing, name)
    except Exception:
        return None
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
                left += [read(thing, name) for name in dir(thing) if not name.startswith("__")]
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


async def test_a_thread_of_an_earlier_execution_cannot_submit_for_a_later_one(interpreter: Interpreter) -> None:
    for name, forgery in FORGERIES.items():
        await interpreter.execute(FIRST.replace("{forge}", forgery), context=name)
        result = await interpreter.execute("go.set()\ndone.wait()\nSUBMIT(x='later')", context=name)
        assert result.x == "later", name
        assert (await interpreter.execute("y = 1", context=name)).outputs == {}, name


async def test_threads_in_a_context_belong_to_the_execution_that_started_them(interpreter: Interpreter) -> None:
    """Check threads that an earlier execution's pool starts now, and threads that are started by threads."""
    await interpreter.execute(
        "import _thread, threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(4)\ndef rest(): time.sleep(1000)",
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
time.sleep(1000)
"""


@pytest.mark.full
async def test_the_state_survives_a_lost_interrupt_of_a_submitting_thread(interpreter: Interpreter) -> None:
    """Check a lost interrupt. An interrupt that arrives just before the main thread sleeps is lost in the same way."""
    await interpreter.execute("kept = 1", context="c")
    assert (await interpreter.execute(INTERRUPT_LOST, context="c")).outputs == {"x": 1}
    assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1


async def test_a_thread_of_an_earlier_execution_continues_to_work(provider: SandboxProvider) -> None:
    async with provider.interpreter(tools={"add": lambda a, b: a + b}) as interpreter:
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


async def test_classes_can_be_pickled_and_tracebacks_show_the_right_lines(
    interpreter: Interpreter,
) -> None:
    code = "import dataclasses, pickle\n@dataclasses.dataclass\nclass Point:\n    x: int\ndata = pickle.dumps(Point(3))"
    await interpreter.execute(code, context="c")
    assert (await interpreter.execute("SUBMIT(x=pickle.loads(data).x)", context="c")).x == 3
    await interpreter.execute("def fail():\n    raise ValueError('first')  # of the first", context="c")
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("x = 1\nfail()  # of the second", context="c")
    assert "# of the first" in caught.value.traceback
    assert "# of the second" in caught.value.traceback
    assert caught.value.line == 2
