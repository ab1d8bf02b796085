"""What reading a file of CSV costs beside pandas: the same file, in one process.

    python benchmarks/inputs.py [--rows 200000] [--rounds 5]

The file has 12 columns, ten of them of numbers with a point: some 2.4 million cells and 33 MB. Both are measured in
turns, and the ratio is that of the medians: until all cells have been read and their types are known, and then until
there is a dict of each row, which is what executions get. pandas' import is not part of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pandas

from rlm_batch.flows.inputs.readers import InputFile

T = TypeVar("T")


def write_file(path: Path, rows: int) -> None:
    """A file of measurements, each with a number and a label."""
    dice = random.Random(1)
    with path.open("w") as file:
        file.write(",".join(["id", *(f"x{number}" for number in range(10)), "label"]) + "\n")
        for number in range(rows):
            cells = [f"{dice.uniform(-1000, 1000):.10f}" for _ in range(10)]
            file.write(f"{number},{','.join(cells)},class{number % 7}\n")


def measure(action: Callable[[], T]) -> tuple[float, T]:
    """Seconds that it took, and what it returned."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def main() -> None:
    """Prints the medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"pandas": [], "ours": [], "pandas' dicts": [], "our dicts": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.csv"
        write_file(path, arguments.rows)
        print(f"{path.stat().st_size / 1e6:.0f} MB, {arguments.rows * 12 / 1e6:.1f} million cells")
        for _ in range(arguments.rounds):
            seconds, frame = measure(lambda: pandas.read_csv(path))
            times["pandas"].append(seconds)
            seconds, file = measure(lambda: InputFile(str(path)))
            times["ours"].append(seconds)
            times["pandas' dicts"].append(measure(lambda frame=frame: frame.to_dict("records"))[0])
            times["our dicts"].append(measure(lambda file=file: sum(1 for _ in file))[0])
    for name, seconds in times.items():
        print(f"{name}: {statistics.median(seconds):.3f} s")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"reading: {medians['ours'] / medians['pandas']:.2f} times pandas")
    ours, peer = medians["ours"] + medians["our dicts"], medians["pandas"] + medians["pandas' dicts"]
    print(f"reading, with a dict of each row: {ours / peer:.2f} times pandas")


if __name__ == "__main__":
    main()
