"""A count of the rlm-batch functions that a batch of one execution enters on the host.

    python benchmarks/count_functions.py [--list]

It runs `rlm-batch batch one.py --inputs in.csv` with one row in this process, with a temporary home, and records every
call in every thread of the process. The embedded Prefect server and the sandbox are separate processes, so their
functions are not counted. Class bodies, modules, comprehensions and generator expressions are not counted, either.
"""

from __future__ import annotations

import argparse
import atexit
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("cli", "flows", "tasks", "blocks", "sandbox")


class CallRecorder:
    """A profiler that keeps the code of every function that was entered, in order of first entry."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}

    def start(self) -> None:
        """Record the calls of this thread and of every thread that starts later."""
        threading.setprofile(self._record_call)
        sys.setprofile(self._record_call)

    def _record_call(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self.codes.setdefault(frame.f_code)

    def list_functions(self) -> list[tuple[str, str]]:
        """Return the file and the qualified name of each rlm-batch function, once each, in order of first entry."""
        functions: dict[tuple[str, str], None] = {}
        for code in self.codes:
            path = Path(code.co_filename)
            is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "genexpr>"))
            if is_function and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in DIRECTORIES:
                functions.setdefault((f"{path.relative_to(ROOT)}:{code.co_firstlineno}", code.co_qualname))
        return list(functions)


def print_report(recorder: CallRecorder, *, lists_functions: bool) -> None:
    """Print the functions if that is wanted, and their numbers by directory and in total."""
    sys.setprofile(None)
    functions = recorder.list_functions()
    if lists_functions:
        for number, (place, name) in enumerate(functions, 1):
            print(f"{number:4} {place} {name}")
    files = {place.partition(":")[0] for place, _name in functions}
    functions_in = Counter(place.partition("/")[0] for place, _name in functions)
    files_in = Counter(file.partition("/")[0] for file in files)
    for directory in DIRECTORIES:
        print(f"{directory}: {functions_in[directory]} functions in {files_in[directory]} files")
    print(f"in all: {len(functions)} functions in {len(files)} files")


def main() -> None:
    """Run the batch. The counts are printed at the end of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each function, in order of first entry")
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
    # Registered before the imports, so that it runs last.
    atexit.register(print_report, recorder, lists_functions=arguments.list)
    recorder.start()
    from rlm_batch.cli.main import main as run_command

    run_command(["batch", "one.py", "--inputs", "in.csv"])


if __name__ == "__main__":
    main()
