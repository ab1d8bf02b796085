"""Repair of imports that an interrupt stopped, so that the next import is complete.

Python removes the interrupted module from `sys.modules`, but keeps the submodules that a package had imported by then.
A new import of the package finds these submodules and does not bind their names in it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MODULES = sys.modules  # the import system keeps using this dict even if code replaces `sys.modules`
IMPORT_MACHINERY = "<frozen importlib._bootstrap>"


class ImportWatcher:
    """A finder that changes some modules after their import: `actions` maps module names to functions."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[Any], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module that has an action; return None for all others."""
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
    """Return the modules being imported in this frame and its callers, innermost first: names and modules so far."""
    imports: list[tuple[str, Any]] = []
    while frame is not None:
        # Check frames and not `_initializing`: the imports of other threads continue.
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == IMPORT_MACHINERY:
            name = frame.f_locals.get("name")
            imports.append((name, MODULES.get(name)))
        frame = frame.f_back
    return imports


def repair_imports(imports: list[tuple[str, Any]]) -> None:
    """Repair these modules for their next import. Call it after the interrupted code has ended."""
    for name, module in imports:
        try:
            if MODULES.get(name) is None:
                _remove_submodules(name)
            elif MODULES[name] is module and not module.__spec__._initializing:
                _bind_to_parent(name, module)  # the last step of an import
        except Exception:
            pass  # the code may have put anything there


def _remove_submodules(package: str) -> None:
    names = [name for name in list(MODULES) if name.startswith(f"{package}.")]
    if not any(_is_extension(MODULES.get(name)) for name in names):  # many extensions cannot be loaded twice
        for name in names:
            MODULES.pop(name, None)


def _is_extension(module: Any) -> bool:
    from importlib.machinery import ExtensionFileLoader

    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), ExtensionFileLoader)


def _bind_to_parent(name: str, module: Any) -> None:
    parent, _, child = name.rpartition(".")
    if parent in MODULES and child not in vars(MODULES[parent]):
        setattr(MODULES[parent], child, module)
