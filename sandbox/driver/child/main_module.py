"""The code's main module, and the source file and lines that Python's library looks up for it."""

from __future__ import annotations

import os
import sys

from ...wire.names import CODE_FILE_PREFIX
from .environment import MODULES
from .evaluation import TOP_LEVEL_AWAIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .environment import ImportWatcher

CODE_NAME = "<code>"
# A process that multiprocessing starts with `spawn` or `forkserver` runs this program instead of the code's file. The
# program runs the newest source as Python would, without `if __name__ == "__main__":` up to the first process that the
# code starts. Of a context's earlier sources, it runs only imports, definitions and assignments.
START_PROGRAM = """
def _load(data, namespace):
    import ast, marshal, traceback
    path, sources, variables, function_names = marshal.loads(data)
    definitions = (
        ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
        ast.Pass,
    )
    def has_only_definitions(statement):
        if not isinstance(statement, (ast.If, ast.Try, ast.ExceptHandler)):
            return isinstance(statement, definitions)
        for block in ("body", "orelse", "finalbody", "handlers"):
            for nested in getattr(statement, block, []):
                if not has_only_definitions(nested):
                    return False
        return True
    class Submitted(SystemExit):
        pass
    def make_function(name):
        def call(*_arguments, **_options):
            if name == "SUBMIT":
                raise Submitted
            raise RuntimeError(f"{name} works in the code's own process only: hand the value back to it first")
        return call
    def run(program, name):
        result = eval(compile(program, name, "exec", FLAGS, dont_inherit=True), namespace)
        if result is not None:
            __import__("asyncio").run(result)
    for name in function_names:
        namespace[name] = make_function(name)
    namespace.update(variables, __file__=path)
    *earlier_sources, (newest_name, newest_source) = sources
    for name, source in earlier_sources:
        for statement in ast.parse(source).body:
            if has_only_definitions(statement):
                try:
                    run(ast.Module([statement], []), name)
                except Exception:
                    pass
    try:
        run(newest_source, newest_name)
    except Submitted:
        pass
    except BaseException as error:
        if "bootstrapping phase" not in str(error):
            traceback.print_exc()

_load(DATA, globals())
del _load
"""


class MainModule:
    """The code's `__main__`, which is like that of `python file.py`.

    `module` is the module itself. `sources` has the source texts by their names in tracebacks. The file is written only
    if the code may open it, because a file slows down the execution.
    """

    def __init__(self) -> None:
        import builtins

        self.module: ModuleType = type(sys)("__main__")
        vars(self.module).update({"__builtins__": builtins, "__cached__": None, "__file__": CODE_NAME})
        self.sources: dict[str, str] = {}
        self._variables: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._path = ""  # apparent path of the newest source's file
        self._process_id = 0  # id of the process that wrote `_files`
        self._executions = 0  # executions of that process so far
        self._files: set[str] = set()  # paths of the sources' files

    def install(self, finder: ImportWatcher) -> None:
        """Register the module as `__main__`, and its lines with Python's library."""
        MODULES["__main__"] = self.module
        finder.actions["linecache"] = lambda _: self.show_lines()
        finder.actions["multiprocessing.spawn"] = self._replace_preparation

    def reset(self) -> None:
        self.sources.clear()
        self._variables.clear()
        self._process_id = 0

    def begin(self, folder: str, name: str, source: str) -> None:
        """Register a compiled source that is about to run; `folder` is the apparent folder of its file."""
        process_id = os.getpid()
        if process_id != self._process_id:
            self._process_id, self._executions, self._files = process_id, 0, set()
            sys.argv = [self._path]
        has_own_argv = vars(sys).get("argv") != [self._path]  # the code has changed it
        # Each execution has its own file, because Python does not import a changed file again.
        self._executions += 1
        self._path = f"{folder}/{CODE_FILE_PREFIX}{process_id}_{self._executions}.py"
        if not has_own_argv:
            sys.argv = [self._path]
        vars(self.module)["__file__"] = self._path
        self.sources[name] = source.replace("\r\n", "\n").replace("\r", "\n")
        if "__file__" in source or "argv" in source:  # The code may open its file.
            try:
                self._write(self._path, source.encode("utf-8", "surrogatepass"))
            except OSError:
                pass  # Code that opens the file gets the error.
        self.show_lines(name)

    def add_names(self, variables: dict[str, Any], functions: dict[str, Any]) -> None:
        """Record the names for processes that the code spawns. In them, functions except SUBMIT raise an error."""
        self._variables.update(variables)
        self._functions = functions

    def show_lines(self, *names: str) -> None:
        """Let tracebacks, `inspect` and warnings find the lines of the sources with these names, by default of all."""
        linecache: Any = MODULES.get("linecache")
        if linecache is None:
            return  # `linecache` is not imported yet; its import calls this method (`install`)
        try:
            for name in names or self.sources:
                source = self.sources[name]
                lines = [f"{line}\n" for line in source.removesuffix("\n").split("\n")]
                for path in (name, self._path):
                    linecache.cache[path] = (len(source), None, lines, path)
        except BaseException:
            pass  # The code has changed `linecache`, so it gets no lines.

    def remove_files(self) -> None:
        if self._process_id == os.getpid():
            for path in self._files:
                try:
                    os.unlink(path)
                except OSError:
                    pass  # the code has removed it

    def _write(self, path: str, data: bytes) -> None:
        self._files.add(path)
        with open(path, "wb") as file:
            file.write(data)

    def _replace_preparation(self, spawn: Any) -> None:
        """Let processes that `multiprocessing.spawn` starts find the code's functions and variables."""
        prepare = spawn.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            if data.get("init_main_from_path") == self._path:
                path = f"{self._path.removesuffix('.py')}-start.py"
                data["init_main_from_path"] = path
                if path not in self._files:  # The program is written once for all processes of an execution.
                    self._write(path, self._build_start_program())
            return data

        spawn.get_preparation_data = get_preparation_data

    def _build_start_program(self) -> bytes:
        import marshal

        variables: dict[str, Any] = {}
        function_names: list[str] = []
        for name, value in {**self._functions, **self._variables}.items():
            try:
                marshal.dumps(value)
                variables[name] = value
            except ValueError:  # not marshallable: a function, or a list that the code put an object into
                function_names.append(name)
        data = marshal.dumps((self._path, list(self.sources.items()), variables, function_names))
        return START_PROGRAM.replace("FLAGS", str(TOP_LEVEL_AWAIT)).replace("DATA", repr(data)).encode()
