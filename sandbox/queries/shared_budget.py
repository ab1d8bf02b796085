"""A budget that several flow runs and interpreters share, also in several processes: a file of JSON with a lock."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..process_identity import is_process_alive, read_own_identity
from .budget import Budget as RunBudget
from .budget import Estimate, Usage

LIMITS = ("max_llm_calls", "max_llm_tokens", "max_cost")
POLL_SECONDS = 0.1  # time between two looks at the calls of other processes


class Budget:
    """Limits on the model calls, tokens and dollars of everything that gets this budget, also in other processes.

    What is used is in a file, whose path is also a value for the parameter `budget`. A new limit for an existing file
    keeps what is used.

    Args:
        max_cost: US dollars. Default: that of the file, or else no limit.
        max_llm_calls: Calls of models. Default: that of the file, or else no limit.
        max_llm_tokens: Tokens of prompts and answers. Default: that of the file, or else no limit.
        path: The file. Default: a new temporary file.

    Raises:
        ConfigurationError: A limit is negative, or the file has other content.
    """

    def __init__(
        self,
        *,
        max_cost: float | None = None,
        max_llm_calls: int | None = None,
        max_llm_tokens: int | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        limits = {"max_llm_calls": max_llm_calls, "max_llm_tokens": max_llm_tokens, "max_cost": max_cost}
        new_limits = {name: value for name, value in limits.items() if value is not None}
        for name, value in new_limits.items():
            if value < 0:
                raise ConfigurationError(f"`{name}` is {value!r}: use 0 or more")
        if path is None:
            folder = tempfile.mkdtemp(prefix="budget-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)  # A flow may outlive this object.
            path = Path(folder) / "budget.json"
        self.path = Path(path).expanduser().absolute()
        with _lock_file(self.path):
            _write(self.path, {**(_read(self.path) if self.path.exists() else limits), **new_limits})

    @property
    def usage(self) -> Usage:
        """The calls, tokens and cost of everything so far."""
        return Usage(**_read(self.path).get("usage", {}))

    def __fspath__(self) -> str:
        return str(self.path)


class SharedBudget(RunBudget):
    """One run's view of a shared budget. Raises ConfigurationError if the file is none."""

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, f"{read_own_identity()} {uuid.uuid4().hex[:8]}"
        super().__init__()
        self._load(_read(path))

    def _load(self, data: dict[str, Any]) -> None:
        """Take the limits, the usage and the calls of other runs from the file's content."""
        self._calls, self._tokens, self._cost = (data[name] for name in LIMITS)
        self.usage = Usage(**data.get("usage", {}))
        self._shares = tuple(data["shares"]) if data.get("shares") else None
        runs = [run for name, run in data.get("runs", {}).items() if name != self._name]
        self._reserved_elsewhere = [Estimate(*call) for run in runs for call in run["reserved"]]
        self._kept_elsewhere = [Estimate(*call) for run in runs for call in run["kept"]]

    @contextmanager
    def open_shared(self) -> Generator[None]:
        with _lock_file(self._path):
            data = _read(self._path)
            runs: dict[str, Any] = {}
            for name, run in data.get("runs", {}).items():
                has_ended = is_process_alive(name.partition(" ")[0]) is False
                if not has_ended:  # The calls of a process that has ended count as unused, as cancelled calls do.
                    runs[name] = run
            self._load({**data, "runs": runs})
            yield
            runs.pop(self._name, None)
            if self._reserved or self._kept:
                runs[self._name] = {"reserved": self._reserved, "kept": [turn.maximum for turn in self._kept]}
            _write(self._path, {**data, "usage": asdict(self.usage), "shares": self._shares, "runs": runs})

    async def wait_for_others(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), POLL_SECONDS)


@contextmanager
def _lock_file(path: Path) -> Generator[None]:
    """Hold the lock of a budget's file, which each change replaces."""
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {**dict.fromkeys(LIMITS), **data}
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"the budget {path} cannot be read: {reason}. Make it with Budget(path=...)") from None


def _write(path: Path, data: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(data), encoding="utf-8")
    new.replace(path)
