"""The cost of queries from inside a sandbox, batched and single, compared with other ways in the same run.

    python benchmarks/queries.py [--rounds 5] [--queries 100] [--concurrency 16] [--delay 0.2]

The model is a separate server on this machine that answers after the delay. The variants run in turns, but
polling runs once at the end. The table has medians, and ratios to the ideal: `delay` seconds for every `concurrency`
queries. The variants are:
- plain asyncio over bare connections
- the client called directly with asyncio
- `llm_query_batched` in a local sandbox
- `llm_query_batched` in a batch flow, where each query is a Prefect task run
- a host that polls every 100 ms and asks one query after another

The second table is one query to a server that answers at once: in a sandbox, by the client alone, and the difference.
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
from rlm_batch.flows.server.process import ServerProcess

SERVER = Path(__file__).resolve().parents[1] / "tests" / "standins" / "openai_chat.py"
MODEL = "openai/gpt-4o-mini"
POLL_SECONDS = 0.1
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
    """The model's server in a separate process."""

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


async def ask_bare(url: str, wires: deque[Any], prompt: str) -> str:
    """Return the answer to one request over a kept connection: the least that a client can cost."""
    parts = urlsplit(url)
    reader, writer = wires.pop() if wires else await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = int(answer.partition("content-length:")[2].partition("\r\n")[0])
    reply = json.loads(await reader.readexactly(size))
    wires.append((reader, writer))
    return reply["choices"][0]["message"]["content"]


async def time_questions(ask: Callable[[str], Awaitable[str]], count: int, concurrency: int) -> float:
    """Return the seconds for `count` questions, at most `concurrency` at a time."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int) -> str:
        async with slots:
            return await ask(f"question {number}")

    begun = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(count)))
    seconds = time.perf_counter() - begun
    assert answers == [f"answer to: question {i}" for i in range(count)]
    return seconds


async def time_polling(url: str, count: int) -> float:
    """Return the seconds with a host that polls for questions, and then asks one after the other."""
    asked: deque[tuple[str, asyncio.Future[str]]] = deque()
    wires: deque[Any] = deque()

    async def host() -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            while asked:
                prompt, answer = asked.popleft()
                answer.set_result(await ask_bare(url, wires, prompt))

    async def ask(prompt: str) -> str:
        answer = asyncio.get_running_loop().create_future()
        asked.append((prompt, answer))
        return await answer

    task = asyncio.create_task(host())
    try:
        return await time_questions(ask, count, count)
    finally:
        task.cancel()
        close_wires(wires)


def close_wires(wires: deque[Any]) -> None:
    """Close the kept connections."""
    for _, writer in wires:
        writer.close()


async def measure_batched(url: str, rounds: int, count: int, concurrency: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by its name, for each round."""
    model = LanguageModel(model=MODEL, api_key="sk-x", api_base=url)  # type: ignore[arg-type]
    served = model.make_flat_model()
    access = ModelAccess(model=model, batch_concurrency=concurrency, max_llm_calls=None)
    await model.save("benchmark", overwrite=True)  # type: ignore[misc]
    variables = {"count": count, "concurrency": concurrency}
    wires: deque[Any] = deque()
    samples: dict[str, list[float]] = {}

    async def ask_client(prompt: str) -> str:
        return (await served.ask([{"role": "user", "content": prompt}])).text

    async with LocalSandbox().interpreter() as interpreter:
        await interpreter.execute("llm_query('warm')", queries=access.queries(interpreter))
        for _ in range(rounds):
            seconds = await time_questions(lambda prompt: ask_bare(url, wires, prompt), count, concurrency)
            samples.setdefault("plain asyncio", []).append(seconds)
            samples.setdefault("the client directly", []).append(await time_questions(ask_client, count, concurrency))
            ours = await interpreter.execute(BATCHED, variables, queries=access.queries(interpreter))
            assert ours.right
            samples.setdefault("llm_query_batched", []).append(ours.seconds)
            (flow,) = await batch(
                BATCHED, [variables], language_model="rlm-language-model/benchmark", batch_concurrency=concurrency,
                max_llm_calls=None,
            )  # fmt: skip
            assert flow.right
            samples.setdefault("the same in a batch flow", []).append(flow.seconds)
        samples["polling every 100 ms"] = [await time_polling(url, count)]
    close_wires(wires)
    return samples


async def measure_single(url: str, rounds: int, count: int) -> dict[str, list[float]]:
    """Return the milliseconds of single queries, in a sandbox and by the client alone, in turns."""
    model = LanguageModel(model=MODEL, api_key="sk-x", api_base=url)  # type: ignore[arg-type]
    served = model.make_flat_model()
    access = ModelAccess(model=model, max_llm_calls=None)
    samples: dict[str, list[float]] = {"llm_query in a local sandbox": [], "the client directly": []}
    async with LocalSandbox().interpreter() as interpreter:
        await interpreter.execute("llm_query('warm')", queries=access.queries(interpreter))
        for _ in range(rounds):
            ours = await interpreter.execute(SINGLE, {"count": count}, queries=access.queries(interpreter))
            samples["llm_query in a local sandbox"] += [1000 * seconds for seconds in ours.seconds]
            for number in range(count):
                begun = time.perf_counter()
                await served.ask([{"role": "user", "content": f"question {number}"}])
                samples["the client directly"].append(1000 * (time.perf_counter() - begun))
    return samples


def main() -> None:
    """Measure every way, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds that the model takes to answer")
    options = parser.parse_args()
    ideal = math.ceil(options.queries / options.concurrency) * options.delay
    with tempfile.TemporaryDirectory() as home, ServerProcess.start(Path(home)) as server:
        os.environ["RLM_BATCH_RESULTS"] = f"{home}/results"
        os.environ["PREFECT_API_URL"] = server.url
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            with ModelServer(options.delay) as url:
                many = asyncio.run(measure_batched(url, options.rounds, options.queries, options.concurrency))
            with ModelServer(0) as url:
                one = asyncio.run(measure_single(url, options.rounds, 100))
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
