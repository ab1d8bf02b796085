"""A disturbed batch with its ledger, and the provider and server that it runs on."""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from rlm_batch.sandbox.result import Result
from rlm_batch.tasks.ledger.ledger import Ledger

from ..conftest import descendants
from ..infra.execution_counter import COUNT_EXECUTION, ExecutionCounter
from ..infra.waiting import wait_until
from .faults import TIMEOUT, Host, Hosts, Provider

CODE = COUNT_EXECUTION + "import time\ncount_execution(f'{batch}-{x}')\ntime.sleep(seconds)\nSUBMIT(y=x * x)"


class Batch:
    """A batch whose executions report their starts, and the ledger of its runs."""

    def __init__(self, size: int, block: str, counter: ExecutionCounter, folder: Path, dice: random.Random) -> None:
        self.size = size
        self._counter, self._dice, self._block = counter, dice, block
        self._name = uuid.uuid4().hex[:8]
        self._inputs = [
            {"x": x, "batch": self._name, "address": counter.address, "seconds": round(dice.uniform(0.0, 0.2), 3)}
            for x in range(size)
        ]
        self._ledger = Ledger(folder / self._name)
        self._done: Counter[int] = Counter()  # number of starts per execution that had a result at the last check

    def start(self, hosts: Hosts, provider: Provider, server: str | None = None, **options: Any) -> Host:
        """Start a run of the executions without a result, with random options."""
        dice = self._dice
        shape = {
            "max_workers": dice.choice((3, 6)),
            "reuse_sandboxes": dice.random() < 0.5,
            "executions_per_task": dice.choice((1, 1, 5)),
        }
        common = {"provider": self._block, "timeout": TIMEOUT, "results_path": str(self._ledger.path)}
        parameters = {"code": CODE, "inputs": self._inputs, **common, **shape, **options}
        return hosts.start(provider, server, op="batch", parameters=parameters)

    def count_starts(self) -> Counter[int]:
        """Count the starts of each execution."""
        names = {f"{self._name}-{x}": x for x in range(self.size)}
        return Counter({names[name]: times for name, times in self._counter.counts.items() if name in names})

    def results(self) -> dict[int, Result]:
        """Return the results in the ledger. Fails if one is wrong, lost, or was started again after it had a result."""
        recorded: dict[int, Result] = {}
        for line in self._ledger.load_latest_lines().values():
            outcome = line.to_outcome()
            if isinstance(outcome, Result):
                x = outcome.meta.variables["x"]
                assert x not in recorded, f"two results of {x} count"
                assert outcome.outputs == {"y": x * x}
                recorded[x] = outcome
        starts = self.count_starts()
        for x in self._done:
            assert x in recorded, f"the result of {x} is lost"
            assert starts[x] == self._done[x], f"{x} had a result and was begun again"
        self._done = Counter({x: starts[x] for x in recorded})
        return recorded

    def complete(self) -> None:
        """Fail unless every execution has its result."""
        missing = set(range(self.size)) - set(self.results())
        failed = [line.to_outcome() for line in self._ledger.load_latest_lines().values() if not line.is_success]
        assert not missing, f"no results of {missing}: {failed}"

    def wait_for_progress(self, host: Host, dice: random.Random) -> None:
        """Wait until a random share of the remaining executions has started, and a random part of a second more."""
        left = self.size - len(self.results())
        before, more = sum(self.count_starts().values()), dice.randint(0, max(1, left // 2))
        wait_until(lambda: sum(self.count_starts().values()) >= before + more or host.status() is not None)
        time.sleep(dice.uniform(0.0, 0.3 if more else 1.0))


class Stage:
    """A provider with a saved block, and the processes that ran before."""

    def __init__(self, provider: Provider, hosts: Hosts, server: str, counter: ExecutionCounter, folder: Path) -> None:
        self.provider, self.hosts = provider, hosts
        self._server = server
        self._counter, self._folder = counter, folder
        self._processes = set(descendants())
        name = f"chaos-{uuid.uuid4().hex[:8]}"
        block = provider.block()
        block.save(name)
        self._block = f"{block.get_block_type_slug()}/{name}"
        self._limit = f"rlm-batch.{block.provider_name}-sandbox.{name}"

    def batch(self, size: int, dice: random.Random, block: str | None = None) -> Batch:
        """Return a new batch, by default on the saved block."""
        return Batch(size, block or self._block, self._counter, self._folder, dice)

    def start(self, batch: Batch, server: str | None = None, **options: Any) -> Host:
        """Start a batch, or what remains of it."""
        return batch.start(self.hosts, self.provider, server, **options)

    def finish(self, batch: Batch, **options: Any) -> None:
        """Run the rest of a batch to its end without faults."""
        host = self.start(batch, **options)
        assert host.wait_for_exit(300) == 0, host.read_output()
        batch.complete()

    def no_slot_is_held(self) -> None:
        """Wait until no slot is held; a killed process's slot expires with its lease, after slightly over a minute."""

        def none() -> bool:
            answer = httpx.get(f"{self._server}/v2/concurrency_limits/{self._limit}", timeout=60)
            return not answer.raise_for_status().json()["active_slots"]

        wait_until(none, "no slot is held", timeout=120)

    def check_nothing_remains(self, *, after_lifetime: bool = True) -> None:
        """Wait until no sandbox, folder or process is left, except the servers'.

        With `after_lifetime`, sandboxes get their lifetime to expire, and then a reap removes the rest.
        """
        if after_lifetime:
            with suppress(TimeoutError):
                wait_until(lambda: not self.provider.sandboxes(), timeout=self.provider.reaped_after())
            if self.provider.sandboxes():
                reap = self.hosts.start(self.provider, op="reap", block=self._block)
                assert reap.wait_for_exit() == 0, reap.read_output()
        # The wait is shorter than the lifetime, after which the provider itself removes sandboxes.
        wait_until(lambda: not self.provider.sandboxes(), "no sandbox is left", timeout=30)
        wait_until(lambda: not descendants().keys() - self._processes, "no process is left")
