"""Programs that people write by hand with an interpreter on Modal, as they are, in processes of their own."""

import os
import subprocess
import sys
from typing import Any

import pytest

THREE_TASKS = """
from concurrent.futures import ThreadPoolExecutor, as_completed
from rlm_batch import ModalInterpreter

tasks = [
    "result = sum(range(1000)); SUBMIT(total=result)",
    "import math; SUBMIT(pi_approx=math.pi)",
    "SUBMIT(greeting='Hello from sandbox')",
]

def run_task(code):
    with ModalInterpreter(timeout=120) as interp:
        return interp.execute(code)

with ThreadPoolExecutor(max_workers=4) as pool:
    futures = {pool.submit(run_task, t): i for i, t in enumerate(tasks)}
    for future in as_completed(futures):
        idx = futures[future]
        result = future.result()
        print(f"Task {idx}: {result}")
"""

CHUNKS = """
from concurrent.futures import ThreadPoolExecutor
from rlm_batch import ModalInterpreter

VOLUME = 'rlm-volume-dspy'

def process_chunk(chunk_id, data):
    code = (
        f"import json\\n"
        f"data = {repr(data)}\\n"
        f"processed = [x * 2 for x in data]\\n"
        f"save_to_volume(f'results/chunk_{chunk_id}.json', json.dumps(processed))\\n"
        f"SUBMIT(chunk_id={chunk_id}, count=len(processed))"
    )
    with ModalInterpreter(timeout=120, volume_name=VOLUME) as interp:
        return interp.execute(code)

chunks = {0: [1,2,3], 1: [4,5,6], 2: [7,8,9]}

with ThreadPoolExecutor(max_workers=3) as pool:
    futures = [pool.submit(process_chunk, cid, data) for cid, data in chunks.items()]
    for f in futures:
        r = f.result()
        print(f"Chunk {r.chunk_id}: {r.count} items")
"""

SWEEP = """
from concurrent.futures import ThreadPoolExecutor
from rlm_batch import ModalInterpreter

def sweep(lr, batch_size):
    code = (
        "import random\\n"
        "random.seed(42)\\n"
        f"loss = 1.0 / ({lr} * {batch_size} + 0.01) + random.random() * 0.1\\n"
        f"SUBMIT(lr={lr}, batch_size={batch_size}, loss=loss)"
    )
    with ModalInterpreter(timeout=300) as interp:
        return interp.execute(code)

params = [(0.001, 32), (0.01, 32), (0.001, 64), (0.01, 64)]

with ThreadPoolExecutor(max_workers=4) as pool:
    results = list(pool.map(lambda p: sweep(*p), params))
    best = min(results, key=lambda r: r.loss)
    print(f"Best: lr={best.lr}, batch={best.batch_size}, loss={best.loss:.4f}")
"""

SEQUENCE = """
from rlm_batch import ModalInterpreter

with ModalInterpreter(timeout=300) as interp:
    for i in range(5):
        result = interp.execute(
            f"import math; SUBMIT(task={i}, value=math.factorial({i + 10}))"
        )
        print(f"Task {result.task}: {result.value}")
"""

PROGRAMS = {
    "three tasks": (
        THREE_TASKS,
        {
            "Task 0: Result(total=499500)",
            "Task 1: Result(pi_approx=3.141592653589793)",
            "Task 2: Result(greeting='Hello from sandbox')",
        },
    ),
    "chunks on a volume": (CHUNKS, {"Chunk 0: 3 items", "Chunk 1: 3 items", "Chunk 2: 3 items"}),
    "a sweep": (SWEEP, {"Best: lr=0.01, batch=64, loss=1.6024"}),
    "a sequence": (
        SEQUENCE,
        {"Task 0: 3628800", "Task 1: 39916800", "Task 2: 479001600", "Task 3: 6227020800", "Task 4: 87178291200"},
    ),
}


@pytest.mark.requires("namespaces")
# What they have in common is in the first; what a shape of job does, in the tests of the flows.
@pytest.mark.parametrize(
    "name", ["three tasks", *(pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS if name != "three tasks")]
)
def test_a_program_runs_as_it_is_and_warns_of_nothing(name: str, modal_standin: Any, no_process_left: None) -> None:
    program, expected = PROGRAMS[name]
    hello = modal_standin.hello
    environment = {**os.environ, "MODAL_TOKEN_ID": hello["token_id"], "MODAL_TOKEN_SECRET": hello["token_secret"]}
    environment.pop("PREFECT_API_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, env=environment, timeout=60
    )
    assert (set(done.stdout.splitlines()), done.stderr) == (expected, "")
    assert done.returncode == 0
    assert not modal_standin.ask("state")["sandboxes"]
    if name == "chunks on a volume":
        files = modal_standin.ask("volume", name="rlm-volume-dspy")
        assert files == {
            "results/chunk_0.json": "[2, 4, 6]",
            "results/chunk_1.json": "[8, 10, 12]",
            "results/chunk_2.json": "[14, 16, 18]",
        }
