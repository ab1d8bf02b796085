"""Tests of interrupted imports, and of imports in later executions of the context."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Launch = Callable[..., Any]

PAUSE = "import sys, time\nprint('pausing', flush=True)\ntime.sleep(sys.pause)\n"


def write_package(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def run(driver: Any, number: int, code: str) -> Any:
    """Run code in the context and return the submitted fields."""
    driver.send(driver.execution(number, code, context="c"))
    return driver.submitted(number)


def interrupt_import(launch: Launch, cwd: Path, code: str) -> Any:
    """Start a driver, cancel code in a context during a pause of an import, and disable further pauses."""
    driver = launch().start(cwd)
    run(driver, 1, "import sys; sys.pause = 1000; SUBMIT()")
    driver.send(driver.execution(2, code, context="c"))
    driver.until("output", 2)
    driver.send(driver.frame("cancel", 2))
    assert driver.end(2)[0] == "cancelled"
    run(driver, 3, "sys.pause = 0; SUBMIT()")
    return driver


def test_an_interrupted_package_is_imported_again_with_its_submodules(launch: Launch, tmp_path: Path) -> None:
    init = "from .part import *\n" + PAUSE + "__all__ = part.__all__\n"
    write_package(tmp_path / "whole", __init__=init, part="__all__ = ['X']\nX = 1\n")
    driver = interrupt_import(launch, tmp_path, "import whole")
    code = "import whole; SUBMIT(x=whole.X, same=whole.part is sys.modules['whole.part'])"
    assert run(driver, 4, code) == {"x": 1, "same": True}


def test_every_interrupted_package_is_imported_again(launch: Launch, tmp_path: Path) -> None:
    write_package(tmp_path / "outer", __init__="from . import a\nimport inner\nX = a.X\n", a="X = 1\n")
    write_package(tmp_path / "inner", __init__="from .b import *\n" + PAUSE + "X = b.X\n", b="X = 2\n")
    driver = interrupt_import(launch, tmp_path, "import outer")
    assert run(driver, 4, "import outer; SUBMIT(x=[outer.X, outer.inner.X])") == {"x": [1, 2]}


def test_modules_imported_before_the_interrupt_stay(launch: Launch, tmp_path: Path) -> None:
    write_package(tmp_path / "library", __init__="from . import done\n", done="X = []\n", slow=PAUSE + "Y = 3\n")
    driver = interrupt_import(launch, tmp_path, "import library.done as done; done.X.append(1); import library.slow")
    assert run(driver, 4, "import library.slow; SUBMIT(x=library.done.X, y=library.slow.Y)") == {"x": [1], "y": 3}


def test_an_import_in_another_thread_continues(launch: Launch, tmp_path: Path) -> None:
    wait = "import os, time\nfrom . import part\nprint('pausing', flush=True)\n"
    wait += "while not os.path.exists('go'): time.sleep(0.01)\nX = 4\n"
    write_package(tmp_path / "slow", __init__=wait, part="")
    code = """
import threading, time
def load():
    import slow
thread = threading.Thread(target=load)
thread.start()
time.sleep(1000)
"""
    driver = interrupt_import(launch, tmp_path, code)
    (tmp_path / "go").touch()
    code = "part = sys.modules['slow.part']; thread.join(); import slow; SUBMIT(x=slow.X, same=slow.part is part)"
    assert run(driver, 4, code) == {"x": 4, "same": True}


def test_a_package_with_a_compiled_module_keeps_it(launch: Launch, tmp_path: Path) -> None:
    """Check a compiled module, because many of them, such as numpy's, cannot be loaded twice in a process."""
    part = "import sys\nsys.loads = getattr(sys, 'loads', 0) + 1\nX = 5\n"
    write_package(tmp_path / "compiled", __init__="from . import _json, part\n" + PAUSE + "X = part.X\n", part=part)
    # The compiled module of the package is a copy of one of the standard library.
    code = "import importlib.util, shutil\nshutil.copy(importlib.util.find_spec('_json').origin, 'compiled/_json.so')"
    driver = interrupt_import(launch, tmp_path, f"{code}\nimport compiled")
    assert run(driver, 4, "import compiled; SUBMIT(x=compiled.X, loads=sys.loads)") == {"x": 5, "loads": 1}
