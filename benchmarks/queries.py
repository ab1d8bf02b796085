"""What it costs to ask from inside a sandbox: batched queries and single ones, beside other ways, in one run.

    python benchmarks/queries.py [--rounds 5] [--queries 100] [--concurrency 16] [--delay 0.2]

The model is a server of its own on this machine that answers after the delay. Each way is measured in turns; the table
has medians, and ratios to the ideal, which is the delay for each full round of the concurrency. The ways: plain asyncio
over bare connections; LiteLLM called directly, on which ours is built; `llm_query_batched` in a local sandbox;
the same in a batch flow, where each query is a Prefect task run; and a host that polls every 100 ms and asks one
after the other. The second table is one query to a server that answers at once: ours, LiteLLM's own, and the
difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from rich.console import Console
from rich.table import Table

from rlm_batch import LanguageModel, LocalSandbox, batch
from rlm_batch.blocks.language_model.model_access import ModelAccess
from rlm_batch.deployments.server import PrefectServer

SERVER = Path(__file__).resolve().parents[1] / "tests" / "standins" / "openai_chat.py"
MODEL = "openai/gpt-4o-mini"
POLL = 0.1  # seconds between two looks of the host that polls
BATCHED = """
import time
begun = time.perf_counter()
answers = llm_query_batched([f"question {i}" for i in range(count)], concurrency=concurrency)
SUBMIT(seconds=time.perf_counter() - begun, right=answers == [f"answer to: question {i}" for i in range(count)])
"""
SINGLE = """
import time
seconds = []
for i in range(count):
    begun = time.perf_counter()
    llm_query(f"question {i}")
    seconds.append(time.perf_counter() - begun)
SUBMIT(seconds=seconds)
"""


class ModelServer:
    """The server, in a process of its own."""

    def __init__(self, delay: float) -> None:
        self._command = [sys.executable, str(SERVER), "--delay", str(delay)]

    def __enter__(self) -> str:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


async def bare(url: str, wires: deque[Any], prompt: str) -> str:
    """One request over a connection that is kept: what any client could reach."""
    parts = urlsplit(url)
    reader, writer = wires.pop() if wires else await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(answer.partition("content-length:")[2].partition("\r\n")[0])
    found = json.loads(await reader.readexactly(size))
    wires.append((reader, writer))
    return found["choices"][0]["message"]["content"]


async def gathered(ask: Callable[[str], Awaitable[str]], count: int, concurrency: int) -> float:
    """Seconds for all of them, so many at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> str:
        async with slots:
            return await ask(f"question {number}")

    begun = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(count)))
    seconds = time.perf_counter() - begun
    assert answers == [f"answer to: question {i}" for i in range(count)]
    return seconds


async def polled(url: str, count: int) -> float:
    """A host that looks every 100 ms whether something was asked, and then asks one after the other."""
    asked: deque[tuple[str, asyncio.Future[str]]] = deque()
    wires: deque[Any] = deque()

    async def host() -> None:
        while True:
            await asyncio.sleep(POLL)
            while asked:
                prompt, answer = asked.popleft()
                answer.set_result(await bare(url, wires, prompt))

    async def ask(prompt: str) -> str:
        answer = asyncio.get_running_loop().create_future()
        asked.append((prompt, answer))
        return await answer

    task = asyncio.create_task(host())
    try:
        return await gathered(ask, count, count)
    finally:
        task.cancel()
        close(wires)


def close(wires: deque[Any]) -> None:
    """Closes the connections that were kept."""
    for _, writer in wires:
        writer.close()


async def batched(url: str, rounds: int, count: int, concurrency: int) -> dict[str, list[float]]:
    """Seconds of each way, in each round."""
    model = LanguageModel(model=MODEL, api_key="sk-x", api_base=url)  # type: ignore[arg-type]
    served = model.make_flat_model()
    access = ModelAccess(model=model, batch_concurrency=concurrency, max_llm_calls=None)
    await model.save("benchmark", overwrite=True)  # type: ignore[misc]
    variables = {"count": count, "concurrency": concurrency}
    wires: deque[Any] = deque()
    found: dict[str, list[float]] = {}

    async def directly(prompt: str) -> str:
        return (await served.ask([{"role": "user", "content": prompt}])).text

    async with LocalSandbox().interpreter() as interpreter:
        await interpreter.execute("llm_query('warm')", queries=access.queries(interpreter))
        for _ in range(rounds):
            way = "plain asyncio"
            seconds = await gathered(lambda prompt: bare(url, wires, prompt), count, concurrency)
            found.setdefault(way, []).append(seconds)
            found.setdefault("LiteLLM directly", []).append(await gathered(directly, count, concurrency))
            ours = await interpreter.execute(BATCHED, variables, queries=access.queries(interpreter))
            assert ours.right
            found.setdefault("llm_query_batched", []).append(ours.seconds)
            (flow,) = await batch(
                BATCHED, [variables], language_model="language-model/benchmark", batch_concurrency=concurrency,
                max_llm_calls=None,
            )  # fmt: skip
            assert flow.right
            found.setdefault("the same in a batch flow", []).append(flow.seconds)
        found["polling every 100 ms"] = [await polled(url, count)]
    close(wires)
    return found


async def single(url: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Milliseconds of one query, of ours and of LiteLLM's own, in turns."""
    model = LanguageModel(model=MODEL, api_key="sk-x", api_base=url)  # type: ignore[arg-type]
    served = model.make_flat_model()
    access = ModelAccess(model=model, max_llm_calls=None)
    found: dict[str, list[float]] = {"llm_query in a local sandbox": [], "LiteLLM directly": []}
    async with LocalSandbox().interpreter() as interpreter:
        await interpreter.execute("llm_query('warm')", queries=access.queries(interpreter))
        for _ in range(rounds):
            ours = await interpreter.execute(SINGLE, {"count": count}, queries=access.queries(interpreter))
            found["llm_query in a local sandbox"] += [1000 * seconds for seconds in ours.seconds]
            for number in range(count):
                begun = time.perf_counter()
                await served.ask([{"role": "user", "content": f"question {number}"}])
                found["LiteLLM directly"].append(1000 * (time.perf_counter() - begun))
    return found


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that the model takes to answer")
    options = parser.parse_args()
    ideal = math.ceil(options.queries / options.concurrency) * options.delay
    with tempfile.TemporaryDirectory() as home, PrefectServer(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        os.environ["PREFECT_API_URL"] = server.url
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            with ModelServer(options.delay) as url:
                many = asyncio.run(batched(url, options.rounds, options.queries, options.concurrency))
            with ModelServer(0) as url:
                one = asyncio.run(single(url, options.rounds, 100))
    title = f"{options.queries} queries, {options.concurrency} at once, {options.delay * 1000:.0f} ms each"
    table = Table(title=f"{title}: ideal {ideal:.2f} s, medians of {options.rounds}", box=None)
    for name in ("", "seconds", "ratio to ideal"):
        table.add_column(name, justify="right" if name else "left")
    for name, samples in many.items():
        median = statistics.median(samples)
        table.add_row(name, f"{median:.3f}", f"{median / ideal:.2f}")
    Console(width=100).print(table)
    table = Table(title=f"One query to a model that answers at once: medians of {options.rounds * 100}", box=None)
    for name in ("", "ms"):
        table.add_column(name, justify="right" if name else "left")
    medians = {name: statistics.median(samples) for name, samples in one.items()}
    for name, median in medians.items():
        table.add_row(name, f"{median:.2f}")
    ours, direct = medians.values()
    table.add_row("between the two", f"{ours - direct:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
