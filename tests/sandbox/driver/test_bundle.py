"""The driver is one program for any Python from 3.9 on, of modules that have the standard library alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.sandbox import driver_bundle
from rlm_batch.sandbox.driver_bundle import (
    DRIVER_LOADER,
    MODULES,
    ZYGOTE_MODULES,
    build_driver_code,
    build_driver_text,
    compress_driver,
)

FOLDER = Path(driver_bundle.__file__).parent
SOURCES = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts): path.read_text()
    for room in ("driver", "wire")
    for path in sorted((FOLDER / room).rglob("*.py"))
    if path.name != "__init__.py"
}
EVERY = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def test_every_module_is_sent() -> None:
    assert sorted(ZYGOTE_MODULES) == sorted(SOURCES)
    assert ZYGOTE_MODULES[: len(MODULES)] == MODULES


@EVERY
def test_it_compiles_as_python_3_9(source: str) -> None:
    ast.parse(source, feature_version=(3, 9))


@EVERY
def test_it_imports_the_standard_library_and_its_own_modules_alone(source: str) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= set(sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").partition(".")[0] in sys.stdlib_module_names


@EVERY
def test_it_evaluates_no_annotation(source: str) -> None:
    """`int | None` in a signature is an error in 3.9, unless annotations are text."""
    first = next(node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom))
    assert (first.module, first.names[0].name) == ("__future__", "annotations")


def test_the_program_as_a_whole_compiles_as_python_3_9() -> None:
    ast.parse(build_driver_text().decode(), feature_version=(3, 9))


def test_nothing_in_the_code_says_where_it_was_built() -> None:
    assert str(FOLDER).encode() not in build_driver_code()
    assert str(FOLDER).encode() not in build_driver_text()


def test_both_forms_load_the_same_program_and_leave_no_module_behind() -> None:
    program = """
import marshal, sys

data = sys.stdin.buffer.read()
names = {"__name__": "driver"}
exec(marshal.loads(data) if sys.argv[1] == "code" else compile(data, "driver", "exec"), names)
assert not [name for name in sys.modules if "rlm" in name], sys.modules
print(names["main"].__code__.co_filename, names["main"].__doc__)
"""
    printed = [
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, form], input=data, capture_output=True, check=True
        ).stdout
        for form, data in (("code", build_driver_code()), ("text", build_driver_text()))
    ]
    assert printed[0] == printed[1]
    assert printed[0].startswith(b"<driver>/driver/main.py Runs the driver")


@pytest.mark.parametrize("magic", ["this Python's", "another's"])
def test_a_python_of_another_version_than_the_hosts_takes_the_text(magic: str) -> None:
    code, text = compress_driver()
    if magic == "this Python's":
        text = b"not looked at"
    else:
        code = b"not looked at"
    program = f"""
import _frozen_importlib_external, sys

if {magic != "this Python's"}:
    _frozen_importlib_external.MAGIC_NUMBER = b"other"
data = sys.stdin.buffer.read()
code, text = data[:{len(code)}], data[{len(code)}:]
{DRIVER_LOADER}
print(found["main"].__doc__)
"""
    done = subprocess.run([sys.executable, "-ISBc", program], input=code + text, capture_output=True, check=True)
    assert done.stdout.startswith(b"Runs the driver")
