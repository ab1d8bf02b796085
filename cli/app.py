"""The commands and their options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from . import arguments

app = App(
    name="rlm-batch",
    help="Runs many pieces of Python, each in a sandbox, as Prefect flows.",
    version=arguments.version,
    suppress_keyboard_interrupt=False,  # main says what an interrupt leaves behind
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Limits:
    """Options that say how much may be asked of a language model."""

    batch_concurrency: int = 4
    "Requests to the model at one time, for each execution."
    max_depth: int = 2
    "How deep recursive queries may go; plain code is at depth 0."
    max_llm_calls: int = 50
    "Calls of the model, for each execution."
    max_llm_tokens: int | None = None
    "Tokens of prompts and answers, for each execution."
    max_cost: float | None = None
    "US dollars for the model, for the whole run."

    def parameters(self) -> dict[str, Any]:
        """The flow's parameters of the same meaning."""
        return asdict(self)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options that every flow over many executions has."""

    provider: str = "local"
    "local, local:none, or a saved block such as local-sandbox/NAME."
    isolation: Annotated[Literal["bubblewrap", "landlock", "none"] | None, Parameter()] = None
    "For the local provider: insist on one level. none runs code with no isolation."
    max_workers: int = 4
    "Executions at one time, each in a sandbox of its own."
    timeout: float = 120.0
    "Seconds for each execution."
    retries: int = 2
    "How often an execution whose sandbox failed is tried again."
    retry_code_errors: Annotated[bool, Parameter(negative=())] = False
    "Try again also when the code itself failed or timed out."
    idempotent: Annotated[bool, Parameter(negative=())] = False
    "Try again also when a sandbox was lost while the code may have run."
    deadline: float | None = None
    "Seconds for the whole run."
    reuse_sandboxes: Annotated[bool, Parameter(negative=())] = False
    "Keep each worker's sandbox; each execution still has a process of its own."
    executions_per_task: int | None = None
    "Executions in one Prefect task run; by itself as many as make about 1,000 task runs."
    resume: Annotated[bool, Parameter(negative=())] = False
    "Take the results of identical executions of earlier runs, and run only the rest."
    results_path: str | None = None
    "The ledger's directory; by default one below the results root."
    language_model: str | None = None
    "What the code may ask: a model in LiteLLM's naming, or a saved block such as language-model/NAME."

    def parameters(self) -> dict[str, Any]:
        """The flow's parameters of the same meaning."""
        return {
            "provider": arguments.provider(self.provider, self.isolation),
            "max_workers": self.max_workers,
            "timeout": self.timeout,
            "retries": self.retries,
            "retry_code_errors": self.retry_code_errors,
            "idempotent": self.idempotent,
            "deadline": self.deadline,
            "reuse_sandboxes": self.reuse_sandboxes,
            "executions_per_task": self.executions_per_task,
            "cache_results": self.resume,
            "results_path": arguments.absolute(self.results_path),
            "language_model": self.language_model,
        }


@app.command
def batch(
    files: Annotated[list[str], Parameter(negative=())],
    /,
    *,
    inputs: str | None = None,
    common: Common | None = None,
    limits: Limits | None = None,
) -> int:
    """Run Python files, each in a sandbox of its own; or one file once for each of many inputs.

    Parameters
    ----------
    files
        Files of Python code, one execution each; /dev/stdin is standard input.
    inputs
        A file of variables for one FILE: JSON lines or CSV, an execution a line.
    """
    from .run import run_batch

    code: Any = [arguments.code(file) for file in files]
    parameters = {**(common or Common()).parameters(), **(limits or Limits()).parameters()}
    if inputs is not None:
        if len(code) > 1:
            arguments.wrong("--inputs goes with one FILE, and there are several")
        code = code[0]
    return run_batch({"code": code, "inputs": arguments.absolute(inputs), **parameters}, files)


@app.command
def sweep(
    file: str,
    /,
    *,
    grid: Annotated[list[str] | None, Parameter(negative=())] = None,
    points: str | None = None,
    minimize: str | None = None,
    maximize: str | None = None,
    common: Common | None = None,
    limits: Limits | None = None,
) -> int:
    """Run one Python file over the points of a search space, and find the best trial.

    Parameters
    ----------
    file
        A file of Python code that reads the trial's variables and submits its fields; /dev/stdin is standard input.
    grid
        A variable and its values, as in lr=0.001,0.01; once for each variable, and every combination is a trial.
    points
        A file of trials instead of a grid: JSON lines or CSV, a trial a line.
    minimize
        The submitted field that is least in the best trial.
    maximize
        The submitted field that is greatest in the best trial.
    """
    from .run import run_sweep

    if minimize is not None and maximize is not None:
        arguments.wrong("--minimize and --maximize were both given: a sweep has one objective")
    return run_sweep(
        {
            "code": arguments.code(file),
            "grid": None if grid is None else arguments.grid(grid),
            "points": arguments.absolute(points),
            "objective": minimize if maximize is None else maximize,
            "direction": "minimize" if maximize is None else "maximize",
            **(common or Common()).parameters(),
            **(limits or Limits()).parameters(),
        }
    )


@app.command
def rlm(
    query: str,
    /,
    *,
    language_model: str,
    context: str = "",
    context_file: str | None = None,
    context_volume_path: str | None = None,
    provider: str = "local",
    isolation: Annotated[Literal["bubblewrap", "landlock", "none"] | None, Parameter()] = None,
    timeout: float = 600.0,
    retries: int = 2,
    deadline: float | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    results_path: str | None = None,
    limits: Limits | None = None,
) -> int:
    """Answer a question over a long text, with a recursive language model whose Python runs in a sandbox.

    Parameters
    ----------
    query
        The question.
    language_model
        A model in LiteLLM's naming, such as openai/gpt-4o-mini, or a saved block such as language-model/NAME.
    context
        The text that the question is about.
    context_file
        A file that has it instead; UTF-8, of any length.
    context_volume_path
        Its path on the provider's volume instead.
    provider
        local, local:none, or a saved block such as local-sandbox/NAME.
    isolation
        For the local provider: insist on one level. none runs code with no isolation.
    timeout
        Seconds for the answer.
    retries
        How often it is tried again when its sandbox failed.
    deadline
        Seconds for the whole run.
    resume
        Take the answer to the same question over the same text from an earlier run.
    results_path
        The ledger's directory; by default one below the results root.
    """
    from .run import run_rlm

    return run_rlm(
        {
            "query": query,
            "language_model": language_model,
            "context": context,
            "context_file": arguments.absolute(context_file),
            "context_volume_path": context_volume_path,
            "provider": arguments.provider(provider, isolation),
            "timeout": timeout,
            "retries": retries,
            "deadline": deadline,
            "cache_results": resume,
            "results_path": arguments.absolute(results_path),
            **(limits or Limits()).parameters(),
        }
    )


@app.command
def doctor() -> int:
    """Say which providers and which isolation this machine can use, and what to do about the rest."""
    from .doctor import examine

    return examine()
