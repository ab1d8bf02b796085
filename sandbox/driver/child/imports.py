"""Imports that an interrupt has struck: what they leave behind is put right, so that the next import is whole.

The import machinery takes the module that was being imported out of `sys.modules` again. It leaves the submodules that
a package had imported by then, and an import of the package anew does not bind their names, since it finds them there.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MODULES = sys.modules  # for code may put anything in its place, and Python goes on with this
IMPORT_MACHINERY = "<frozen importlib._bootstrap>"


class ImportWatcher:
    """Finds modules as others do, and changes some of them once they are imported: `actions`, by the modules' names."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[Any], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Finds a module of which something is to be changed, and none other."""
        action = self.actions.get(name)
        if action is None:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                action(module)

            spec.loader.exec_module = execute_and_change
        return spec


def list_imports(frame: Any) -> list[tuple[str, Any]]:
    """The names of the modules that are being imported where the frame is, the innermost first, and what is there."""
    imports: list[tuple[str, Any]] = []
    while frame is not None:
        # By the frames, not by who is initializing: what other threads import goes on.
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == IMPORT_MACHINERY:
            name = frame.f_locals.get("name")
            imports.append((name, MODULES.get(name)))
        frame = frame.f_back
    return imports


def repair_imports(imports: list[tuple[str, Any]]) -> None:
    """Makes the next import of these modules whole, once the code that was interrupted has ended."""
    for name, module in imports:
        try:
            if MODULES.get(name) is None:
                _remove_submodules(name)
            elif MODULES[name] is module and not module.__spec__._initializing:
                _bind_to_parent(name, module)  # what comes last in an import
        except Exception:
            pass  # the code may have put anything there


def _remove_submodules(package: str) -> None:
    names = [name for name in list(MODULES) if name.startswith(f"{package}.")]
    if not any(_is_extension(MODULES.get(name)) for name in names):  # many refuse to be loaded a second time
        for name in names:
            MODULES.pop(name, None)


def _is_extension(module: Any) -> bool:
    from importlib.machinery import ExtensionFileLoader

    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader)


def _bind_to_parent(name: str, module: Any) -> None:
    parent, _, child = name.rpartition(".")
    if parent in MODULES and child not in vars(MODULES[parent]):
        setattr(MODULES[parent], child, module)
