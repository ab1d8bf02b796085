"""A process that has imported what the command imports, and forks one for each command: a line of JSON each.

A command by itself spends seconds on imports, and the tests run some hundred. What a fork cannot show (a first start,
another server, an interrupt, a terminal) is tested on the command itself. What queries import, three seconds more, is
imported with the first request that asks a model.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import threading
import traceback
from typing import Any, NoReturn

import prefect.main  # noqa: F401

from rlm_batch.blocks.modal import block  # noqa: F401
from rlm_batch.cli import commands  # noqa: F401
from rlm_batch.cli.main import main
from rlm_batch.flows import batch, chunks, reap, rlm, sequence, sweep  # noqa: F401


def serve() -> None:
    """Forks, and says how each ended, until there are no more requests."""
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "rlm" in request["arguments"] or "--language-model" in request["arguments"]:
            importlib.import_module("dspy")
            importlib.import_module("litellm")
        pid = os.fork()
        if not pid:
            run_command(request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_command(request: dict[str, Any]) -> NoReturn:
    """Runs the command, and ends the process as Python does, but for freeing what it has.

    That it shares with the process it was forked from: to free it is to copy it first, which takes a second.
    """
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    status = 1
    try:
        main(request["arguments"])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - as Python does it
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


serve()
