"""The driver as one program for a sandbox: code objects for a Python of the host's version, text for other versions.

Both forms load the driver's modules and define `main`. A sandbox gets one of them. Code objects start 55 ms sooner.
Text is smaller, and runs on every Python: a sandbox gets it until another sandbox of the same origin has named its
Python.
"""

import importlib.util
import marshal
import sys
import zlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, ClassVar, cast

from .wire.loading import LOAD
from .wire.names import DRIVER_FILE_PREFIX

# Modules in import order.
MODULES = (
    "wire.names", "wire.strict_json", "wire.context_shape", "wire.nonfinite", "wire.submission",
    "wire.frames", "wire.displays", "wire.pipes", "wire.process_table", "wire.collection", "wire.loading",
    "wire.python_directory",
    "driver.processes", "driver.orphans", "driver.confinement", "driver.event_loop", "driver.host_wire",
    "driver.volume_commits",
    "driver.child.environment", "driver.child.submit", "driver.child.volume",
    "driver.child.answer_format", "driver.child.query_options", "driver.child.queries",
    "driver.child.report", "driver.child.displays", "driver.child.limits", "driver.child.evaluation.last_expression",
    "driver.child.main_module", "driver.child.thread_execution",
    "driver.child.channel", "driver.child.evaluation.coroutines", "driver.child.forking.fork_safety",
    "driver.child.open_files", "driver.child.runner", "driver.child.forking.fork_service",
    "driver.child.fresh_python", "driver.output_stream",
    "driver.child_process", "driver.collection", "driver.collectors", "driver.fork_server", "driver.shared_folders",
    "driver.supervisor",
    "driver.main",
)  # fmt: skip
# Programs that run only on this machine, so remote sandboxes do not receive them.
ZYGOTE_MODULES = (
    *MODULES, "driver.zygote.rehearsal", "driver.zygote.namespaces", "driver.zygote.child_ahead", "driver.zygote.main",
)  # fmt: skip
TERMINAL_MODULES = (*MODULES, "driver.terminal")
NO_COLUMNS, NO_LINE = 13, 15  # kinds of entries in a code object's table of positions
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
    sys.exit("the sandbox's Python is not {".".join(map(str, sys.version_info[:2]))}, as in the sandbox before")
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
def pack_driver(*, is_code: bool) -> PackedDriver:
    """Return the driver as code objects, for a Python of the host's version, or as text."""
    # The columns of the code's positions are a third of its size.
    program = marshal.dumps(_drop_columns(marshal.loads(build_driver_code()))) if is_code else build_driver_text()
    loader = f"import sys, zlib\n{LOAD_CODE if is_code else LOAD_TEXT}\n{RUN_PROGRAM}"
    return PackedDriver(zlib.compress(program, 9), loader)


def is_own_python(version: str) -> bool:
    """Return whether a Python of this version, such as 3.11.4, runs the host's code objects."""
    return version.split(".")[:2] == [str(number) for number in sys.version_info[:2]]


class DriverChoice:
    """The form of the driver for one sandbox.

    Attributes:
        packed: The driver: code objects if an earlier sandbox of the same `origin` had the host's Python, else text.
    """

    _versions: ClassVar[dict[Hashable, str]] = {}  # the Python of the latest sandbox, by origin

    def __init__(self, origin: Hashable) -> None:
        self._origin = origin
        self._is_confirmed = False
        self.packed = pack_driver(is_code=is_own_python(self._versions.get(origin, "")))

    def confirm(self, version: str) -> None:
        """Note the sandbox's Python, for later sandboxes of the origin."""
        self._versions[self._origin], self._is_confirmed = version, True

    def end(self) -> None:
        """Forget the origin's Python if the driver did not start: an image may have changed."""
        if not self._is_confirmed:
            self._versions.pop(self._origin, None)


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
    parts = tuple(
        (module, _rename_file(loader.get_code(name), f"{DRIVER_FILE_PREFIX}{module.replace('.', '/')}.py"))
        for module, name, loader in _find_loaders(modules)
    )
    program = compile(PROGRAM, f"{DRIVER_FILE_PREFIX}__init__.py", "exec", dont_inherit=True)
    constants = tuple(parts if constant == PARTS else constant for constant in program.co_consts)
    return marshal.dumps(program.replace(co_consts=constants))


def _find_loaders(modules: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield each module's name in the program, its name on the host, and its loader."""
    for module in modules:
        name = f"{__package__}.{module}"
        spec: Any = importlib.util.find_spec(name)
        yield module, name, spec.loader


def _rename_file(code: CodeType, file_name: str) -> CodeType:
    constants = tuple(_rename_file(item, file_name) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=file_name, co_consts=constants)


def _drop_columns(item: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(map(_drop_columns, cast("tuple[Any, ...]", item)))
    if not isinstance(item, CodeType):
        return item
    # An entry has a kind, the number of its instructions, and the distance from the previous line
    # (Objects/locations.md of CPython).
    table, line = bytearray(), item.co_firstlineno
    for start, end, next_line in item.co_lines():
        for position in range(start, end, 16):
            kind = NO_LINE if next_line is None else NO_COLUMNS
            table.append(0x80 | kind << 3 | (min(end - position, 16) // 2 - 1))
            if next_line is not None:
                distance, line = next_line - line, next_line
                number = -distance << 1 | 1 if distance < 0 else distance << 1
                while number > 63:
                    table.append(0x40 | number & 0x3F)
                    number >>= 6
                table.append(number)
    return item.replace(co_linetable=bytes(table), co_consts=_drop_columns(item.co_consts))
