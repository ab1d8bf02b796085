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
    from .blocks.volume import Volume
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

# Prefect takes seconds to import and the SDKs another one: nobody pays for a name that is not used.
_MODULES = {
    "DaytonaInterpreter": ".blocks.interpreters",
    "DaytonaSandbox": ".blocks.daytona.block",
    "InterpreterFactory": ".blocks.dspy_interpreter",
    "LanguageModel": ".blocks.language_model.block",
    "LocalInterpreter": ".blocks.interpreters",
    "LocalSandbox": ".blocks.local.block",
    "Volume": ".blocks.volume",
    "ModalInterpreter": ".blocks.interpreters",
    "ModalSandbox": ".blocks.modal.block",
    "batch": ".flows.batch",
    "ChunksReport": ".flows.chunks",
    "chunks": ".flows.chunks",
    "reap": ".flows.reap",
    "sequence": ".flows.sequence",
    "RlmAnswer": ".flows.rlm",
    "rlm": ".flows.rlm",
    "SweepReport": ".flows.sweep",
    "sweep": ".flows.sweep",
    "Failure": ".sandbox.result",
    "Result": ".sandbox.result",
}


if not TYPE_CHECKING:  # A type checker that saw it would take any name for a public one.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Every other public name is an error.
        value = getattr(import_module(_MODULES.get(name, ".sandbox.errors"), __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
