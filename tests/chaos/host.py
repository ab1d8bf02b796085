"""A process that has imported the flows, and forks a process for each run; a run is one line of JSON.

A killed run therefore does not cost seconds of imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from typing import Any

import daytona
import modal  # noqa: F401 - a provider would import it with its first sandbox
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch.flows.batch import batch
from rlm_batch.flows.reap import reap
from rlm_batch.sandbox.errors import ExecutionsFailed


def run(request: dict[str, Any]) -> int:
    """Run a flow as a user's script does, and return the exit status."""
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
    """Fork a process or poll one, as each line requests."""
    _ = daytona.AsyncDaytona  # the SDK imports most of its modules when this attribute is read
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
