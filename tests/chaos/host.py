"""A process that has imported what flows need, and forks one for each run that it is asked for: a line of JSON each.

A run that is killed costs what it does, and not the seconds of imports before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from typing import Any

import daytona
import modal  # noqa: F401 - what a provider would import with its first sandbox
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch.flows.batch import batch
from rlm_batch.flows.reap import reap
from rlm_batch.sandbox.errors import ExecutionsFailed


def run(request: dict[str, Any]) -> int:
    """Run a flow as a person's script does, and return the exit status."""
    os.setsid()
    with open(request["log"], "ab") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= request["environment"]
    try:
        with temporary_settings({PREFECT_API_URL: request["server"]}):
            if request["op"] == "reap":
                print(asyncio.run(reap(request["block"])))
            else:
                asyncio.run(batch(**request["parameters"]))
    except ExecutionsFailed as error:
        print(error, flush=True)
        return 1
    except BaseException:
        traceback.print_exc()
        raise
    return 0


def main() -> None:
    """Fork and wait, as each line asks."""
    _ = daytona.AsyncDaytona  # the SDK imports most when it is asked for it
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "wait":
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                sys.exit(run(request))
        print(json.dumps(answer), flush=True)


main()
