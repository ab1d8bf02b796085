"""Tests that the code's main module resembles that of `python file.py`: it has a file, and processes can import it."""

from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from rlm_batch import CodeCrashed, CodeError, LocalSandbox
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

SOURCES = """
    import inspect, io, logging, sys, traceback, warnings
    class Model:
        def fit(self):
            return 1  # of the method
    def fail():
        raise ValueError  # of the function
    logged, printed, sys.stderr, stderr = io.StringIO(), io.StringIO(), io.StringIO(), sys.stderr
    logging.basicConfig(stream=logged, force=True)
    try:
        fail()
    except ValueError:
        logging.exception("failed")
        traceback.print_exc(file=printed)
    warnings.simplefilter("always")
    warnings.warn("look")  # of the warning
    warned, sys.stderr = sys.stderr.getvalue(), stderr
    SUBMIT(
        model=inspect.getsource(Model), fit=inspect.getsource(Model.fit), fail=inspect.getsource(fail),
        logged="# of the function" in logged.getvalue(), printed="# of the function" in printed.getvalue(),
        warned="# of the warning" in warned,
    )
    """
FILE = """
    import argparse, os, runpy, subprocess, sys
    from pathlib import Path
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=0.5)
    if __name__ == "__main__" and len(sys.argv) == 1:
        again = [sys.executable, __file__, "--lr", "3"]
        SUBMIT(
            text=Path(__file__).read_text(), here=Path(__file__).resolve().parent == Path.cwd().resolve(),
            lr=parser.parse_args().lr, again=subprocess.run(again, capture_output=True, text=True).stdout,
            name=runpy.run_path(__file__)["__name__"], spec=__spec__,
        )
    if __name__ == "__main__":
        print(parser.parse_args().lr)
    """
# A started process has to import functions, a class, a variable of the execution and a value of the code.
PROCESSES = """
    import dataclasses, multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    {await_}
    @dataclasses.dataclass
    class Point:
        x: int
    factor = given * 2
    def scale(point):
        return Point(point.x * factor)
    {guard}
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context({method!r})) as executor:
            scaled = [point.x for point in executor.map(scale, [Point(1), Point(2)])]
        SUBMIT(scaled=scaled)
    """
TESTS = """
    import doctest, importlib, os, subprocess, sys, unittest
    from pathlib import Path
    def double(x):
        \"\"\"
        >>> double(2)
        {expected}
        \"\"\"
        return 2 * x
    class TestDouble(unittest.TestCase):
        def test_two(self):
            self.assertEqual(double(2), {expected})
    if __name__ == "__main__":
        tools = [["doctest", "-v"], ["unittest", "-v"]]
        statuses = [subprocess.run([sys.executable, "-m", *tool, __file__]).returncode for tool in tools]
        name = Path(__file__).stem
        os.environ["PYTHONDONTWRITEBYTECODE"] = ""
        subprocess.run([sys.executable, "-c", f"import {{name}}"], check=True)  # makes a file in __pycache__
        imported = importlib.import_module(name)
        ran = unittest.main(exit=False, verbosity=2).result
        SUBMIT(
            statuses=statuses, imported=imported.double(2), has_passed=ran.wasSuccessful(), count=ran.testsRun,
            failed=doctest.testmod().failed,
        )
    """
GUARD = 'if __name__ == "__main__":'


async def test_inspect_tracebacks_logs_and_warnings_show_source_lines(interpreter: Interpreter) -> None:
    expected = {
        "model": "class Model:\n    def fit(self):\n        return 1  # of the method\n",
        "fit": "    def fit(self):\n        return 1  # of the method\n",
        "fail": "def fail():\n    raise ValueError  # of the function\n",
        "logged": True, "printed": True, "warned": True,
    }  # fmt: skip
    for context in (None, "c", "c"):
        assert (await interpreter.execute(dedent(SOURCES), context=context)).outputs == expected, context
    code = "import inspect; SUBMIT(fail=inspect.getsource(fail))"
    assert (await interpreter.execute(code, context="c")).fail == expected["fail"]


async def test_source_lines_follow_python(interpreter: Interpreter) -> None:
    with pytest.raises(CodeError) as failed:
        await interpreter.execute("import sys\n\x0cdef f():\n    raise KeyError('x' + '\u2028')\n\nf()")
    assert failed.value.traceback.index("    f()\n") < failed.value.traceback.index("    raise KeyError(")
    source = "class A:\r\n    x = 1\r\nimport inspect; SUBMIT(inspect.getsource(A))"
    assert (await interpreter.execute(source, context="c")).output == "class A:\n    x = 1\n"


async def test_code_finds_its_file_in_its_folder(interpreter: Interpreter) -> None:
    code = dedent(FILE).lstrip()
    for context in (None, "c", "c"):
        fields: dict[str, Any] = (await interpreter.execute(code, context=context)).outputs
        assert fields == {
            "text": code, "here": True, "lr": 0.5, "again": "3\n", "name": "<run_path>", "spec": None,
        }, context  # fmt: skip
        if context is None:
            assert (await interpreter.execute("import os; SUBMIT(files=os.listdir())")).files == []


async def test_test_tools_run_the_tests_in_the_codes_file(interpreter: Interpreter, tmp_path: Path) -> None:
    for context in (None, "c", "c"):  # The same file name would give the next code the modules of the code before.
        for expected in (4, 5):
            code, has_passed = dedent(TESTS).format(expected=expected), expected == 4
            collected: dict[str, Any] = {"collect": ["**"], "collect_to": tmp_path}
            result = await interpreter.execute(code, context=context, **({} if context else collected))
            assert result.outputs == {
                "statuses": [0, 0] if has_passed else [1, 1], "imported": 4, "has_passed": has_passed, "count": 1,
                "failed": 0 if has_passed else 1,
            }  # fmt: skip
            assert not result.meta.collected, context
    main = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert {}\nunittest.main()"
    assert (await interpreter.execute(main.format(1))).outputs == {}
    with pytest.raises(CodeCrashed, match=r"called exit\(1\) \(line 5\) .*'FAILED \(failures=1\)'") as failed:
        await interpreter.execute(main.format(0))
    assert failed.value.exit_code == 1


async def test_pytest_runs_the_tests_in_the_codes_file() -> None:
    code = """
        import pytest, subprocess, sys
        def test_sum():
            assert sum([1, 2]) == {expected}
        if __name__ == "__main__":
            status = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__]).returncode
            SUBMIT(statuses=[int(pytest.main([__file__, "-q"])), status])
        """
    async with LocalSandbox(packages=["environment"]).interpreter(timeout=2 * HANG_SECONDS) as interpreter:
        for expected, status in ((3, 0), (4, 1)):
            result = await interpreter.execute(dedent(code).format(expected=expected), context="c")
            assert result.statuses == [status, status], result.meta.stdout


def skip_without_semaphores(provider: SandboxProvider) -> None:
    if getattr(provider, "isolation", None) == "landlock":
        pytest.skip("this level has no semaphores")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("guard", [GUARD, "if True:"], ids=["guarded", "not guarded"])
async def test_spawned_processes_find_the_codes_definitions(provider: SandboxProvider, method: str, guard: str) -> None:
    skip_without_semaphores(provider)
    if method == "forkserver" and getattr(provider, "isolation", None) != "bubblewrap":
        pytest.skip("below pytest's own folder a path is too long for the socket of a fork server")
    code = dedent(PROCESSES).format(method=method, guard=guard, await_="")
    awaiting = dedent(PROCESSES).format(method=method, guard=guard, await_="import asyncio; await asyncio.sleep(0)")
    async with provider.interpreter(timeout=2 * HANG_SECONDS) as interpreter:
        for text in (code, awaiting):
            assert (await interpreter.execute(text, {"given": 5})).scaled == [10, 20]
    async with provider.interpreter(timeout=2 * HANG_SECONDS) as interpreter:
        definitions, last = code.split(guard)
        definitions = f"try:\n{indent(definitions, '  ')}\nexcept ImportError:\n  pass"
        await interpreter.execute(definitions + "\nopen('count', 'a').write('1')", {"given": 5}, context="c")
        assert (await interpreter.execute(guard + last, context="c")).scaled == [10, 20]
        assert (await interpreter.execute("SUBMIT(open('count').read())", context="c")).output == "1"


@pytest.mark.full
async def test_spawned_processes_find_the_definitions_of_prepare(provider: SandboxProvider) -> None:
    skip_without_semaphores(provider)
    definitions, last = dedent(PROCESSES).format(method="spawn", guard=GUARD, await_="").split(GUARD)
    preparation = Preparation("given = 5\n" + definitions)
    async with provider.interpreter(timeout=2 * HANG_SECONDS, prepare=preparation) as interpreter:
        for _ in range(2):
            assert (await interpreter.execute(GUARD + last)).scaled == [10, 20]
