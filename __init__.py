"""The public names of rlm-batch. The module of a name is imported when the name is first used.

Prefect imports this package in each of its processes, for the types of our blocks. So the import of a module changes no
environment variable, adds no log filter and reads no file.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The public names, in the form that makes them public for a type checker.
    from .blocks.container.block import ContainerSandbox as ContainerSandbox
    from .blocks.daytona.block import DaytonaCredentials as DaytonaCredentials
    from .blocks.daytona.block import DaytonaSandbox as DaytonaSandbox
    from .blocks.dspy_interpreter import InterpreterFactory as InterpreterFactory
    from .blocks.interpreters import AsyncContainerInterpreter as AsyncContainerInterpreter
    from .blocks.interpreters import AsyncDaytonaInterpreter as AsyncDaytonaInterpreter
    from .blocks.interpreters import AsyncLocalInterpreter as AsyncLocalInterpreter
    from .blocks.interpreters import AsyncModalInterpreter as AsyncModalInterpreter
    from .blocks.interpreters import ContainerInterpreter as ContainerInterpreter
    from .blocks.interpreters import DaytonaInterpreter as DaytonaInterpreter
    from .blocks.interpreters import LocalInterpreter as LocalInterpreter
    from .blocks.interpreters import ModalInterpreter as ModalInterpreter
    from .blocks.language_model.block import LanguageModel as LanguageModel
    from .blocks.local.block import LocalSandbox as LocalSandbox
    from .blocks.modal.block import ModalCredentials as ModalCredentials
    from .blocks.modal.block import ModalSandbox as ModalSandbox
    from .blocks.sync_volume import Volume as Volume
    from .flows.batch import batch as batch
    from .flows.check import check as check
    from .flows.chunks import chunks as chunks
    from .flows.plans.chunks import ChunksReport as ChunksReport
    from .flows.reap import reap as reap
    from .flows.reporting.comparison import compare as compare
    from .flows.reporting.pass_at_k import PassAtK as PassAtK
    from .flows.reporting.pass_at_k import pass_at_k as pass_at_k
    from .flows.reporting.pass_at_k import pass_hat_k as pass_hat_k
    from .flows.reports import OutcomesReport as OutcomesReport
    from .flows.reports import RunReport as RunReport
    from .flows.reports import SweepReport as SweepReport
    from .flows.reports import TrialsReport as TrialsReport
    from .flows.rlm import rlm as rlm
    from .flows.rlm_answers import RlmAnswer as RlmAnswer
    from .flows.rlm_answers import RlmAnswers as RlmAnswers
    from .flows.run_code import run_code as run_code
    from .flows.run_report import load_report as load_report
    from .flows.sequence import sequence as sequence
    from .flows.sweep import sweep as sweep
    from .sandbox.errors import BudgetExceeded as BudgetExceeded
    from .sandbox.errors import CheckError as CheckError
    from .sandbox.errors import CodeCrashed as CodeCrashed
    from .sandbox.errors import CodeError as CodeError
    from .sandbox.errors import CodeSyntaxError as CodeSyntaxError
    from .sandbox.errors import ConfigurationError as ConfigurationError
    from .sandbox.errors import DeadlineExceeded as DeadlineExceeded
    from .sandbox.errors import DepthExceeded as DepthExceeded
    from .sandbox.errors import ExecutionsFailed as ExecutionsFailed
    from .sandbox.errors import ExecutionTimeout as ExecutionTimeout
    from .sandbox.errors import NotRun as NotRun
    from .sandbox.errors import OutcomeUnknown as OutcomeUnknown
    from .sandbox.errors import PrepareError as PrepareError
    from .sandbox.errors import QueryError as QueryError
    from .sandbox.errors import QuotaExceeded as QuotaExceeded
    from .sandbox.errors import RlmBatchError as RlmBatchError
    from .sandbox.errors import SandboxesLeft as SandboxesLeft
    from .sandbox.errors import SandboxLost as SandboxLost
    from .sandbox.errors import SandboxStartError as SandboxStartError
    from .sandbox.errors import StateLost as StateLost
    from .sandbox.errors import SubmitError as SubmitError
    from .sandbox.errors import VolumeError as VolumeError
    from .sandbox.queries.records import RlmEvent as RlmEvent
    from .sandbox.queries.shared_budget import Budget as Budget
    from .sandbox.result import Failure as Failure
    from .sandbox.result import Result as Result
    from .tasks.rlm_session import RlmSession as RlmSession
    from .tasks.rlm_session import SessionAnswer as SessionAnswer
    from .tasks.rlm_session import open_rlm as open_rlm

    __all__: list[str]
    __version__: str
else:  # A type checker that sees `__getattr__` accepts any name.

    def __getattr__(name: str) -> object:
        if name == "__version__":  # Blocks have the same version.
            import importlib.metadata

            return importlib.metadata.version("rlm-batch")
        # An import of Prefect takes seconds, and one of the SDKs another second, so only the name's module is imported.
        modules = _find_modules()
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(modules[name], __name__), name)
        return value


@cache
def _find_modules() -> dict[str, str]:
    """Return the modules of the public names, read from the imports for type checkers above."""
    import ast
    from pathlib import Path

    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules |= {alias.name: f".{node.module}" for alias in node.names}
    return modules


def __dir__() -> list[str]:
    return sorted({*globals(), *_find_modules()})
