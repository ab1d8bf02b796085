"""Tests of preparation code, which runs once in a sandbox; each execution is a fork of its process."""

import asyncio
import importlib
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeCrashed, CodeError, ExecutionTimeout, LanguageModel, PrepareError, SandboxLost, StateLost
from rlm_batch.blocks.language_model.model_access import ModelAccess
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.scripted_turns import FAILING_CHILD, make_script
from ..infra.waiting import HANG_SECONDS
from ..standins.openai_chat import ChatServer
from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

# This code records its process, and defines names, functions and a list that can be changed.
PREPARE = """
import os, random, time
process = os.getpid()
found = []
def triple(x):
    return 3 * x
def hand_back():
    SUBMIT(asked=ask(1))
"""


def open_prepared(provider: SandboxProvider, code: str = PREPARE, **options: Any) -> Interpreter:
    """Return an interpreter whose executions are forks of the process that ran `code`. Its tool `ask` echoes."""
    names = {name: options.pop(name) for name in ("timeout", "seed") if name in options}
    preparation = Preparation(dedent(code), **names)
    tools = {"ask": lambda x: x}
    return provider.interpreter(timeout=HANG_SECONDS, tools=tools, prepare=preparation, **options)


async def test_each_execution_has_a_private_copy_of_the_prepared_names(provider: SandboxProvider) -> None:
    async with open_prepared(provider) as one:
        code = "found.append(i); SUBMIT(found=found, tripled=triple(i), process=process, own=os.getpid())"
        results = await asyncio.gather(*(one.execute(code, {"i": i}) for i in range(12)))
        assert [(result.found, result.tripled) for result in results] == [([i], 3 * i) for i in range(12)]
        assert len({result.process for result in results}) == 1
        assert len({result.own for result in results} - {results[0].process}) == 12


async def test_a_context_has_the_prepared_names_and_keeps_its_state(provider: SandboxProvider) -> None:
    async with open_prepared(provider) as one:
        await one.execute("found.append('a')", context="a")
        await one.execute("found.append('b')", context="b")
        assert (await one.execute("SUBMIT(found=found)", context="a")).found == ["a"]
        assert (await one.execute("SUBMIT(found=found)")).found == []
        with pytest.raises(CodeCrashed):
            await one.execute("os._exit(1)", context="a")
        with pytest.raises(StateLost):
            await one.execute("SUBMIT(found=found)", context="a")
        assert (await one.execute("SUBMIT(found=found)", context="b")).found == ["b"]


ENDS = {
    "an error": ("1 / 0", CodeError),
    "os._exit": ("os._exit(3)", CodeCrashed),
    "a crash": ("import ctypes; ctypes.string_at(0)", CodeCrashed),
    "a kill": ("import signal; os.kill(os.getpid(), signal.SIGKILL)", CodeCrashed),
    "a timeout": ("time.sleep(1000)", ExecutionTimeout),
    "a deaf timeout": (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(999)",
        ExecutionTimeout,
    ),
}


async def test_an_executions_end_affects_neither_others_nor_the_prepared_process(
    provider: SandboxProvider,
) -> None:
    async with open_prepared(provider) as one:
        one.tools["wait"] = gate = Gate()
        sibling = asyncio.create_task(one.execute("wait(); SUBMIT(process=process)"))
        await gate.is_reached.wait()
        processes = {(await one.execute("SUBMIT(process=process)")).process}
        for code, kind in ENDS.values():
            with pytest.raises(kind):
                await one.execute(code, timeout=0.3 if kind is ExecutionTimeout else None)
            processes.add((await one.execute("SUBMIT(process=process)")).process)
        gate.open()
        assert processes == {(await sibling).process}


async def test_processes_left_by_an_execution_end_with_it(provider: SandboxProvider) -> None:
    leave = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open("left", "w").write(str(os.getpid()))
                time.sleep(1000)
            os._exit(0)
        while not os.path.exists("left") or not os.path.getsize("left"):
            time.sleep(0.01)
        SUBMIT()
        """
    look = """
        pid = open("left").read()
        is_there = os.path.exists(f"/proc/{pid}") if os.path.exists("/proc/self") else False
        SUBMIT(is_there=is_there)
        """
    async with open_prepared(provider) as one:
        await one.execute(dedent(leave))
        assert (await one.execute(dedent(look))).is_there is False


async def test_output_of_prepare_is_reported_once_and_in_no_result(provider: SandboxProvider) -> None:
    said: list[tuple[str, str]] = []
    one = open_prepared(provider, "import sys; print('ready'); print('beware', file=sys.stderr)")
    one.on_prepare_output = lambda stream, text: said.append((stream, text))
    async with one:
        result = await one.execute("print('running')")
        assert (result.meta.stdout, result.meta.stderr) == ("running\n", "")
    assert sorted(said) == [("stderr", "beware\n"), ("stdout", "ready\n")]


async def test_prepared_functions_can_call_submit_and_tools(
    provider: SandboxProvider,
) -> None:
    async with open_prepared(provider) as one:
        assert (await one.execute("hand_back()")).asked == 1
        result = await one.execute("import threading; threading.Thread(target=hand_back).start(); time.sleep(1000)")
        assert result.asked == 1


@pytest.mark.every_provider
async def test_prepare_uses_the_volume_and_its_files_belong_to_no_execution(
    provider: SandboxProvider, volume_name: str
) -> None:
    with_volume = provider.model_copy(update={"volume_name": volume_name})
    prepare = "save_to_volume('table.txt', '42')\ntable = int(load_from_volume('table.txt'))"
    async with open_prepared(with_volume, prepare) as one:
        result = await one.execute("save_to_volume('own.txt', 'x'); SUBMIT(table=table)")
    assert (result.table, result.meta.files) == (42, ("own.txt",))
    async with with_volume.interpreter() as another:
        assert (await another.execute("SUBMIT(here=list_volume())")).here == ["own.txt", "table.txt"]


# ------------------------------------------------------------------------------------------------------ what goes wrong

FAILING = {
    "an error": ("import nowhere_at_all", "raised ModuleNotFoundError (line 1): No module named 'nowhere_at_all'"),
    "a process of its own": (FAILING_CHILD, "\nValueError: of the child\n"),
    "no Python": ("x = = 1", "is not valid Python (line 1): invalid syntax\n"),
    "exit": ("import sys\nsys.exit('no licence')", "called exit(no licence) (line 2)"),
    "os._exit": ("import os; os._exit(0)", "exited with status 0 before prepare ended: check for os._exit"),
    "a crash": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    "a timeout": ("import time\ntime.sleep(1000)", "still running (line 2) after its timeout of 6 s"),
    "threads": (
        (
            "from threading import Thread; from time import sleep\n"
            "for name in ('pump', 'valve'): Thread(target=sleep, args=(999,), name=name, daemon=name > 'q').start()"
        ),
        "pump, valve",
    ),
    "threads without a name": (
        "import _thread, time\nfor _ in range(20): _thread.start_new_thread(time.sleep, (1000,))\ntime.sleep(0.5)",
        "20 without a name",
    ),
    "SUBMIT": ("SUBMIT(x=1)", "\nprepare has no SUBMIT, report, queries, tools or variables: use them in the code"),
    "a query": ("llm_query('?')", "\nprepare has no SUBMIT, report, queries, tools or variables: use them in the code"),
    "a tool": ("ask(1)", "\nprepare has no SUBMIT, report, queries, tools or variables: use them in the code"),
    "a notebook command": (
        "\n%matplotlib inline",
        "`%matplotlib inline` is a command of notebooks, and not Python: remove",
    ),
}


async def check_failure(provider: SandboxProvider, name: str) -> None:
    code, said = FAILING[name]
    # The timeout of six seconds allows for a busy machine: the code has to print before it sleeps.
    one = open_prepared(provider, f"print('on'); {code}", timeout=6 if name == "a timeout" else HANG_SECONDS)
    with pytest.raises(PrepareError) as caught:
        await one.execute("raise AssertionError")
    assert said in str(caught.value)
    assert caught.value.stdout == ("" if name in ("no Python", "a notebook command") else "on\n"), name
    with pytest.raises(SandboxLost, match="shut down"):
        await one.execute("SUBMIT()")
    assert caught.value.retry_rule == "never"


async def test_an_error_in_prepare_raises_prepare_error_and_no_code_runs(provider: SandboxProvider) -> None:
    await check_failure(provider, "an error")


async def test_other_failures_of_prepare_raise_prepare_error(provider: SandboxProvider) -> None:
    await check_failure(provider, "a timeout")  # without another sandbox at the same time
    await asyncio.gather(*(check_failure(provider, name) for name in FAILING if name not in ("an error", "a timeout")))


async def test_prepare_may_exit_early_after_its_threads_ended(provider: SandboxProvider) -> None:
    code = """
        import sys
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(4) as pool:
            squares = list(pool.map(lambda x: x * x, range(5)))
        sys.exit(0)
        """
    async with open_prepared(provider, code) as one:
        assert (await one.execute("SUBMIT(squares=squares)")).squares == [0, 1, 4, 9, 16]
        again = "with ThreadPoolExecutor(4) as pool: SUBMIT(list(pool.map(abs, [-1, -2])))"
        assert (await one.execute(again)).output == [1, 2]


async def test_out_of_memory_in_prepare_is_reported(small_provider: SandboxProvider) -> None:
    with pytest.raises(
        PrepareError, match=r"(ran out of|want of) memory.* or give the sandbox more with `memory|SIGKILL"
    ):
        await open_prepared(small_provider, "x = bytearray(64 << 30)").execute("SUBMIT()")


async def execute_on_and_on(one: Interpreter, code: str) -> None:
    while True:
        await one.execute(code)


async def test_losing_the_prepared_process_raises_sandbox_lost(
    provider: SandboxProvider,
) -> None:
    # The process ends itself, because nothing else in a local sandbox can reach it.
    prepare = """
    import os, signal
    def look(*_):
        if os.path.exists("go"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGALRM)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    """
    async with open_prepared(provider, prepare) as one, asyncio.timeout(HANG_SECONDS):
        one.tools["wait"] = gate = Gate()
        running = asyncio.create_task(one.execute("wait(); SUBMIT(x=ask(1))"))  # a fork does not inherit the timer
        await gate.is_reached.wait()
        with pytest.raises(SandboxLost, match=r"prepare had run in was killed by SIGALRM\. Run it in a new sandbox"):
            await execute_on_and_on(one, "open('go', 'w').close()")
        assert not one.is_alive
        gate.open()
        assert (await running).x == 1, "an execution that runs already runs on, and is answered"


async def test_a_new_execution_survives_the_loss_of_the_prepared_process(
    provider: SandboxProvider,
) -> None:
    # The second execution's process is still starting when the third fork's middle process kills the prepared one.
    prepare = """
    import os, signal, time
    prepared = os.getpid()
    def count():
        with open("forks", "a+") as file:
            file.write("x")
            if file.tell() == 3:
                os.kill(prepared, signal.SIGKILL)
    os.register_at_fork(before=count, after_in_child=lambda: time.sleep(0.5))
    """
    async with open_prepared(provider, prepare) as one, asyncio.timeout(HANG_SECONDS):
        assert (await one.execute("SUBMIT(x=1)")).x == 1
        assert (await one.execute("SUBMIT(x=2)")).x == 2
        with pytest.raises(SandboxLost, match="Run it in a new sandbox"):
            await one.execute("SUBMIT(x=3)")


# ------------------------------------------------------------------------------------------------------ random numbers

DRAW = "SUBMIT(drawn=[random.random(), random.randrange(1 << 30)])"


async def draw(provider: SandboxProvider, seed: int | None, count: int = 6) -> list[tuple[float, int]]:
    async with open_prepared(provider, seed=seed) as one:
        results = await asyncio.gather(*(one.execute(DRAW, index=i) for i in range(count)))
    return [tuple(result.drawn) for result in results]


async def test_a_seed_repeats_each_executions_random_numbers_by_its_number(
    provider: SandboxProvider,
) -> None:
    unseeded, first, again, fewer, other = await asyncio.gather(
        draw(provider, None), draw(provider, 7), draw(provider, 7), draw(provider, 7, 3), draw(provider, 8)
    )
    assert len({*unseeded, *await draw(provider, None)}) == 12
    assert len({*first, *other}) == 12
    assert again == first
    assert fewer == first[:3]
    async with open_prepared(provider, seed=7) as one:
        steps = [(await one.execute(DRAW, context="c", index=0)).drawn for _ in range(3)]
    assert len({tuple(step) for step in steps}) == 3
    assert tuple(steps[0]) == first[0]


# These modules replace numpy and torch, whose global generators a fork would share.
GENERATORS = """
import sys, types
for name, function in (("numpy", None), ("numpy.random", "seed"), ("torch", "manual_seed")):
    module = sys.modules[name] = types.ModuleType(name)
    if function is not None:
        seeds = module.seeds = []
        setattr(module, function, seeds.append)
sys.modules["numpy"].random = sys.modules["numpy.random"]
"""


async def test_generators_of_numpy_and_torch_are_seeded_if_installed(provider: SandboxProvider) -> None:
    async with open_prepared(provider, GENERATORS, seed=3) as one:
        code = "SUBMIT(numpy=sys.modules['numpy.random'].seeds, torch=sys.modules['torch'].seeds)"
        results = [await one.execute(code, index=i % 2) for i in range(4)]
    for result in results:
        ((words,), (number,)) = result.numpy, result.torch
        assert all(0 <= word < 1 << 32 for word in words)
        assert 0 <= number < 1 << 63
    assert results[0].outputs == results[2].outputs != results[1].outputs == results[3].outputs
    own = (
        "import sys, types\nfor name in ('numpy', 'numpy.random', 'torch'): sys.modules[name] = types.ModuleType(name)"
    )
    async with open_prepared(provider, own) as one:  # a user's modules of these names are not seeded
        assert (await one.execute("SUBMIT(x=1)")).x == 1


async def test_prepared_objects_outlive_each_execution(provider: SandboxProvider) -> None:
    prepare = """
    import atexit, os, tempfile, weakref
    folder = tempfile.TemporaryDirectory()
    text = open(os.path.join(folder.name, "text"), "w")
    text.write("once ")
    atexit.register(os.rmdir, folder.name)
    """
    use = "print(open(text.name).read(), end='')\nown = tempfile.TemporaryDirectory()\nprint(os.path.exists(own.name))"
    async with open_prepared(provider, prepare) as one:
        for _ in range(3):
            result = await one.execute(use + "\nSUBMIT(own=own.name)")
            assert result.meta.stdout == "once True\n"
            assert not (await one.execute("SUBMIT(there=os.path.exists(own))", {"own": result.own})).there
        with pytest.raises(CodeError):
            await one.execute("1 / 0")
        assert (await one.execute(use)).meta.stdout == "once True\n"


async def test_a_native_thread_cannot_take_a_result_from_a_context(provider: SandboxProvider) -> None:
    code = """
    import threading
    done = threading.Event()
    def submit():
        try:
            SUBMIT(y=1)
        except BaseException:
            pass
        done.set()
    start(submit, ())
    done.wait()
    SUBMIT(y=2)
    """
    async with open_prepared(provider, "from _thread import start_new_thread as start") as one:
        assert (await one.execute(dedent(code), context="main")).y == 2


async def test_the_prepared_process_survives_socket_timeouts_and_closed_streams(provider: SandboxProvider) -> None:
    prepare = "import os, socket\nsocket.setdefaulttimeout(0.01)\nos.close(1)\nos.close(2)"
    async with open_prepared(provider, prepare) as one:
        for _ in range(3):
            result = await one.execute("import time\ntime.sleep(0.1)\nprint('heard')\nSUBMIT(x=1)")
            assert (result.x, result.meta.stdout) == (1, "heard\n")


# The shell ends once the file `go` exists, and leaves a process that appends to the file `beats`.
SHELL = """
    import os, subprocess, time
    command = (
        "(while sleep 0.02; do echo >> beats; done) & while ! [ -e go ]; do sleep 0.02; done; echo over > over"
    )
    shell = subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not os.path.exists("beats"):
        time.sleep(0.01)
    """
# Each parent ends once the file with its number exists, and leaves a process that appends to a file.
PARENTS = """
    import os, time
    for number in range(10):
        if os.fork() == 0:
            if os.fork():
                while not os.path.exists(f"go-{number}"):
                    time.sleep(0.01)
                os._exit(0)
            while True:
                with open(f"beats-{number}", "a") as file:
                    file.write("x")
                time.sleep(0.1)
    def count():
        return [os.path.getsize(f"beats-{number}") for number in range(10)]
    while not all(os.path.exists(f"beats-{number}") for number in range(10)):
        time.sleep(0.01)
    """


async def test_processes_of_prepare_survive_the_end_of_their_parents(provider: SandboxProvider) -> None:
    async with open_prepared(provider, SHELL) as one:
        await one.execute("open('go', 'w').close()\nwhile not os.path.exists('over'): time.sleep(0.01)")
        grow = "size = os.path.getsize('beats')\nwhile os.path.getsize('beats') == size: time.sleep(0.01)"
        for _ in range(3):
            await one.execute(grow)
    async with open_prepared(provider, PARENTS) as one:
        for number in range(10):  # the parents end while further executions are forked
            await one.execute(f"open('go-{number}', 'w').close()")
            await one.execute("pass")
        grow = "first = count()\nwhile not all(now > then for then, now in zip(first, count())): time.sleep(0.01)"
        await one.execute(grow)


@pytest.mark.full
async def test_a_seed_repeats_the_random_numbers_of_recursive_queries(
    provider: SandboxProvider, chat: ChatServer
) -> None:
    importlib.import_module("litellm")  # imported before a time-out starts
    deeper = "' '.join(rlm_query_batched(['level two'] * 2))"
    chat.script = make_script(
        ("level two", "SUBMIT(answer=str(random.random()))"),
        ("level one", f"SUBMIT(answer=str(random.random()) + ' ' + {deeper})"),
    )
    code = "SUBMIT(own=str(random.random()), asked=[*rlm_query_batched(['level one'] * 2), rlm_query('level two')])"
    settings: dict[str, Any] = {"model": "openai/gpt-4o-mini", "api_key": "sk-x", "api_base": chat.url}
    access = ModelAccess(model=LanguageModel(**settings))

    async def draw(indexes: list[int]) -> dict[int, list[str]]:
        drawn: dict[int, list[str]] = {}
        async with open_prepared(provider, "import random", seed=7) as one:
            for index in indexes:
                queries = access.queries(one, index=index)
                result = await one.execute(code, index=index, queries=queries)
                drawn[index] = [result.own, *" ".join(result.asked).split()]
        return drawn

    first = await draw([0, 1])
    assert [len(drawn) for drawn in first.values()] == [8, 8]
    assert len({number for drawn in first.values() for number in drawn}) == 16
    assert await draw([1]) == {1: first[1]}


OPENING = "import logging.handlers, multiprocessing.util\nlog, files = open('log', 'a'), {}"
# Each code leaves something open. The next execution reads "x" in the file that has the code's name.
LEFT_OPEN = {
    "log": "log.write('x')",
    "dict": "files['a'] = open('dict', 'w'); files['a'].write('x')",
    "module": "import math; math.file = open('module', 'w'); math.file.write('x')",
    "process": """
        import multiprocessing, time
        def write():
            time.sleep(0.1)
            open('process', 'w').write('x')
        multiprocessing.get_context('fork').Process(target=write).start()
        """,
    "buffer": """
        handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler('buffer'))
        handler.target.terminator = ''
        logging.getLogger().addHandler(handler)
        logging.warning('x')
        """,
}


async def test_open_files_and_logs_are_flushed_at_an_executions_end(provider: SandboxProvider) -> None:
    async with open_prepared(provider, OPENING) as one:
        for name, code in LEFT_OPEN.items():
            await one.execute(dedent(code))
            assert (await one.execute("SUBMIT(open(name).read())", {"name": name})).output == "x", name
    code = """
        import math
        math.file = open('module', 'w')
        math.file.write(text)
        cycle = [open('cycle', 'w')]
        cycle.append(cycle)
        cycle[0].write(text)
        """
    async with provider.interpreter(timeout=HANG_SECONDS) as one:
        for text in ("a" * 10, "a" * 10_000):
            await one.execute(dedent(code), {"text": text})
            for name in ("module", "cycle"):
                assert (await one.execute("SUBMIT(open(name).read())", {"name": name})).output == text, name


async def test_code_may_define_functions_named_like_ours(
    provider: SandboxProvider,
) -> None:
    define = "def report(x): return ['mine', x]\ndef display(x): return ['mine', x]"
    use = "SUBMIT(both=[report(1), display(2)])"
    async with open_prepared(provider, define) as one:
        assert (await one.execute(use)).both == [["mine", 1], ["mine", 2]]
    async with provider.interpreter(timeout=HANG_SECONDS) as one:
        await one.execute(define, context="c")
        assert (await one.execute(use, context="c")).both == [["mine", 1], ["mine", 2]]
        with pytest.raises(CodeError):
            await one.execute(use)  # our functions take other arguments
