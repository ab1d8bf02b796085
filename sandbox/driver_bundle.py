"""The driver in one piece, as a sandbox is sent it: code objects for a Python of the host's version, text for another.

Both forms are one program, which loads the driver's modules and has `main` among its names. A sandbox whose Python has
the host's magic number (`importlib.util.MAGIC_NUMBER`) takes the code and starts some 20 ms sooner than from text.
"""

import importlib.util
import marshal
import zlib
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from .wire.loading import LOAD
from .wire.names import DRIVER_FILE_PREFIX

# In the order in which they import each other.
MODULES = (
    "wire.names", "wire.remedies", "wire.strict_json", "wire.nonfinite", "wire.submission", "wire.frames",
    "wire.displays", "wire.pipes", "wire.process_table", "wire.collection", "wire.loading", "wire.python_directory",
    "driver.processes", "driver.orphans", "driver.confinement", "driver.event_loop", "driver.host_wire",
    "driver.volume_commits",
    "driver.child.environment", "driver.child.submit", "driver.child.volume",
    "driver.child.queries", "driver.child.report", "driver.child.imports", "driver.child.displays",
    "driver.child.limits", "driver.child.file_changes", "driver.child.evaluation.last_expression",
    "driver.child.main_module", "driver.child.code_settings", "driver.child.thread_execution",
    "driver.child.channel", "driver.child.evaluation.coroutines", "driver.child.forking.fork_safety",
    "driver.child.open_files", "driver.child.runner", "driver.child.forking.fork_service",
    "driver.child.fresh_python", "driver.output_stream",
    "driver.child_process", "driver.collection", "driver.collectors", "driver.fork_server", "driver.shared_folders",
    "driver.supervisor",
    "driver.main",
)  # fmt: skip
# For this machine, and not sent elsewhere.
ZYGOTE_MODULES = (
    *MODULES, "driver.zygote.rehearsal", "driver.zygote.namespaces", "driver.zygote.child_ahead", "driver.zygote.main",
)  # fmt: skip
PARTS = "the driver's modules"  # stands in the program for pairs of a module's name and its text or code

PROGRAM = f"""{LOAD.format(prefix=DRIVER_FILE_PREFIX)}
main = load({PARTS!r}).main

if __name__ == "__main__":
    main()
"""

# Lines of a program that has what `compress_driver` gives as `code` and `text`: they leave its `main` in `found`.
DRIVER_LOADER = f"""
import marshal, zlib
from _frozen_importlib_external import MAGIC_NUMBER

if MAGIC_NUMBER == {importlib.util.MAGIC_NUMBER!r}:
    program = marshal.loads(zlib.decompress(code))
else:
    program = compile(zlib.decompress(text), "driver", "exec")
found = {{"__name__": "driver"}}
exec(program, found)
"""


@cache
def compress_driver() -> tuple[bytes, bytes]:
    """The driver, compiled for this Python and as text, each compressed by zlib."""
    return zlib.compress(build_driver_code(), 9), zlib.compress(build_driver_text(), 9)


@cache
def build_driver_text() -> bytes:
    """The program as text, for any Python from 3.9 on."""
    parts = tuple((module, loader.get_source(name)) for module, name, loader in _find_loaders(MODULES))
    return PROGRAM.replace(repr(PARTS), repr(parts)).encode()


@cache
def build_driver_code(modules: tuple[str, ...] = MODULES) -> bytes:
    """The program as a marshalled code object, for a Python with this one's magic number.

    Its `main` is that of the last of the modules. Their code is from Python's own cache where it is there; file names
    are as where the sandbox compiles it.
    """
    parts = tuple(
        (module, _rename_file(loader.get_code(name), f"{DRIVER_FILE_PREFIX}{module.replace('.', '/')}.py"))
        for module, name, loader in _find_loaders(modules)
    )
    program = compile(PROGRAM, f"{DRIVER_FILE_PREFIX}__init__.py", "exec", dont_inherit=True)
    constants = tuple(parts if constant == PARTS else constant for constant in program.co_consts)
    return marshal.dumps(program.replace(co_consts=constants))


def _find_loaders(modules: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Each module's name in the program, its name here, and its loader."""
    for module in modules:
        name = f"{__package__}.{module}"
        spec: Any = importlib.util.find_spec(name)
        yield module, name, spec.loader


def _rename_file(code: CodeType, file_name: str) -> CodeType:
    constants = tuple(_rename_file(item, file_name) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename=file_name, co_consts=constants)
