"""Tests that the driver is one program for Python 3.9 and later, of modules that need only the standard library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.sandbox import driver_bundle
from rlm_batch.sandbox.driver.main import main
from rlm_batch.sandbox.driver_bundle import (
    MODULES,
    TERMINAL_MODULES,
    ZYGOTE_MODULES,
    build_driver_code,
    build_driver_text,
    pack_driver,
)

FOLDER = Path(driver_bundle.__file__).parent
SOURCES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path.read_text()
    for room in ("driver", "wire")
    for path in sorted((FOLDER / room).rglob("*.py"))
    if path.name != "__init__.py"
}


def test_every_module_is_sent() -> None:
    assert {*ZYGOTE_MODULES, *TERMINAL_MODULES} == SOURCES.keys()
    for modules in (ZYGOTE_MODULES, TERMINAL_MODULES):
        assert modules[: len(MODULES)] == MODULES


def test_the_driver_compiles_as_python_3_9_and_imports_only_the_standard_library() -> None:
    ast.parse(build_driver_text().decode(), feature_version=(3, 9))
    for name, source in SOURCES.items():
        tree = ast.parse(source, feature_version=(3, 9))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        # `int | None` in a signature is an error in 3.9, unless annotations are strings.
        first = imports[0]
        assert isinstance(first, ast.ImportFrom), name
        assert (first.module, first.names[0].name) == ("__future__", "annotations"), name
        for node in imports:
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""] if not node.level else []
            assert {module.partition(".")[0] for module in modules} <= set(sys.stdlib_module_names), name


def test_both_forms_are_the_same_program_without_build_paths() -> None:
    program = """
import marshal, sys

data = sys.stdin.buffer.read()
names = {"__name__": "driver"}
exec(marshal.loads(data) if sys.argv[1] == "code" else compile(data, "driver", "exec"), names)
assert not [name for name in sys.modules if "rlm" in name], sys.modules
print(names["main"].__code__.co_filename, names["main"].__doc__)
"""
    printed: list[bytes] = []
    for form, data in (("code", build_driver_code()), ("text", build_driver_text())):
        assert str(FOLDER).encode() not in data
        command = [sys.executable, "-ISc", program, form]
        printed.append(subprocess.run(command, input=data, capture_output=True, check=True).stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith(b"<driver>/driver/main.py ")


@pytest.mark.parametrize("is_code", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
def test_text_runs_on_every_python_and_code_names_the_python_that_it_needs(*, is_own: bool, is_code: bool) -> None:
    driver = pack_driver(sys.version.split()[0] if is_code else "3.9.1")
    program = f"""
import _frozen_importlib_external, sys

if {not is_own}:
    _frozen_importlib_external.MAGIC_NUMBER = b"other"
data = sys.stdin.buffer.read()
{driver.loader}
main = found["main"].__code__
print(main.co_filename, main.co_firstlineno, next(line for *_, line in main.co_lines() if line != main.co_firstlineno))
"""
    done = subprocess.run([sys.executable, "-ISBc", program], input=driver.data, capture_output=True, check=False)
    if is_code and not is_own:
        assert done.stderr.decode().startswith("the sandbox's Python is not 3.")
    else:
        lines = [line for *_, line in main.__code__.co_lines() if line is not None]
        first = lines[0]
        expected = f"<driver>/driver/main.py {first} {next(line for line in lines if line != first)}\n"
        assert done.stdout.decode() == expected
