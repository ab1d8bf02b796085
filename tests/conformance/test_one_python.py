"""Tests that every Python that a sandbox's code starts has the code's imports, environment and settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from rlm_batch import CodeCrashed, PrepareError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation

from ..infra.waiting import HANG_SECONDS

pytestmark = pytest.mark.anyio

# This code starts Python in many ways, asks each one a question, and returns the answers that differ from its own.
ASK_CHILDREN = """
import os, subprocess, sys

def ask(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, **options)
    answer = done.stdout.strip() or done.stderr.strip()[-300:]
    return {} if answer == own else {f"{words[:2]} {options}": answer}

def run():
    program = QUESTION + "\\nprint(answer)"
    with open("asked.py", "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
        file.write("#!/usr/bin/env python3\\n" + program)
    different = {}
    for options in ({}, {"env": {}}, {"env": {"PATH": os.environ["PATH"]}}):
        for flag in ("-c", "-Ic", "-Ec", "-sc", "-Bc"):
            different.update(ask(sys.executable, flag, program, **options))
    for name in ("python", "python3", "./asked.py"):
        different.update(ask(name, *([] if name[0] == "." else ["-c", program])))
    return different

exec(QUESTION)
own = answer
different = run() if __name__ == "__main__" else {}
"""
IMPORTS = """
import sys
try:
    import pip
except ImportError:
    pip = None
import mine
found = getattr(pip, "__file__", None)  # in an image: here the machine's is not for the code
answer = f"{mine.VALUE} {sys.version_info[:2]} {sys.executable.rpartition('/')[0]} {sys.prefix} {found}"
"""


async def test_child_processes_import_the_same_modules_as_code(provider: SandboxProvider, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text("VALUE = 42\ndef double(x):\n    return 2 * x\n")
    changed_provider = provider.with_files(python_path=[str(tmp_path)])
    code = f"QUESTION = {IMPORTS!r}\n{ASK_CHILDREN}\nSUBMIT(different=different, own=own)"
    prepare = Preparation("import mine")
    for options in ({}, {"prepare": prepare}):
        async with changed_provider.interpreter(timeout=HANG_SECONDS, **options) as interpreter:  # type: ignore[arg-type]
            result = await interpreter.execute(code)
        assert result.different == {}
        assert result.own.startswith("42 ")


async def test_multiprocessing_workers_import_the_same_modules_as_code(
    provider: SandboxProvider, provider_name: str, tmp_path: Path
) -> None:
    if provider_name == "local-landlock":
        pytest.skip("there multiprocessing has no /dev/shm for its locks")
    tmp_path.chmod(0o755)
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    # A fork server listens at a path below TMPDIR, and the tests' TMPDIR is too long for a socket.
    methods = ["fork", "spawn", *(["forkserver"] if provider_name != "local-none" else [])]
    code = """
import multiprocessing, mine
if __name__ == "__main__":
    found = {}
    for method in methods:
        with multiprocessing.get_context(method).Pool(2) as pool:
            found[method] = pool.map(mine.double, [1, 2])
    SUBMIT(found=found)
"""
    async with provider.with_files(python_path=[str(tmp_path)]).interpreter(timeout=HANG_SECONDS) as interpreter:
        result = await interpreter.execute(code, {"methods": methods})
    assert result.found == {method: [2, 4] for method in methods}


ENVIRONMENT = {
    "TZ": "JST-9", "LC_ALL": "C", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "error::UserWarning",
    "PYTHONDEVMODE": "1", "PYTHONOPTIMIZE": "1", "PYTHONUTF8": "1", "PYTHONINTMAXSTRDIGITS": "700",
    "PYTHONIOENCODING": "latin-1:replace", "PYTHONUNBUFFERED": "1", "PYTHONPATH": "/usr/share", "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "x", "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1",
    "HOME": "/x",
}  # fmt: skip
# Each of these values depends on one of the variables above.
READ_AT_START = """
import locale, os, sys, time, warnings
answer = repr({
    "time zone": (time.tzname, time.localtime(0).tm_hour),
    "hashes": (hash("a"), sys.flags.hash_randomization),
    "warnings": [(action, kind.__name__) for action, _, kind, *_ in warnings.filters[:2]],
    "modes": (sys.flags.dev_mode, sys.flags.optimize, sys.flags.utf8_mode, sys.get_int_max_str_digits(), __debug__),
    "streams": [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "unbuffered": sys.stdout.write_through,
    "path": ("/usr/share" in sys.path, os.getcwd() in sys.path),
    "bytecode": sys.dont_write_bytecode,
    "locale": (locale.setlocale(locale.LC_CTYPE), sys.getfilesystemencoding()),
    "library": (os.getenv("OMP_NUM_THREADS"), os.path.expanduser("~")),
})
"""


async def test_variables_that_python_reads_at_startup_apply_to_code(provider: SandboxProvider) -> None:
    code = f"""
import ast, subprocess, sys
exec({READ_AT_START!r})
asked = subprocess.run([sys.executable, "-c", {READ_AT_START + "print(answer)"!r}], capture_output=True, text=True)
child = ast.literal_eval(asked.stdout)
own = ast.literal_eval(answer)
SUBMIT(different={{name: [own[name], child[name]] for name in own if own[name] != child[name]}}, own=own)
"""
    changed_provider = provider.model_copy(
        update={"environment": {key: SecretStr(value) for key, value in ENVIRONMENT.items()}}
    )
    for prepare in (None, Preparation("import json")):
        async with changed_provider.interpreter(timeout=HANG_SECONDS, prepare=prepare) as interpreter:
            for _ in range(2):
                result = await interpreter.execute(code)
                assert result.different == {}
                assert result.own["time zone"][0] == ["JST", "JST"]


async def test_an_error_names_the_variable_that_python_cannot_start_with(provider: SandboxProvider) -> None:
    changed_provider = provider.model_copy(update={"environment": {"PYTHONHASHSEED": SecretStr("banana")}})
    reason = "could not start with this environment: .*PYTHONHASHSEED"
    async with changed_provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        with pytest.raises(CodeCrashed, match=reason):
            await interpreter.execute("SUBMIT()")
    with pytest.raises(PrepareError, match=reason):
        async with changed_provider.interpreter(timeout=HANG_SECONDS, prepare=Preparation("import json")):
            pass


async def test_what_python_prints_when_it_starts_is_output_of_its_execution(provider: SandboxProvider) -> None:
    changed_provider = provider.model_copy(update={"environment": {"PYTHONWARNINGS": SecretStr("nonsense")}})
    async with changed_provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        for _ in range(4):  # from the third on, Python has started during the execution before
            result = await interpreter.execute("import time\ntime.sleep(0.3)\nSUBMIT()")
            assert "Invalid -W option ignored: invalid action: '[...]'" in result.meta.stderr


async def test_a_time_zone_takes_effect_without_a_new_python(provider: SandboxProvider) -> None:
    changed_provider = provider.model_copy(update={"environment": {"TZ": SecretStr("JST-9")}})
    async with changed_provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        result = await interpreter.execute(
            "import datetime\nSUBMIT(zone=datetime.datetime.now().astimezone().tzname())"
        )
    assert result.zone == "JST"
