"""Tests that code can change anything in `sys`, builtins and the library without losing its result, output or state."""

from textwrap import dedent

import pytest

from rlm_batch import CodeError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

CHANGES = {
    "no stream": "import sys; del sys.stdout, sys.stderr, sys.__stdout__",
    "None for streams": "import sys; sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None",
    "a Tee": """
        import dataclasses, io, sys
        @dataclasses.dataclass
        class Tee:
            first: object
            second: object
            def write(self, text):
                self.first.write(text)
                self.second.write(text)
        sys.stdout = Tee(sys.stdout, io.StringIO())
        """,
    "a stream that raises": """
        import sys
        class Broken:
            def flush(self):
                raise SystemExit(3)
            def __getattr__(self, name):
                raise RuntimeError(name)
            __hash__ = __bool__ = None
        sys.stdout = sys.stderr = Broken()
        """,
    "closed streams": "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
    "closed descriptors": "import os, sys; sys.stdout.flush(); os.closerange(0, 3)",
    "no modules": "import sys; sys.modules.clear()",
    "other modules": "import sys; sys.modules.update(threading=5, atexit=None, traceback=7); sys.modules = None",
    "nothing for imports": "import sys; sys.path = sys.meta_path = sys.path_hooks = sys.argv = None",
    "builtins": """
        import builtins
        for name in ("open", "len", "type", "isinstance", "Exception", "BaseException", "getattr", "__import__"):
            setattr(builtins, name, None)
        """,
    "os": "import os; os.getpid = lambda: 7; os.write = os.read = os._exit = os.close = os.environ = os.stat = None",
    "a frozen clock": "import time; time.time = time.sleep = time.monotonic = lambda *a: 1 / 0",
    "json and traceback": """
        import json, linecache, traceback
        json.dumps = json.loads = traceback.format_exception = linecache.getline = lambda *a, **k: 1 / 0
        """,
    "exits": "import atexit, threading; atexit.register(lambda: 1 / 0); threading._shutdown = None",
    "little recursion": "import sys; sys.setrecursionlimit(40)",
    "tracing": "import sys; sys.setprofile(print)",
    "garbage collection": "import gc; gc.set_threshold(1); gc.enable = gc.disable = gc.collect = None",
    "an audit hook": """
        import sys
        def refuse(event, _):
            if event.startswith(("import", "open", "os.", "exec", "compile")) and is_refusing:
                raise RuntimeError(event)
        is_refusing = False
        sys.addaudithook(refuse)
        """,
}
# Changes after which a traceback is its last line alone, because Python's own library cannot format it.
WITHOUT_FRAMES = ("no modules", "other modules", "builtins", "json and traceback")


@pytest.mark.parametrize("name", CHANGES)
async def test_code_that_changes_python_keeps_result_output_and_state(interpreter: Interpreter, name: str) -> None:
    code = "print('shown', flush=True)\n" + dedent(CHANGES[name]).strip()
    ending = "raise KeyError('its own')"
    for context in (None, "c"):
        if context is not None:
            await interpreter.execute("kept = 5", context=context)
        result = await interpreter.execute(code + "\nSUBMIT(x=1)", context=context)
        assert result.outputs == {"x": 1}
        assert "shown" in result.meta.stdout
        if context is not None:
            assert (await interpreter.execute("SUBMIT(kept=kept)", context=context)).kept == 5
        result = await interpreter.execute(code + "\n6 * 7", context=context and "value")
        assert result.meta.value == 42
        assert "shown" in result.meta.stdout
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(f"{code}\n{ending}", context=context and "error")
        error = caught.value
        assert (error.type, error.line) == ("KeyError", len(code.splitlines()) + 1)
        assert ending in error.traceback or name in WITHOUT_FRAMES
        assert error.traceback.endswith("KeyError: 'its own'\n")
