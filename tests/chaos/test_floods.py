"""Tests of floods: whatever a sandbox sends, its host serves all other sandboxes, and the execution ends.

`make test-full` runs some floods of each kind, and `make chaos` runs the others.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.creation import create_sandbox
from rlm_batch.blocks.local.launch.driver_process import SpawnedProcess
from rlm_batch.blocks.local.launch.launcher import Launch
from rlm_batch.sandbox.driver_bundle import build_driver_code
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.queries.budget import Budget, Usage
from rlm_batch.sandbox.queries.recursion import Queries
from rlm_batch.sandbox.queries.session import DEFAULT_OPTIONS, Answer, Message, QuerySession, RequestOptions

from ..infra.isolation_levels import find_strongest_level
from ..infra.stub_model import StubModel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]

FLOOD_SECONDS = 1.5  # duration of a flood, while executions of another sandbox run
SHORT = (
    "slow calls that nobody waits for", "large calls", "calls of escapes", "a million prompts by hand",
    "SUBMIT of as many lists as may be", "output in one frame", "file names", "headers without fields",
    "one result that is too large",
)  # fmt: skip

# This program replaces the driver: it reads the host's input, reports that it is ready, and floods once it has code.
DRIVER = """
import json, os, sys, threading, time
seconds, numbers, has_code = {seconds}, iter(range(1, 1 << 60)), threading.Event()

def send(data):
    data = memoryview(data)
    while data:
        data = data[os.write(1, data):]

def frame(body=None, **header):
    header = {{"id": 1, "n": next(numbers), **header}}
    if body is not None:
        header["body"] = len(body)
    line = json.dumps(header, separators=(",", ":")).encode() + b"\\n"
    return line if body is None else line + body + b"\\n"

def take_input():
    last = b""
    while data := os.read(0, 65536):
        if b'"execute"' in last + data and not has_code.is_set():
            has_code.set()
            if not {reads}:
                return
        last = data[-64:]
    os._exit(0)

threading.Thread(target=take_input, daemon=True).start()
send(frame(op="ready", id=0))
has_code.wait()
end = time.monotonic() + seconds
{text}
time.sleep(60)
"""

# These calls do not wait for answers, which is faster than calls of a thousand threads.
CALL = """
import os, time
channel = next(cell.cell_contents for cell in ask.__closure__ if hasattr(cell.cell_contents, "_channel"))._channel

def call(body, name="ask"):
    for number in range(10**9):
        channel.send({"op": "call", "token": channel.token, "call": number, "name": name}, body)

def submit(body):
    channel.send({"op": "submit", "token": channel.token}, body)

MIB = 1 << 20
"""

# Bodies of submissions and calls.
BODIES = {
    "empty lists": """b'{"x":[' + b'[],' * (MIB // 3 - 10) + b'0]}'""",
    "as many lists as may be": """b'{"x":[' + b'[0,0,0],' * 99_990 + b'0]}'""",
    "keys": """b'{' + b','.join(b'"%x":0' % i for i in range(MIB // 10)) + b'}'""",
    "escapes": """b'{"x":"' + b'\\\\na' * (MIB // 3 - 10) + b'"}'""",
    "invalid UTF-8": """b'{"x":"' + b'\\xff' * (MIB - 10) + b'"}'""",
}

CODE = {
    "output": "import os\nwhile True: os.write(1, b'x' * 60_000)",
    "files in the working folder": "for i in range(20_000): open(f'{i}', 'w').close()",
    "nested directories": "import os\nfor _ in range(3000): os.mkdir('d' * 200); os.chdir('d' * 200)",
    "calls of many threads": """
import threading
def run():
    while True: ask(1)
for _ in range(100): threading.Thread(target=run, daemon=True).start()
run()
""",
    "slow calls that nobody waits for": CALL + """call(b'{"args":[],"kwargs":{}}', "sleep")""",
    "large calls": CALL + """call(b'{"args":[[' + b'[],' * (4 * MIB // 3 - 30) + b'0]],"kwargs":{}}')""",
    "calls of escapes": CALL + """call(b'{"args":["' + b'\\\\\\"' * (2 * MIB - 99) + b'"],"kwargs":{}}')""",
    "large answers that are never read": CALL + """call(b'{"args":[],"kwargs":{}}', "answer")""",
    "a million prompts": "llm_query_batched([''] * 1_000_000)",
    "a million prompts by hand": CALL
    + """
call(b'{"args":[[' + b'"",' * 600_000 + b'""]],"kwargs":{"concurrency":null}}', "llm_query_batched")
""",
    **{f"SUBMIT of {name}": f"{CALL}submit({body})" for name, body in BODIES.items()},
}

REPEAT = "while time.monotonic() < end: send(data)"
DRIVERS = {
    "tiny frames": f"data = b''.join(frame(op='beat', id=0) for _ in range(200_000))\n{REPEAT}",
    "tiny output": f"""
data = b''.join(frame(op='output', stream='stdout', dropped=0, body=b'"x"') for _ in range(100_000))
{REPEAT}
""",
    "output in one frame": """
body = b'"' + b'\\\\n' * 20_000_000 + b'"'
send(frame(op='output', stream='stdout', dropped=0, body=body))
""",
    "file names": """
body = b'[' + b'[],' * 300_000 + b'""]'
for i in range(20): send(frame(op='files', body=body))
send(frame(op='end', status='finished', body=b'null'))
""",
    "calls from a driver that reads nothing": """
body = b'{"args":[1],"kwargs":{}}'
send(b''.join(frame(op='call', call=i, name='ask', body=body) for i in range(100_000)))
""",
    "a body without an end": f"""
send(b'{{"op":"end","id":1,"status":"submitted","n":2,"body":999999999999}}\\n')
data = b'x' * 60_000
{REPEAT}
""",
    "a body of a byte at a time": """
send(b'{"op":"end","id":1,"status":"submitted","n":2,"body":4000000}\\n')
while time.monotonic() < end: send(b'x')
""",
    "headers of deep lists": f"data = b'{{\"op\":' + b'[' * 60_000 + b'\\n'\n{REPEAT}",
    "headers without fields": f"data = b'{{}}\\n' * 10_000\n{REPEAT}",
    "headers of other types": f"data = b'{{\"op\":[],\"id\":{{}},\"n\":\"x\"}}\\n' * 1000\n{REPEAT}",
    "one result that is too large": """
send(frame(op='end', status='submitted', seconds=1.0, body=b'{"x":[' + b'[],' * 5_000_000 + b'0]}'))
""",
}  # fmt: skip


class QuickModel(StubModel):
    """A model that answers at once."""

    async def ask(self, messages: list[Message], options: RequestOptions = DEFAULT_OPTIONS) -> Answer:
        return Answer(messages[0]["content"], Usage(1, 1, 1, 0.0))


async def recurse(*_: object) -> str:
    return ""


def make_queries() -> Queries:
    model = QuickModel()
    session = QuerySession(root_model=model, flat_model=model, budget=Budget(), concurrency=4)
    return Queries(session, recurse, max_depth=2)


def make_interpreter(name: str, block: LocalSandbox) -> Interpreter:
    """Return an interpreter whose sandbox floods its host when it gets code."""
    answer = "x" * 1_000_000
    tools: dict[str, Callable[..., Any]] = {
        "ask": lambda value=None: None,
        "sleep": lambda: time.sleep(0.5),
        "answer": lambda: answer,
    }
    if name in CODE:
        return Interpreter(lambda: block.open({}), timeout=FLOOD_SECONDS, tools=tools)

    async def open_sandbox() -> Any:
        sandbox = create_sandbox(LocalSandbox(isolation="none"), "none", {})
        program = DRIVER.format(seconds=FLOOD_SECONDS, reads="reads nothing" not in name, text=DRIVERS[name])
        skip = f"import os\nrest = {len(build_driver_code())}\nwhile rest: rest -= len(os.read(0, rest))\n"
        command = [sys.executable, "-I", "-S", "-c", skip + program]

        class FloodLaunch(Launch):
            async def start(self) -> SpawnedProcess:
                return SpawnedProcess(command, str(self.folder))

        sandbox.launch = FloodLaunch(sandbox.folder, is_bubblewrap=False)
        return sandbox

    return Interpreter(open_sandbox, timeout=FLOOD_SECONDS, tools=tools)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in SHORT else pytest.mark.chaos) for name in (*CODE, *DRIVERS)],
)
async def test_a_flood_delays_no_other_sandbox_and_can_be_ended(name: str) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    block = LocalSandbox(isolation=find_strongest_level() or "none")  # type: ignore[reportArgumentType]
    interpreter = make_interpreter(name, block)
    async with block.interpreter() as beside:
        await interpreter.start()
        code, end = dedent(CODE.get(name, "pass")), time.monotonic() + FLOOD_SECONDS
        flood = asyncio.create_task(interpreter.execute(code, queries=make_queries()))
        for number in range(1_000_000):
            assert (await beside.execute("SUBMIT(x=x)", {"x": number})).x == number
            if flood.done() or time.monotonic() > end:
                break
        flood.cancel()
        with suppress(RlmBatchError, asyncio.CancelledError):
            await flood
        await interpreter.shutdown()
        assert (await beside.execute("SUBMIT(x=1)")).x == 1
