"""Code that prepares a sandbox runs once in it, and each execution is a fork of its process."""

import asyncio
import importlib
import time
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import CodeCrashed, CodeError, ExecutionTimeout, LanguageModel, PrepareError, SandboxLost, StateLost
from rlm_batch.blocks.language_model.model_access import ModelAccess
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

# Says where it runs, takes a while, and leaves a name, a function and something that can be changed.
PREPARE = """
import os, random, time
time.sleep(0.3)
process = os.getpid()
found = []
def triple(x):
    return 3 * x
def hand_back():
    SUBMIT(asked=ask(1))
"""


def open_prepared(provider: SandboxProvider, code: str = PREPARE, **options: Any) -> Interpreter:
    """An interpreter whose executions are forks of what the code has prepared; tools answer what they are asked."""
    names = {name: options.pop(name) for name in ("timeout", "seed") if name in options}
    preparation = Preparation(dedent(code), **names)
    return provider.interpreter(timeout=20, tools={"ask": lambda x: x}, prepare=preparation, **options)


async def test_each_execution_has_the_names_and_changes_its_own_copy_alone(provider: SandboxProvider) -> None:
    async with open_prepared(provider) as one:
        code = "found.append(i); SUBMIT(found=found, tripled=triple(i), process=process, own=os.getpid())"
        results = await asyncio.gather(*(one.execute(code, {"i": i}) for i in range(12)))
        assert [(result.found, result.tripled) for result in results] == [([i], 3 * i) for i in range(12)]
        assert len({result.process for result in results}) == 1
        assert len({result.own for result in results} - {results[0].process}) == 12


@pytest.mark.every_provider
async def test_a_context_is_a_fork_too_and_keeps_its_state(provider: SandboxProvider) -> None:
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
    "a deaf timeout": ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(9)", ExecutionTimeout),
}


async def test_how_one_execution_ends_touches_neither_the_others_nor_what_is_prepared(
    provider: SandboxProvider,
) -> None:
    async with open_prepared(provider) as one:
        sibling = asyncio.create_task(one.execute("time.sleep(2.5); SUBMIT(process=process)"))
        processes = {(await one.execute("SUBMIT(process=process)")).process}
        for code, kind in ENDS.values():
            with pytest.raises(kind):
                await one.execute(code, timeout=0.5 if kind is ExecutionTimeout else 20)
            processes.add((await one.execute("SUBMIT(process=process)")).process)
        assert processes == {(await sibling).process}


async def test_what_an_execution_leaves_running_ends_with_it(provider: SandboxProvider) -> None:
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


async def test_what_it_prints_is_told_once_and_stands_in_no_result(provider: SandboxProvider) -> None:
    said: list[tuple[str, str]] = []
    one = open_prepared(provider, "import sys; print('ready'); print('beware', file=sys.stderr)")
    one.on_prepare_output = lambda stream, text: said.append((stream, text))
    async with one:
        result = await one.execute("print('running')")
        assert (result.meta.stdout, result.meta.stderr) == ("running\n", "")
    assert sorted(said) == [("stderr", "beware\n"), ("stdout", "ready\n")]


async def test_functions_that_it_defines_find_submit_and_tools_when_the_code_calls_them(
    provider: SandboxProvider,
) -> None:
    async with open_prepared(provider) as one:
        assert (await one.execute("hand_back()")).asked == 1
        result = await one.execute("import threading; threading.Thread(target=hand_back).start(); time.sleep(10)")
        assert result.asked == 1


@pytest.mark.every_provider
async def test_it_finds_the_volume_and_what_it_saves_there_is_no_executions(
    provider: SandboxProvider, volume_name: str
) -> None:
    with_volume = provider.model_copy(update={"volume_name": volume_name})
    prepare = "save_to_volume('table.txt', '42')\ntable = int(load_from_volume('table.txt'))"
    async with open_prepared(with_volume, prepare) as one:
        result = await one.execute("save_to_volume('own.txt', 'x'); SUBMIT(table=table)")
    assert (result.table, result.meta.files) == (42, ("own.txt",))
    async with with_volume.interpreter(timeout=20) as another:
        assert (await another.execute("SUBMIT(here=list_volume())")).here == ["own.txt", "table.txt"]


# ------------------------------------------------------------------------------------------------------ what goes wrong

FAILING = {
    "an error": ("import nowhere_at_all", "raised ModuleNotFoundError (line 1): No module named 'nowhere_at_all'"),
    "no Python": ("x = = 1", "is not valid Python (line 1)"),
    "exit": ("import sys\nsys.exit('no licence')", "called exit(no licence) (line 2)"),
    "os._exit": ("import os; os._exit(0)", "exited with status 0 before prepare had ended: look for os._exit"),
    "a crash": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    "a timeout": ("import time\ntime.sleep(1000)", "still running (line 2) after its prepare_timeout of 1 s"),
    "threads": (
        (
            "from threading import Thread; from time import sleep\n"
            "for name in ('pump', 'valve'): Thread(target=sleep, args=(999,), name=name, daemon=name > 'q').start()"
        ),
        "left these threads running: pump, valve",
    ),
    "threads without a name": (
        "import _thread, time\nfor _ in range(20): _thread.start_new_thread(time.sleep, (1000,))",
        "left these threads running: 20 without a name",
    ),
    "SUBMIT": ("SUBMIT(x=1)", "'SUBMIT' is not defined. SUBMIT, queries and tools are there when the code runs"),
    "a query": ("llm_query('?')", "'llm_query' is not defined. SUBMIT, queries and tools are there when the code runs"),
    "a tool": ("ask(1)", "name 'ask' is not defined"),
}


EVERYWHERE = ("an error", "a timeout")


@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=pytest.mark.every_provider if name in EVERYWHERE else ()) for name in FAILING]
)
async def test_what_goes_wrong_in_it_is_its_own_error_and_no_code_runs(provider: SandboxProvider, what: str) -> None:
    code, said = FAILING[what]
    one = open_prepared(provider, f"print('on'); {code}", timeout=1 if what == "a timeout" else 20)
    begun = time.monotonic()
    with pytest.raises(PrepareError) as caught:
        await one.execute("raise AssertionError")
    assert said in str(caught.value)
    assert time.monotonic() - begun < 40
    assert caught.value.stdout == ("" if what == "no Python" else "on\n")
    with pytest.raises(SandboxLost, match="shut down"):  # it is gone, and the error is not tried again
        await one.execute("SUBMIT()")
    assert caught.value.retry_rule == "never"


async def test_it_may_end_early_and_leave_threads_that_have_ended(provider: SandboxProvider) -> None:
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


async def test_memory_that_it_asks_for_in_vain_is_said(small_provider: SandboxProvider) -> None:
    with pytest.raises(
        PrepareError, match=r"(ran out of|want of) memory.* or give the sandbox more with memory|SIGKILL"
    ):
        await open_prepared(small_provider, "x = bytearray(64 << 30)").execute("SUBMIT()")


async def execute_on_and_on(one: Interpreter, code: str) -> None:
    while True:
        await one.execute(code)


async def test_when_what_was_prepared_is_lost_the_next_execution_says_so_and_asks_for_a_new_sandbox(
    provider: SandboxProvider,
) -> None:
    # It sees to its own end: nothing else in a local sandbox can reach it.
    prepare = """
    import os, signal
    def look(*_):
        if os.path.exists("go"):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGALRM)
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    """
    is_running, is_lost = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_running.set()
        await is_lost.wait()

    async with open_prepared(provider, prepare) as one, asyncio.timeout(60):
        one.tools["wait"] = wait
        running = asyncio.create_task(one.execute("wait(); SUBMIT(x=ask(1))"))  # timers are no fork's
        await is_running.wait()
        with pytest.raises(SandboxLost, match="prepare had run in was killed by signal 14: run it in a new sandbox"):
            await execute_on_and_on(one, "open('go', 'w').close()")
        assert not one.is_alive
        is_lost.set()
        assert (await running).x == 1  # who runs already runs on, and is answered


# ------------------------------------------------------------------------------------------------------ random numbers

DRAW = "SUBMIT(drawn=[random.random(), random.randrange(1 << 30)])"


async def draw(provider: SandboxProvider, seed: int | None, count: int = 20) -> list[tuple[float, int]]:
    async with open_prepared(provider, seed=seed) as one:
        results = await asyncio.gather(*(one.execute(DRAW, index=i) for i in range(count)))
    return [tuple(result.drawn) for result in results]


async def test_each_execution_draws_numbers_of_its_own(provider: SandboxProvider) -> None:
    first, second = await draw(provider, None), await draw(provider, None)
    assert len({*first, *second}) == 40


async def test_with_a_seed_each_draws_the_same_again_by_its_number(provider: SandboxProvider) -> None:
    first = await draw(provider, 7)
    assert len({*first}) == 20
    assert await draw(provider, 7) == first
    assert await draw(provider, 7, 5) == first[:5]
    assert not {*first} & {*await draw(provider, 8)}


# Stand in for modules whose global generators a fork would share.
GENERATORS = """
import sys, types
for name, function in (("numpy", None), ("numpy.random", "seed"), ("torch", "manual_seed")):
    module = sys.modules[name] = types.ModuleType(name)
    if function is not None:
        seeds = module.seeds = []
        setattr(module, function, seeds.append)
sys.modules["numpy"].random = sys.modules["numpy.random"]
"""


async def test_numpys_and_torchs_generators_are_seeded_where_they_are_there(provider: SandboxProvider) -> None:
    async with open_prepared(provider, GENERATORS, seed=3) as one:
        code = "SUBMIT(numpy=sys.modules['numpy.random'].seeds, torch=sys.modules['torch'].seeds)"
        results = [await one.execute(code, index=i % 2) for i in range(4)]
    for result in results:
        ((words,), (number,)) = result.numpy, result.torch
        assert all(0 <= word < 1 << 32 for word in words)
        assert 0 <= number < 1 << 63
    assert results[0].outputs == results[2].outputs != results[1].outputs == results[3].outputs


async def test_the_generators_of_a_context_go_on_from_step_to_step(provider: SandboxProvider) -> None:
    async with open_prepared(provider, seed=7) as one:
        steps = [(await one.execute(DRAW, context="c", index=0)).drawn for _ in range(3)]
        assert len({tuple(step) for step in steps}) == 3
        assert (await one.execute(DRAW, index=0)).drawn == steps[0]


async def test_what_it_has_made_outlives_the_end_of_each_execution(provider: SandboxProvider) -> None:
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


async def test_a_thread_that_nobody_knows_takes_no_result_from_a_context(provider: SandboxProvider) -> None:
    code = """
    def submit():
        try:
            SUBMIT(y=1)
        except BaseException:
            pass
    start(submit, ())
    time.sleep(0.5)
    SUBMIT(y=2)
    """
    async with open_prepared(provider, "import time\nfrom _thread import start_new_thread as start") as one:
        assert (await one.execute(dedent(code), context="main")).y == 2


async def test_neither_a_default_timeout_of_sockets_nor_closed_streams_end_it(provider: SandboxProvider) -> None:
    prepare = "import os, socket\nsocket.setdefaulttimeout(0.2)\nos.close(1)\nos.close(2)"
    async with open_prepared(provider, prepare) as one:
        for _ in range(3):
            result = await one.execute("import time\ntime.sleep(0.5)\nprint('heard')\nSUBMIT(x=1)")
            assert (result.x, result.meta.stdout) == (1, "heard\n")


@pytest.mark.own_machine
async def test_what_it_left_running_stays_when_the_process_between_has_ended(provider: SandboxProvider) -> None:
    prepare = """
    import subprocess, time
    command = "(while sleep 0.1; do echo >> beats; done) & sleep 0.5"
    shell = subprocess.Popen(command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    def count():
        return len(open("beats").read())
    time.sleep(0.3)
    """
    look = """
    time.sleep(1)
    before = count()
    time.sleep(1)
    SUBMIT(is_there=count() > before)
    """
    async with open_prepared(provider, prepare) as one:
        for _ in range(2):
            assert (await one.execute(dedent(look))).is_there


@pytest.mark.own_machine
async def test_what_it_left_running_stays_although_its_parent_ends_while_executions_are_forked(
    provider: SandboxProvider,
) -> None:
    prepare = """
    import os, time
    for number in range(20):
        if os.fork() == 0:
            if os.fork():
                time.sleep(0.3 + number / 40)
                os._exit(0)
            while True:
                with open(f"beats-{number}", "a") as file:
                    file.write("x")
                time.sleep(0.1)
    def count():
        return [os.path.getsize(f"beats-{number}") for number in range(20)]
    """
    look = """
    before = count()
    time.sleep(1)
    SUBMIT(are_there=[now > then for then, now in zip(before, count())])
    """
    async with open_prepared(provider, prepare) as one:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            await one.execute("pass")
        assert (await one.execute(dedent(look))).are_there == [True] * 20


@pytest.mark.full
async def test_with_a_seed_the_code_of_a_recursive_query_draws_by_who_asks_and_how_many_that_has_asked(
    provider: SandboxProvider, chat: ChatServer
) -> None:
    importlib.import_module("litellm")  # before any time is counted
    importlib.import_module("rlm_batch.blocks.language_model.dspy_rlm")
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
                result = await one.execute(code, index=index, queries=queries, timeout=60)
                drawn[index] = [result.own, *" ".join(result.asked).split()]
        return drawn

    first = await draw([0, 1])
    assert [len(drawn) for drawn in first.values()] == [8, 8]
    assert len({number for drawn in first.values() for number in drawn}) == 16
    assert await draw([1]) == {1: first[1]}


# What is left open, by whom, and the text that the next execution reads in the file `out`.
LEFT_OPEN = {
    "a file that it has opened": ("log = open('out', 'a')", "log.write('x')"),
    "a file in a dict of its": ("files = {}", "files['a'] = open('out', 'w'); files['a'].write('x')"),
    "a file that a module has": ("", "import math; math.file = open('out', 'w'); math.file.write('x')"),
    "a process": (
        "import multiprocessing.util",
        """
        import multiprocessing, time
        def write():
            time.sleep(0.3)
            open('out', 'w').write('x')
        multiprocessing.get_context('fork').Process(target=write).start()
        """,
    ),
    "a log's buffer": (
        "import logging.handlers",
        """
        handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler('out'))
        handler.target.terminator = ''
        logging.getLogger().addHandler(handler)
        logging.warning('x')
        """,
    ),
}


@pytest.mark.parametrize("what", LEFT_OPEN)
async def test_what_an_execution_has_left_open_is_written_at_its_end(provider: SandboxProvider, what: str) -> None:
    prepare, code = LEFT_OPEN[what]
    async with open_prepared(provider, prepare) as one:
        await one.execute(dedent(code))
        assert (await one.execute("SUBMIT(text=open('out').read())")).text == "x"


@pytest.mark.parametrize("text", ["'a' * 10", "'a' * 10_000"])
async def test_what_is_in_a_cycle_or_a_module_is_written_at_the_end_without_it_too(
    provider: SandboxProvider, text: str
) -> None:
    code = f"""
    import math
    math.file = open('module', 'w')
    math.file.write({text})
    cycle = [open('cycle', 'w')]
    cycle.append(cycle)
    cycle[0].write({text})
    """
    async with provider.interpreter(timeout=20) as one:
        await one.execute(dedent(code))
        result = await one.execute(f"SUBMIT(right=[open(n).read() == {text} for n in ('module', 'cycle')])")
        assert result.right == [True, True]


async def test_names_that_it_has_defined_stay_its_own_and_those_of_a_step_stay_that_ones(
    provider: SandboxProvider,
) -> None:
    define = "def report(x): return ['mine', x]\ndef display(x): return ['mine', x]"
    use = "SUBMIT(both=[report(1), display(2)])"
    async with open_prepared(provider, define) as one:
        assert (await one.execute(use)).both == [["mine", 1], ["mine", 2]]
    async with provider.interpreter(timeout=20) as one:
        await one.execute(define, context="c")
        assert (await one.execute(use, context="c")).both == [["mine", 1], ["mine", 2]]
        with pytest.raises(CodeError):
            await one.execute(use)  # the driver's take other arguments


async def test_what_only_has_the_name_of_numpy_or_torch_is_no_generator(provider: SandboxProvider) -> None:
    names = "'numpy', 'numpy.random', 'torch'"
    prepare = f"import sys, types\nfor name in ({names}):\n    sys.modules[name] = types.ModuleType(name)"
    async with open_prepared(provider, prepare) as one:
        assert (await one.execute("SUBMIT(x=1)")).x == 1
