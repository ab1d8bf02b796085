"""The driver as one program for a sandbox: code objects for a Python of the host's version, text for other versions.

Both forms load the driver's modules and define `main`. Code objects start sooner; text runs on every Python.
"""

import importlib.util
import marshal
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

from .wire.loading import LOAD
from .wire.names import DRIVER_FILE_PREFIX

# Modules in import order.
MODULES = (
    "wire.names", "wire.strict_json", "wire.images", "wire.context_shape", "wire.nonfinite", "wire.frames",
    "wire.submission", "wire.pipes", "wire.process_table", "wire.collection", "wire.loading", "wire.python_directory",
    "driver.processes", "driver.orphans", "driver.confinement", "driver.event_loop", "driver.host_wire",
    "driver.volume_commits",
    "driver.child.environment", "driver.child.submit", "driver.child.channel", "driver.child.volume",
    "driver.child.answer_format", "driver.child.queries", "driver.child.displays",
    "driver.child.evaluation", "driver.child.main_module", "driver.child.forking", "driver.child.error_report",
    "driver.child.runner", "driver.child.fresh_python",
    "driver.collection", "driver.child_process", "driver.fork_server", "driver.shared_folders",
    "driver.supervisor",
    "driver.main",
)  # fmt: skip
# Programs that run only on this machine, so remote sandboxes do not receive them.
ZYGOTE_MODULES = (
    *MODULES, "driver.zygote.namespaces", "driver.zygote.child_ahead", "driver.zygote.main",
)  # fmt: skip
TERMINAL_MODULES = (*MODULES, "driver.terminal")
PARTS = "the driver's modules"  # the program's placeholder for pairs of a module's name and its text or code

PROGRAM = f"""{LOAD.format(prefix=DRIVER_FILE_PREFIX)}
main = load({PARTS!r}).main

if __name__ == "__main__":
    main()
"""

LOAD_TEXT = 'program = compile(zlib.decompress(data), "driver", "exec")'
LOAD_CODE = f"""
from _frozen_importlib_external import MAGIC_NUMBER
if MAGIC_NUMBER != {importlib.util.MAGIC_NUMBER!r}:
    sys.exit("the sandbox's Python is not {".".join(map(str, sys.version_info[:2]))}, as the host's")
import marshal
program = marshal.loads(zlib.decompress(data))
"""
RUN_PROGRAM = """
found = {"__name__": "driver"}
exec(program, found)
"""


@dataclass(frozen=True)
class PackedDriver:
    """One form of the driver.

    Attributes:
        data: The compressed program.
        loader: Lines of a program that has `data` in a variable of that name. They define `found["main"]`.
    """

    data: bytes
    loader: str


@cache
def pack_driver(python: str = "") -> PackedDriver:
    """Return the driver for a sandbox whose Python has this version, such as 3.11.4; "" if it is unknown."""
    is_code = python.split(".")[:2] == [str(number) for number in sys.version_info[:2]]
    if is_code:
        program, load = build_driver_code(), LOAD_CODE
    else:
        program, load = build_driver_text(), LOAD_TEXT
    return PackedDriver(zlib.compress(program, 9), f"import sys, zlib\n{load}\n{RUN_PROGRAM}")


@cache
def build_driver_text() -> bytes:
    """Return the program as text, for Python 3.9 or later."""
    parts = tuple((module, loader.get_source(name)) for module, name, loader in _find_loaders(MODULES))
    return PROGRAM.replace(repr(PARTS), repr(parts)).encode()


@cache
def build_driver_code(modules: tuple[str, ...] = MODULES) -> bytes:
    """Return the program as a marshalled code object, for a Python with the same magic number.

    The program's `main` is the last module's `main`. Python's bytecode cache provides the modules' code if possible.
    File names are the same as in code that the sandbox compiles from text.
    """
    parts: list[tuple[str, CodeType]] = []
    for module, name, loader in _find_loaders(modules):
        file_name = f"{DRIVER_FILE_PREFIX}{module.replace('.', '/')}.py"
        parts.append((module, _rename_file(loader.get_code(name), file_name)))
    program = compile(PROGRAM, f"{DRIVER_FILE_PREFIX}__init__.py", "exec", dont_inherit=True)
    constants: list[Any] = list(program.co_consts)
    constants[constants.index(PARTS)] = tuple(parts)
    return marshal.dumps(program.replace(co_consts=tuple(constants)))


def _find_loaders(modules: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield each module's name in the program, its full name and its loader."""
    for module in modules:
        name = f"{__package__}.{module}"
        spec: Any = importlib.util.find_spec(name)
        yield module, name, spec.loader


def _rename_file(code: CodeType, file_name: str) -> CodeType:
    """Return the code with another file name, also in the code of its functions."""
    constants: list[Any] = []
    for constant in code.co_consts:
        is_code = isinstance(constant, CodeType)
        constants.append(_rename_file(constant, file_name) if is_code else constant)
    return code.replace(co_filename=file_name, co_consts=tuple(constants))
