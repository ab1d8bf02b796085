"""What one sandbox may send to hold up its host: by code that runs in it, and by a driver that is no driver of ours.

`measure_pause` says for how long the host's event loop stood still meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.creation import create_sandbox
from rlm_batch.blocks.local.launch.driver_process import SpawnedProcess
from rlm_batch.sandbox.driver_bundle import build_driver_code
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.queries.budget import Budget, Usage
from rlm_batch.sandbox.queries.recursion import Queries
from rlm_batch.sandbox.queries.session import Answer, Message, QuerySession

TICK_SECONDS = 0.001
FLOOD_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Flood:
    """Code that runs in a sandbox, or, with `is_driver`, a program that stands in the driver's place.

    Such a program finds `send` (bytes to the host), `frame` (a frame's bytes) and `seconds`; the execution that the
    host has sent has the id 1.
    """

    name: str
    text: str
    is_driver: bool = False


# Stands in the driver's place: takes what the host sends, says that it is ready, and floods once it is sent code.
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

# In the code's own process: the calls of a thousand threads could not be as quick as one that asks and does not wait.
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

# Bodies of all that a submission, or a call, may be.
BODIES = {
    "empty lists": """b'{"x":[' + b'[],' * (MIB // 3 - 10) + b'0]}'""",
    "nested lists": """b'{"x":[' + b'[[[[[]]]]],' * (MIB // 11 - 10) + b'0]}'""",
    "as many lists as may be": """b'{"x":[' + b'[0,0,0],' * 99_990 + b'0]}'""",
    "integers": """b'{"x":[' + b'0,' * (MIB // 2 - 10) + b'0]}'""",
    "long integers": """b'{"x":[' + (b'9' * 4300 + b',') * (MIB // 4301 - 1) + b'0]}'""",
    "keys": """b'{' + b','.join(b'"%x":0' % i for i in range(MIB // 10)) + b'}'""",
    "deep lists": """b'{"x":' + b'[' * (MIB - 10)""",
    "one text": """b'{"x":"' + b'a' * (MIB - 20) + '\\U0001f600'.encode() + b'"}'""",
    "escapes": """b'{"x":"' + b'\\\\na' * (MIB // 3 - 10) + b'"}'""",
    "one integer": """b'{"x":' + b'9' * (MIB - 10) + b'}'""",
    "invalid UTF-8": """b'{"x":"' + b'\\xff' * (MIB - 10) + b'"}'""",
    "no JSON": """b'{"x":[' + b'0,' * (MIB // 2 - 10) + b'?]}'""",
}

CODE = {
    "output": "import os\nwhile True: os.write(1, b'x' * 60_000)",
    "output in single lines": "import os\nwhile True: os.write(1, b'\\n')",
    "output of invalid UTF-8": "import os\nwhile True: os.write(1, b'\\xff' * 60_000)",
    "files in the working folder": "for i in range(20_000): open(f'{i}', 'w').close()",
    "nested directories": "import os\nfor _ in range(3000): os.mkdir('d' * 200); os.chdir('d' * 200)",
    "calls of many threads": """
import threading
def run():
    while True: ask(1)
for _ in range(100): threading.Thread(target=run, daemon=True).start()
run()
""",
    "calls whose replies are never read": CALL + """call(b'{"args":[1],"kwargs":{}}')""",
    "slow calls that nobody waits for": CALL + """call(b'{"args":[],"kwargs":{}}', "sleep")""",
    "calls of empty lists": CALL + """call(b'{"args":[[' + b'[],' * (2 * MIB // 3 - 30) + b'0]],"kwargs":{}}')""",
    "calls of one text": CALL
    + """
call(b'{"args":["' + b'a' * (4 * MIB - 99) + '\\U0001f600'.encode() + b'"],"kwargs":{}}')
""",
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
    "frames of many ids": f"""
data = b''.join(frame(op='end', id=i, status='x', body=b'0') for i in range(50, 100_000))
{REPEAT}
""",
    "tiny output": f"""
data = b''.join(frame(op='output', stream='stdout', dropped=0, body=b'"x"') for _ in range(100_000))
{REPEAT}
""",
    "output without a cap": """
body = b'"' + b'x' * 60_000 + b'"'
while time.monotonic() < end: send(frame(op='output', stream='stdout', dropped=0, body=body))
""",
    "output in one frame": """
body = b'"' + b'\\\\n' * 20_000_000 + b'"'
send(frame(op='output', stream='stdout', dropped=0, body=body))
""",
    "file names in one frame": """send(frame(op='files', body=b'[' + b'[],' * 5_000_000 + b'""]'))""",
    "file names": """
body = b'[' + b'[],' * 300_000 + b'""]'
for i in range(20): send(frame(op='files', body=body))
send(frame(op='end', status='finished', body=b'null'))
""",
    "calls from a driver that reads nothing": """
body = b'{"args":[1],"kwargs":{}}'
send(b''.join(frame(op='call', call=i, name='ask', body=body) for i in range(100_000)))
""",
    "one long line": f"data = b'x' * 60_000\n{REPEAT}",
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
    "headers of long lists": f"data = b'{{\"id\":9,\"n\":2,\"op\":[' + b'[],' * 20_000 + b'0]}}\\n'\n{REPEAT}",
    "headers of invalid UTF-8": f"data = b'{{\"op\":\"' + b'\\xff' * 100 + b'\"}}\\n'\n{REPEAT}",
    "headers without fields": f"data = b'{{}}\\n' * 10_000\n{REPEAT}",
    "headers of other types": f"data = b'{{\"op\":[],\"id\":{{}},\"n\":\"x\"}}\\n' * 1000\n{REPEAT}",
    "one result that is too large": """
send(frame(op='end', status='submitted', seconds=1.0, body=b'{"x":[' + b'[],' * 5_000_000 + b'0]}'))
""",
}  # fmt: skip

FLOODS = [
    *(Flood(name, text) for name, text in CODE.items()),
    *(Flood(name, text, is_driver=True) for name, text in DRIVERS.items()),
]


class Pause:
    """The longest time for which the event loop ran nothing else, in seconds. A context manager, on the loop.

    What its thread waited for a processor that other processes had is not in it, where the kernel tells that.
    """

    async def __aenter__(self) -> Pause:
        self.longest = 0.0
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def _tick(self) -> None:
        last = time.monotonic() - _read_processor_wait()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic() - _read_processor_wait()
            self.longest, last = max(self.longest, now - last - TICK_SECONDS), now

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(TICK_SECONDS * 2)  # a pause that lasts until now counts too
        self._task.cancel()


def _read_processor_wait() -> float:
    """The seconds for which this thread could have run, and no processor was free."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class QuickModel:
    """A model that answers at once."""

    name = "quick"

    async def ask(self, messages: list[Message]) -> Answer:
        return Answer(messages[0]["content"], Usage(1, 1, 1, 0.0))

    async def estimate_max_usage(self, messages: list[Message]) -> tuple[int, float]:
        return 1, 0.0

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name}


async def _recurse(*_: object) -> str:
    return ""


def _make_queries() -> Queries:
    model = QuickModel()
    session = QuerySession(root_model=model, flat_model=model, budget=Budget(), concurrency=4)
    return Queries(session, _recurse, max_depth=2)


def make_interpreter(flood: Flood, block: LocalSandbox, seconds: float) -> Interpreter:
    """An interpreter whose sandbox floods it when it is sent code."""
    answer = "x" * 1_000_000
    tools: dict[str, Callable[..., Any]] = {
        "ask": lambda value=None: None,
        "sleep": lambda: time.sleep(0.5),
        "answer": lambda: answer,
    }
    if not flood.is_driver:
        return Interpreter(lambda: block.open({}), timeout=seconds, tools=tools)

    async def open_sandbox() -> Any:
        sandbox = create_sandbox(LocalSandbox(isolation="none"), "none", {})
        program = DRIVER.format(seconds=seconds, reads="reads nothing" not in flood.name, text=flood.text)
        skip = f"import os\nrest = {len(build_driver_code())}\nwhile rest: rest -= len(os.read(0, rest))\n"
        command = [sys.executable, "-I", "-S", "-c", skip + program]

        async def launch() -> SpawnedProcess:
            return SpawnedProcess(command, str(sandbox.folder))

        sandbox.launch = launch
        return sandbox

    return Interpreter(open_sandbox, timeout=seconds, tools=tools)


async def measure_pause(flood: Flood | None, block: LocalSandbox, seconds: float = FLOOD_SECONDS) -> Pause:
    """The longest pause of the loop, from the flood's first byte to the end of its sandbox; None: idle."""
    if flood is None:
        async with Pause() as pause:
            await asyncio.sleep(seconds)
        return pause
    interpreter = make_interpreter(flood, block, seconds)
    await interpreter.start()
    async with Pause() as pause:
        code = "pass" if flood.is_driver else dedent(flood.text)
        running = asyncio.create_task(interpreter.execute(code, queries=_make_queries()))
        await asyncio.wait([running], timeout=seconds + 3.0)
        running.cancel()
        with suppress(RlmBatchError, asyncio.CancelledError):
            await running
        del running
        await interpreter.shutdown()
    return pause
