"""What processes have used, sampled while a job runs, for benchmarks/scale.py."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger_counts import Row


@dataclass
class Sample:
    """At one moment: results so far, CPU seconds and MiB by whose they are."""

    at: float
    lines: int
    cpu: dict[str, float]
    memory: dict[str, float]


def compute_cost(samples: list[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """CPU milliseconds for each result, by whose they are, "" for all: from the beginning, and from a tenth of them."""
    last = samples[-1]
    tenth = next(sample for sample in samples if sample.lines >= last.lines / 10)
    done = next(sample for sample in samples if sample.lines == last.lines)

    def between(one: Sample, other: Sample) -> dict[str, float]:
        count = max(1, other.lines - one.lines)
        found = {name: (other.cpu[name] - one.cpu[name]) / count * 1000 for name in other.cpu}
        return {"": sum(found.values()), **found}

    return between(samples[0], last), between(tenth, done)


def compare_memory(samples: list[Sample]) -> list[Row]:
    """The peaks of the second and of the last quarter of the time in which there were results."""
    whole = samples[-1].lines
    span = [sample for sample in samples if 0 < sample.lines < whole]
    rows = []
    for name in samples[0].memory:
        peaks = [
            max(
                (sample.memory[name] for sample in span[len(span) * part // 4 : len(span) * (part + 1) // 4]), default=0
            )
            for part in range(4)
        ]
        ratio = peaks[3] / peaks[1] if peaks[1] else 0.0
        text = f"{', '.join(f'{peak:.0f}' for peak in peaks)} MiB by quarters: {ratio:.2f} times"
        rows.append(Row(f"memory of {name}", text, "1.1", ratio <= 1.1))
    return rows
