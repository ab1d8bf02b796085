"""A count of the rlm-batch functions that a batch of one execution enters on the host.

    python benchmarks/count_functions.py [--list | --way]

It runs `rlm-batch batch one.py --inputs in.csv` with one row in this process, with a temporary home, and records every
call in every thread of the process. The embedded Prefect server and the sandbox are separate processes, so their
functions are not counted. Class bodies, modules, comprehensions and generator expressions are not counted, either.

`--way` lists only the functions on the way of the execution. At four moments it records the functions on the stack,
and the functions that created the running task: when the code is sent, when its answer arrives, when its outcome is
written, and when its outcome is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("cli", "flows", "tasks", "blocks", "sandbox")
# The functions that send the code, take the answer, write the outcome and show it.
MOMENTS = {"LocalChannel._write", "DriverProtocol.receive", "Ledger.write_line", "ProgressDisplay.on_outcome"}
Frames = dict[CodeType, None]
makers: ContextVar[Frames] = ContextVar("makers")


class CallRecorder:
    """A profiler that keeps the code of every function that was entered, in order of first entry."""

    def __init__(self) -> None:
        self.codes: Frames = {}
        self.way: Frames = {}

    def start(self) -> None:
        """Record the calls of this thread and of every thread that starts later."""
        create_task = asyncio.BaseEventLoop.create_task

        def create_task_and_note(*args: Any, **options: Any) -> Any:
            token = makers.set(_list_callers(sys._getframe(1)))
            try:
                return create_task(*args, **options)
            finally:
                makers.reset(token)

        asyncio.BaseEventLoop.create_task = create_task_and_note  # type: ignore[method-assign]
        threading.setprofile(self._record_call)
        sys.setprofile(self._record_call)

    def _record_call(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self.codes.setdefault(frame.f_code)
            if frame.f_code.co_qualname in MOMENTS:
                self.way |= _list_callers(frame)

    def list_functions(self, *, on_way: bool = False) -> list[tuple[str, str]]:
        """Return the file and the qualified name of each rlm-batch function, once each, in order of first entry."""
        functions: dict[tuple[str, str], None] = {}
        for code in self.codes:
            if on_way and code not in self.way:
                continue
            path = Path(code.co_filename)
            is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "genexpr>"))
            if is_function and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in DIRECTORIES:
                functions.setdefault((f"{path.relative_to(ROOT)}:{code.co_firstlineno}", code.co_qualname))
        return list(functions)


def _list_callers(frame: FrameType | None) -> Frames:
    """Return the code of the frames on the stack, and of the frames that created the running task."""
    frames: Frames = dict(makers.get({}))
    while frame is not None:
        frames[frame.f_code] = None
        frame = frame.f_back
    return frames


def print_report(recorder: CallRecorder, arguments: argparse.Namespace) -> None:
    """Print the functions if an option asks for them, then their numbers by directory and in total."""
    sys.setprofile(None)
    functions = recorder.list_functions(on_way=arguments.way)
    if arguments.list or arguments.way:
        for number, (place, name) in enumerate(functions, 1):
            print(f"{number:4} {place} {name}")
    files = {place.partition(":")[0] for place, _name in functions}
    functions_in, files_in = (Counter(path.partition("/")[0] for path in paths) for paths in (dict(functions), files))
    for directory in DIRECTORIES:
        print(f"{directory}: {functions_in[directory]} functions in {files_in[directory]} files")
    print(f"in all: {len(functions)} functions in {len(files)} files")


def main() -> None:
    """Run the batch. The counts are printed at the end of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each function, in order of first entry")
    parser.add_argument("--way", action="store_true", help="print and count only those on the way of the execution")
    arguments = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    home = tempfile.TemporaryDirectory()
    os.environ |= {"HOME": home.name, "DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    os.chdir(home.name)
    Path("one.py").write_text("SUBMIT(y=x + 1)")
    Path("in.csv").write_text("x\n1\n")
    recorder = CallRecorder()
    atexit.register(home.cleanup)
    atexit.register(print_report, recorder, arguments)  # Registered before the imports, so that it runs last.
    recorder.start()
    from rlm_batch.cli.main import main as run_command

    run_command(["batch", "one.py", "--inputs", "in.csv"])


if __name__ == "__main__":
    main()
