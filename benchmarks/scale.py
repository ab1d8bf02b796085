"""One job over several workers: what holds when a worker dies, or the parent, and what more workers and more work cost.

    python benchmarks/scale.py [workers] [speedup] [parent] [many] [million] [--executions N] [--limit SECONDS] ...

Each part that is named, or each of them, prints its rows as it ends. All run against a Prefect server with the settings
that we ship, on Postgres where this machine has one, and with workers in namespaces and homes of their own where the
kernel gives them (tests/workers.py); the job's parent is `rlm-batch batch --shards`, on such a machine too. Nothing is
written but in a temporary directory.

workers   two workers, local sandboxes that are kept: one is killed with everything in it when half of the results are
          there. Counted in the ledger: an execution ran although it had a result if it began after that was written.
speedup   executions that wait at the local stand-in for Daytona, in `--sandboxes` sandboxes a worker, one shard each.
          What is compared is results a second from when every shard has had two for each of its sandboxes, so that all
          are up, to when the first shard is through.
parent    the parent is killed with everything in it in the middle, and run again with the same results_path.
many      300 sandboxes in one process: benchmarks/many.py.
million   `--executions` trivial ones, and `--peer` of them in the same run. CPU is that of everything but the relays
          that lead into the namespaces: parent, workers, Prefect server, Postgres. It is counted from a tenth of the
          results to the last, so that what starts once does not flatter the larger, and from beginning to end.

It ends with status 1 if a count is wrong or a part did not end in `--limit` seconds. A figure that is wanted and that
this machine did not reach is marked, and does not: the machine may have been busy, or too small.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "ERROR")

import httpx
from providers import load_module
from rich.console import Console
from rich.table import Table
from shared.ledger_counts import LedgerCounts, LedgerGrowth, Row, read_ledger_lines
from shared.processor_time import read_machine_seconds
from shared.samples import Sample, compare_memory, compute_cost

# As a package of that name, whose modules import one another; the checkout's root stays off sys.path.
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(Path(__file__).resolve().parents[1] / "tests")]

from rlm_batch.flows.sharding.work_pool import SHARD_DEPLOYMENT  # noqa: E402
from tests.infra.workers import Fleet, Machine, Worker, cpu  # noqa: E402

TRIVIAL = "SUBMIT(y=x + 1)"
PAUSE = "import time; time.sleep(0.02); SUBMIT(y=x + 1)"
LOOK = 0.5  # seconds between two samples
SETTLED = 60.0  # seconds for the server to record the last task runs


class Missed(Exception):
    """A part did not end in its time, or a process of it failed."""


# -------------------------------------------------------------------------------------------------------------- the job


@dataclass
class Job:
    """A batch in shards: `rlm-batch batch`, on a machine of its own."""

    fleet: Fleet
    results: Path
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()

    def start(self) -> Machine:
        """Its parent, which may be started again when it has ended."""
        program = str(Path(sys.executable).with_name("rlm-batch"))
        return self.fleet.client([program, "batch", *self.arguments], ports=self.ports, **self.environment)


def job(fleet: Fleet, name: str, code: str, executions: int, shards: int, *options: str, **more: Any) -> Job:
    """A job of that many executions, numbered by their x."""
    folder = fleet.folder / name
    folder.mkdir()
    (folder / "code.py").write_text(code)
    with (folder / "inputs.jsonl").open("w") as file:
        file.writelines(f'{{"x": {x}}}\n' for x in range(executions))
    files = [str(folder / "code.py"), "--inputs", str(folder / "inputs.jsonl"), "--results-path"]
    cut = ["--shards", str(shards)] if shards else []
    return Job(fleet, folder / "ledger", [*files, str(folder / "ledger"), *cut, *options], **more)


def resident(pid: int) -> float:
    """MiB of one process."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def commands(machine: Machine) -> list[int]:
    """The command of a machine: the child of its first process."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()]
    return []


class Watch:
    """Samples a job and its fleet from a thread, until the context ends."""

    def __init__(self, run: Job, parent: Machine, workers: list[Worker]) -> None:
        self._run, self._parent, self._workers = run, parent, workers
        self._growing = LedgerGrowth(run.results)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.samples.append(self._sample())

    def _go_on(self) -> None:
        while not self._over.is_set():
            self.samples.append(self._sample())
            self._over.wait(LOOK)

    def _sample(self) -> Sample:
        server, database = self._run.fleet.server.pid, self._run.fleet.database
        assert server is not None
        used = {
            "parent": self._parent.cpu(),
            "workers": sum(worker.cpu() for worker in self._workers),
            "server": cpu(server),
            "postgres": 0.0 if database is None else cpu(database.pid),
        }
        memory = {"parent": max(map(resident, commands(self._parent)), default=0.0), "server": resident(server)}
        for worker in self._workers:
            memory[worker.name] = max(map(resident, worker.flow_runs()), default=0.0)
        return Sample(time.monotonic(), self._growing.count_lines(), used, memory)


def finish(parent: Machine, until: float, what: Callable[[], object] = lambda: None) -> None:
    """Waits until the parent has ended. Raises Missed where it fails, or has not ended by then."""
    while (status := parent.status()) is None:
        if time.monotonic() > until:
            raise Missed(f"{parent.name} had not ended in its time:\n{tail(parent)}")
        what()
        time.sleep(LOOK)
    if status:
        raise Missed(f"{parent.name} ended with status {status}:\n{tail(parent)}")


def tail(machine: Machine) -> str:
    """The end of what it said."""
    return "\n".join(machine.log.read_text(errors="replace").splitlines()[-15:])


def reach(growing: LedgerGrowth, lines: int, parent: Machine, until: float) -> None:
    """Waits until the ledger has so many lines. Raises Missed if the parent ends before."""
    while growing.count_lines() < lines:
        if parent.status() is not None or time.monotonic() > until:
            raise Missed(f"{growing.lines} results, and then {parent.name} ended or its time was over:\n{tail(parent)}")
        time.sleep(0.1)


def shard_runs(fleet: Fleet) -> dict[str, str]:
    """The runs of the shard deployment: their states by their ids."""
    found: dict[str, str] = {}
    name = SHARD_DEPLOYMENT.partition("/")[2]
    wanted = {"deployments": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC", "limit": 200}
    while page := fleet.post("/flow_runs/filter", {**wanted, "offset": len(found)}):
        found |= {run["id"]: run["state_type"] for run in page}
    return found


def unfinished(fleet: Fleet) -> list[str]:
    """What there is to say of the runs of shards that did not complete."""
    found = [fleet.get(f"/flow_runs/{run}") for run, state in shard_runs(fleet).items() if state != "COMPLETED"]
    return [f"{run['name']}: {run['state_name']}, {run['state']['message']}" for run in found]


def under_way(fleet: Fleet, worker: Worker, growing: LedgerGrowth, size: int) -> list[int]:
    """How many results the shards have that a worker is in the middle of, not those that it begins or ends."""
    found = []
    for run in worker.flow_runs().values():
        with suppress(httpx.HTTPStatusError, KeyError):
            work = Path(fleet.get(f"/flow_runs/{run}")["parameters"]["work"])
            count = growing.by_shard[f"{work.parent.name}-{work.stem.split('-')[0]}"]
            found += [count] if size / 10 < count < size * 0.8 else []
    return found


# ------------------------------------------------------------------------------------------------------------ the parts


def part_workers(options: argparse.Namespace, until: float) -> list[Row]:
    """Two workers, of which one is killed half way."""
    executions = options.executions or 20_000
    with fleet_of(options) as fleet:
        workers = fleet.workers(2, limit=2)
        shards = options.shards or 8
        # They wait a little, or a shard would be over between two looks at it.
        run = job(fleet, "workers", PAUSE, executions, shards, "--reuse-sandboxes", "--max-workers=2")
        begun = time.monotonic()
        parent = run.start()
        growing = LedgerGrowth(run.results)
        reach(growing, executions // 2, parent, until)
        size = -(-executions // shards)
        held = {worker: under_way(fleet, worker, growing, size) for worker in workers}
        while not any(held.values()):
            reach(growing, growing.lines + 1, parent, until)
            held = {worker: under_way(fleet, worker, growing, size) for worker in workers}
        victim = max(workers, key=lambda worker: len(held[worker]))
        victim.kill()
        at = growing.count_lines()
        killed = time.monotonic()
        finish(parent, until)
        seconds, after = time.monotonic() - begun, time.monotonic() - killed
        runs = shard_runs(fleet)
        rows = LedgerCounts.read(run.results).build_rows(executions)
        states = defaultdict(int)
        for state in runs.values():
            states[state] += 1
        return [
            Row(
                "results when a worker was killed",
                f"{at}; its shards had {', '.join(map(str, held[victim]))} of {size}",
            ),
            *rows,
            *(Row("a run that did not complete", text) for text in unfinished(fleet)),
            Row("runs of shards", ", ".join(f"{count} {state}" for state, count in sorted(states.items()))),
            Row("seconds", f"{seconds:.0f}, {after:.0f} of them after the kill"),
            *about(fleet, workers),
        ]


def part_parent(options: argparse.Namespace, until: float) -> list[Row]:
    """The parent is killed in the middle, and run again."""
    executions = options.executions or 4000
    with fleet_of(options) as fleet:
        workers = fleet.workers(2, limit=2)
        shards = options.shards or 8
        run = job(fleet, "parent", PAUSE, executions, shards, "--reuse-sandboxes", "--max-workers=2")
        first = run.start()
        growing = LedgerGrowth(run.results)
        reach(growing, executions // 3, first, until)
        at = growing.count_lines()
        before = shard_runs(fleet)
        first.kill()
        running = {run for run, state in before.items() if state in ("RUNNING", "PENDING", "SCHEDULED")}
        second = run.start()
        finish(second, until)
        after = shard_runs(fleet)
        whole = sum(state == "COMPLETED" for state in after.values())
        kept = sum(after[run] == "COMPLETED" for run in running)
        return [
            Row("results when the parent was killed", str(at)),
            *LedgerCounts.read(run.results).build_rows(executions),
            *(Row("a run that did not complete", text) for text in unfinished(fleet)),
            Row("shards under way then, and adopted", f"{len(running)}, {kept}", "all", len(running) == kept, True),
            Row("runs of shards", f"{len(after)}, {whole} completed", str(shards), len(after) == shards, True),
            *about(fleet, workers),
        ]


def part_speedup(options: argparse.Namespace, until: float) -> list[Row]:
    """One worker, two and four, on executions that wait."""
    module = load_module("standin_of_daytona", "daytona/running.py")
    code = f"import time; time.sleep({options.wait}); SUBMIT(y=x + 1)"
    rows, rates = [], {}
    with fleet_of(options) as fleet, module.Running(boot_s=0.3, log_bytes_per_s=1e9) as standin:
        port = int(standin.url.split(":")[2].split("/")[0])
        about_daytona: dict[str, Any] = {"environment": standin.environment, "ports": [port]}
        workers: list[Worker] = []
        for count in map(int, options.workers.split(",")):
            workers += fleet.workers(count - len(workers), **about_daytona)
            each = options.sandboxes * options.rounds
            run = job(
                fleet, f"speedup-{count}", code, each * count, count, "--provider=daytona", "--reuse-sandboxes",
                f"--max-workers={options.sandboxes}", "--executions-per-task=10",
                environment=standin.environment, ports=(port,),
            )  # fmt: skip
            before = cpu(standin.process.pid)
            parent = run.start()
            busy: list[tuple[float, float]] = []
            peak = 0

            def look(busy: list[tuple[float, float]] = busy) -> None:
                nonlocal peak
                busy.append((time.time(), read_machine_seconds()))
                peak = max(peak, len(standin.state()["sandboxes"]))

            finish(parent, until, look)
            found = LedgerCounts.read(run.results)
            rate, seconds, share = steady(run.results, options.sandboxes, busy)
            rates[count] = rate
            ratio = rate / rates[min(rates)] * min(rates)
            spent = (cpu(standin.process.pid) - before) / (each * count) * 1000
            wanted = {4: 3.6}.get(count) if 1 in rates else None
            text = f"{rate:.1f} a second over {seconds:.0f} s: {ratio:.2f} times" if rate else "no steady state"
            rows += [
                Row(f"{count} workers", text, f"{wanted}" if wanted else "", ratio >= wanted if wanted else None),
                Row("", f"{share:.0%} of the machine's CPU in use; the stand-in {spent:.1f} ms for each"),
                Row("", f"{peak} sandboxes at once; {found.results} results, {found.twice} twice", "",
                    found.results == each * count and not found.twice, True),
            ]  # fmt: skip
            standin.reset()
        return [*rows, *about(fleet, workers)]


def steady(ledger: Path, sandboxes: int, busy: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Results a second while every shard has all of its sandboxes, for how many seconds, and how busy the CPUs were."""
    at: dict[str, list[float]] = defaultdict(list)
    for shard, line in read_ledger_lines(ledger):
        at[shard].append(line["at"])
    for moments in at.values():
        moments.sort()
    if any(len(moments) <= 2 * sandboxes for moments in at.values()):
        return 0.0, 0.0, 0.0
    begin = max(moments[2 * sandboxes] for moments in at.values())
    # A shard's last round is not full.
    end = min(moments[-sandboxes] for moments in at.values())
    if end <= begin:
        return 0.0, 0.0, 0.0
    count = sum(begin < moment <= end for moments in at.values() for moment in moments)
    within = [sample for sample in busy if begin <= sample[0] <= end]
    share = 0.0
    if len(within) > 1:
        share = (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0]) / (os.cpu_count() or 1)
    return count / (end - begin), end - begin, share


def part_million(options: argparse.Namespace, until: float) -> list[Row]:
    """Very many, beside fewer in the same run."""
    executions = options.executions or 1_000_000
    shards = options.shards or 8
    rows: list[Row] = []
    costs: dict[int, tuple[float, float]] = {}
    with fleet_of(options) as fleet:
        workers = fleet.workers(2)
        for count in (options.peer, executions):
            cut = max(1, round(shards * count / executions)) if count < executions else shards
            run = job(
                fleet, f"million-{count}", TRIVIAL, count, cut, "--reuse-sandboxes",
                "--executions-per-task=500", f"--max-workers={options.lanes}", "--no-log-output",
            )  # fmt: skip
            recorded = task_runs(fleet)
            begun = time.monotonic()
            parent = run.start()
            with Watch(run, parent, workers) as watch:
                finish(parent, until)
            seconds = time.monotonic() - begun
            found = LedgerCounts.read(run.results)
            whole, steady = compute_cost(watch.samples)
            costs[count] = (whole[""], steady[""])
            each = ", ".join(f"{name} {steady[name]:.2f}" for name in steady if name)
            wanted = -(-count // cut // 500) * cut
            late = time.monotonic() + SETTLED
            while task_runs(fleet) - recorded < wanted and time.monotonic() < late:
                time.sleep(LOOK)
            rows += [
                Row(f"{count} executions, {cut} shards", f"{seconds:.0f} s, {count / seconds:.0f} a second"),
                Row("CPU ms for each, all in all", f"{whole['']:.2f}"),
                Row("CPU ms for each, after a tenth", f"{steady['']:.2f} ({each})"),
                *found.build_rows(count),
                Row("task runs recorded as completed", str(task_runs(fleet) - recorded), f"{wanted} or so"),
                *(compare_memory(watch.samples) if count == executions else ()),
            ]
        for what, number in (("all in all", 0), ("after a tenth", 1)):
            ratio = costs[executions][number] / costs[options.peer][number]
            rows.append(Row(f"CPU for each, to that of {options.peer}: {what}", f"{ratio:.2f}", "1.2", ratio <= 1.2))
        return [*rows, *answers(fleet), *about(fleet, workers)]


def task_runs(fleet: Fleet) -> int:
    """How many task runs the server shows as completed."""
    return int(fleet.post("/task_runs/count", {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}))


def answers(fleet: Fleet) -> list[Row]:
    """How soon the server answers what the UI asks it."""
    rows = []
    runs = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    for path, body in (
        ("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 50}),
        ("/flow_runs/count", runs),
        ("/task_runs/count", {}),
        ("/task_runs/filter", {"sort": "END_TIME_DESC", "limit": 200}),
        ("/ui/flow_runs/history", {"sort": "START_TIME_DESC", "limit": 1000}),
        ("/logs/filter", {"sort": "TIMESTAMP_DESC", "limit": 200}),
    ):
        begun = time.perf_counter()
        try:
            fleet.post(path, body)
            rows.append(Row(f"POST {path}", f"{(time.perf_counter() - begun) * 1000:.0f} ms", "an answer", True, True))
        except httpx.HTTPError as error:
            rows.append(Row(f"POST {path}", str(error), "an answer", False, True))
    return rows


def part_many(options: argparse.Namespace, until: float) -> list[Row]:
    """300 sandboxes in one process."""
    program = Path(__file__).with_name("many.py")
    if not program.exists():
        raise Missed(f"{program.name} is not there")
    try:
        done = subprocess.run([sys.executable, program], timeout=max(1.0, until - time.monotonic()), check=False)
    except subprocess.TimeoutExpired:
        raise Missed(f"{program.name} had not ended in its time") from None
    return [Row("status of many.py, whose table is above", str(done.returncode), "0", done.returncode == 0, True)]


PARTS: dict[str, Callable[[argparse.Namespace, float], list[Row]]] = {
    "workers": part_workers,
    "speedup": part_speedup,
    "parent": part_parent,
    "many": part_many,
    "million": part_million,
}


@contextmanager
def fleet_of(options: argparse.Namespace) -> Iterator[Fleet]:
    """A server for one part."""
    with Fleet(postgres=not options.sqlite) as fleet:
        yield fleet


def about(fleet: Fleet, workers: list[Worker]) -> list[Row]:
    """What it was measured on."""
    reasons = {worker.refused for worker in workers}
    apart = "namespaces of their own" if reasons == {None} else f"no namespaces ({reasons})"
    database = "SQLite" if fleet.database is None else "Postgres"
    return [Row("measured on", f"{os.cpu_count()} cores, {database}; workers in {apart}")]


def shown(name: str, rows: list[Row], seconds: float) -> None:
    """Prints a part's table."""
    table = Table(title=f"{name}: {seconds:.0f} s", title_justify="left", box=None)
    for heading in ("", "found", "wanted", ""):
        table.add_column(heading)
    for row in rows:
        mark = "" if row.right is None or row.right else "WRONG" if row.count else "not reached"
        table.add_row(row.what, row.found, row.wanted, mark)
    Console(width=140).print(table)
    print(flush=True)


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--executions", type=int, help="of workers (20000), parent (4000) and million (1000000)")
    parser.add_argument("--shards", type=int, help="of workers, parent and million (8)")
    parser.add_argument("--peer", type=int, default=10_000, help="executions that those of million are compared with")
    parser.add_argument("--lanes", type=int, default=2, help="max_workers of each shard of million")
    parser.add_argument("--workers", default="1,2,4", help="of speedup: how many, comma-separated")
    parser.add_argument("--sandboxes", type=int, default=50, help="of speedup: for each worker")
    parser.add_argument("--wait", type=float, default=1.0, help="of speedup: seconds for each execution")
    parser.add_argument("--rounds", type=int, default=20, help="of speedup: executions for each sandbox")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that one part may take")
    parser.add_argument("--sqlite", action="store_true", help="although there is a Postgres")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: they are {', '.join(PARTS)}")
    failed = False
    for name in options.parts or PARTS:
        begun = time.monotonic()
        try:
            rows = PARTS[name](options, begun + options.limit)
        except Missed as error:
            rows = [Row("ended", str(error), "its rows", False, True)]
        shown(name, rows, time.monotonic() - begun)
        failed = failed or any(row.count and not row.right for row in rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
