"""A budget that several flow runs and interpreters share, also in several processes: a file of JSON with a lock."""

import asyncio
import atexit
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from ..errors import ConfigurationError
from ..process_identity import is_process_alive, read_own_identity
from .budget import Budget as RunBudget
from .budget import Estimate, Usage

POLL_SECONDS = 0.1  # time between two looks at the calls of other processes
MAX_IDLE_SECONDS = 3600.0  # A run on another machine, or before a reboot, counts as ended after this time.


class _Run(BaseModel):
    """The part of the budget that a run has reserved and not yet used. `process` identifies the run's process."""

    process: str
    changed_at: float
    reserved: list[Estimate]
    kept: list[Estimate]

    def has_ended(self) -> bool:
        is_alive = is_process_alive(self.process)
        return time.time() - self.changed_at > MAX_IDLE_SECONDS if is_alive is None else not is_alive


class _Content(BaseModel):
    """The content of a budget's file."""

    model_config = ConfigDict(allow_inf_nan=False)
    max_llm_calls: NonNegativeInt | None = None
    max_llm_tokens: NonNegativeInt | None = None
    max_cost: NonNegativeFloat | None = None
    usage: Usage = Usage()
    shares: tuple[float, float] | None = None  # see `RunBudget`
    runs: dict[str, _Run] = {}


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
        if path is None:
            folder = tempfile.mkdtemp(prefix="budget-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)  # A flow may outlive this object.
            path = Path(folder) / "budget.json"
        self.path = Path(path).expanduser().absolute()
        with _open_file(self.path, {name: value for name, value in limits.items() if value is not None}):
            pass

    @property
    def usage(self) -> Usage:
        """The calls, tokens and cost of everything so far."""
        with _open_file(self.path) as content:
            return content.usage

    def __fspath__(self) -> str:
        return str(self.path)


class SharedBudget(RunBudget):
    """One run's view of a shared budget. Raises ConfigurationError if the file is not a budget."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._id = path, uuid.uuid4().hex
        with self.open_shared():
            pass

    @contextmanager
    def open_shared(self) -> Generator[None]:
        with _open_file(self._path) as content:
            # The calls of a process that has ended count as unused, as cancelled calls do.
            others = {key: run for key, run in content.runs.items() if key != self._id and not run.has_ended()}
            self._calls, self._tokens, self._cost = content.max_llm_calls, content.max_llm_tokens, content.max_cost
            self.usage, self._shares = content.usage, content.shares
            self._reserved_elsewhere = [call for run in others.values() for call in run.reserved]
            self._kept_elsewhere = [call for run in others.values() for call in run.kept]
            yield
            content.usage, content.shares, content.runs = self.usage, self._shares, others
            if self._reserved or self.kept:
                kept = [turn.maximum for turn in self.kept]
                content.runs[self._id] = _Run(
                    process=read_own_identity(), changed_at=time.time(), reserved=self._reserved, kept=kept
                )

    async def wait_for_others(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), POLL_SECONDS)


@contextmanager
def _open_file(path: Path, new_limits: dict[str, float] | None = None) -> Generator[_Content]:
    """Yield the content of a budget's file, which no other process changes meanwhile, and then save it.

    With `new_limits`, the file need not exist. Raises ConfigurationError.
    """
    new_path = path.with_name(f"{path.name}.new")
    try:
        with open(f"{path}.lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_new = new_limits is not None and not path.exists()
            saved = _Content() if is_new else _Content.model_validate_json(path.read_bytes())
            content = _Content.model_validate({**dict(saved), **(new_limits or {})})
            yield content
            if is_new or content != saved:
                new_path.write_text(content.model_dump_json(), encoding="utf-8")
                new_path.replace(path)  # A process that is killed leaves no half of a file.
    except OSError as error:
        raise ConfigurationError(
            f"the budget {path} cannot be used: {error.strerror}. Budget(path=...) makes it"
        ) from None
    except ValidationError as error:
        problem = error.errors()[0]
        reason = ": ".join(map(str, [*problem["loc"], problem["msg"]]))
        raise ConfigurationError(f"the budget {path} is not valid: {reason}") from None
