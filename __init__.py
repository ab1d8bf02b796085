"""The public face of rlm-batch: each name is imported from its room when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .blocks.daytona.block import DaytonaSandbox
    from .blocks.dspy_interpreter import InterpreterFactory
    from .blocks.interpreters import DaytonaInterpreter, LocalInterpreter, ModalInterpreter
    from .blocks.language_model.block import LanguageModel
    from .blocks.local.block import LocalSandbox
    from .blocks.modal.block import ModalSandbox
    from .blocks.sync_volume import Volume
    from .flows.batch import batch
    from .flows.chunks import ChunksReport, chunks
    from .flows.reap import reap
    from .flows.rlm import RlmAnswer, rlm
    from .flows.sequence import sequence
    from .flows.sweep import SweepReport, sweep
    from .sandbox.errors import (
        BudgetExceeded,
        CodeCrashed,
        CodeError,
        CodeSyntaxError,
        ConfigurationError,
        DeadlineExceeded,
        DepthExceeded,
        ExecutionsFailed,
        ExecutionTimeout,
        NotRun,
        OutcomeUnknown,
        QueryError,
        QuotaExceeded,
        SandboxesLeft,
        SandboxLost,
        SandboxStartError,
        StateLost,
        SubmitError,
        VolumeError,
    )
    from .sandbox.result import Failure, Result

__all__ = [
    "BudgetExceeded",
    "ChunksReport",
    "CodeCrashed",
    "CodeError",
    "CodeSyntaxError",
    "ConfigurationError",
    "DaytonaInterpreter",
    "DaytonaSandbox",
    "DeadlineExceeded",
    "DepthExceeded",
    "ExecutionTimeout",
    "ExecutionsFailed",
    "Failure",
    "InterpreterFactory",
    "LanguageModel",
    "LocalInterpreter",
    "LocalSandbox",
    "ModalInterpreter",
    "ModalSandbox",
    "NotRun",
    "OutcomeUnknown",
    "QueryError",
    "QuotaExceeded",
    "Result",
    "RlmAnswer",
    "SandboxLost",
    "SandboxStartError",
    "SandboxesLeft",
    "StateLost",
    "SubmitError",
    "SweepReport",
    "Volume",
    "VolumeError",
    "batch",
    "chunks",
    "reap",
    "rlm",
    "sequence",
    "sweep",
]


if not TYPE_CHECKING:  # A type checker that saw it would take any name for a public one.

    def __getattr__(name: str) -> object:
        # Prefect takes seconds to import and the SDKs another one: nobody pays for a name that is not used.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_find_module(name), __name__), name)
        return value


def _find_module(name: str) -> str:
    """The module that the block for type checkers, above, imports a public name from."""
    import ast
    from pathlib import Path

    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    return next(f".{node.module}" for node in imports if name in [alias.name for alias in node.names])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
