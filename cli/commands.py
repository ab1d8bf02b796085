"""The commands and their options."""

import sys
from typing import Annotated, Any, Unpack

from cyclopts import App, Parameter

from ..flows.docstrings import read_docstring
from ..flows.parameters import RlmParameters, SequenceParameters, SharedParameters, Types
from ..sandbox.errors import ConfigurationError
from . import argument_parsing as arguments
from .deploy import build_deploy_app
from .outcome_output import OutputFormat
from .parameter_options import FlowAction, Json, ShowOutput, add_flow_options

app = App(
    name="rlm-batch",
    help="Runs many pieces of Python, each in a sandbox, as Prefect flows.",
    suppress_keyboard_interrupt=False,  # main says what an interrupt leaves behind
)


@app.command
@add_flow_options
def batch(
    files: Annotated[list[str], Parameter(negative=())],
    /,
    *,
    inputs: str | None = None,
    types: Types = None,
    action: FlowAction,
    **parameters: Unpack[SharedParameters],
) -> int:
    """Run Python files, each in a sandbox of its own; or one file once for each of many inputs.

    Args:
        files: Files of Python code, one execution each; /dev/stdin is standard input.
        inputs: A file of variables for one FILE: JSON lines, CSV or Parquet, an execution a line.
    """
    code: Any = [arguments.read_code(file) for file in files]
    if inputs is not None:
        if len(code) > 1:
            raise ConfigurationError("--inputs goes with one FILE, and there are several")
        code = code[0]
    return action("batch", files, code=code, inputs=arguments.resolve_path(inputs), types=types, **parameters)


@app.command
@add_flow_options
def sweep(
    file: str,
    /,
    *,
    grid: Annotated[list[str] | None, Parameter(negative=())] = None,
    points: str | None = None,
    space: Annotated[list[str] | None, Parameter(negative=())] = None,
    trials: int | None = None,
    sampler: str = "tpe",
    seed: int = 0,
    pruner: str | None = None,
    minimize: Annotated[list[str] | None, Parameter(negative=())] = None,
    maximize: Annotated[list[str] | None, Parameter(negative=())] = None,
    types: Types = None,
    action: FlowAction,
    **parameters: Unpack[SharedParameters],
) -> int:
    """Run one Python file over the points of a search space, and find the best trial.

    Args:
        file: A file of Python code that reads the trial's variables and submits its fields; /dev/stdin is standard
            input.
        grid: A variable and its values, as in lr=0.001,0.01; once for each variable, and every combination is a trial.
        points: A file of trials instead of a grid: JSON lines, CSV or Parquet, a trial a line.
        space: A variable and what a sampler draws its values from: bounds, as in lr=log:1e-5..0.1, units=32..512:32
            and depth=1..8, or choices, as in opt=adam,sgd; once for each variable. Or a file of JSON, which may have a
            list of alternatives.
        trials: How many points of the space are tried.
        sampler: How they are drawn: random, tpe, or the import path of another, as optuna.samplers:NSGAIISampler.
        seed: What the sampler draws from, with the number of each trial.
        pruner: median or asha: ends trials by what they report.
        minimize: The submitted field that is least in the best trial; with several objectives once for each.
        maximize: The submitted field that is greatest in the best trial, likewise.
    """
    code = arguments.read_code(file)
    directions = ["minimize"] * len(minimize or ()) + ["maximize"] * len(maximize or ())
    objectives = [*(minimize or ()), *(maximize or ())]
    is_single = len(objectives) <= 1
    return action(
        "sweep",
        [file],
        code=code,
        grid=None if grid is None else arguments.parse_grid(grid),
        points=arguments.resolve_path(points),
        space=None if space is None else arguments.parse_space(space),
        trials=trials,
        sampler=sampler,
        seed=seed,
        pruner=pruner,
        objective=next(iter(objectives), None) if is_single else objectives,
        direction=next(iter(directions), "minimize") if is_single else directions,
        types=types,
        **parameters,
    )


@app.command
@add_flow_options
def rlm(
    query: str,
    /,
    *,
    language_model: str,
    context: str = "",
    context_file: str | None = None,
    context_volume_path: str | None = None,
    action: FlowAction,
    **parameters: Unpack[RlmParameters],
) -> int:
    """Answer a question over a long text, with a recursive language model whose Python runs in a sandbox.

    Args:
        query: The question.
        language_model: A model in LiteLLM's naming, such as openai/gpt-4o-mini, or a saved block such as
            language-model/NAME.
        context: The text that the question is about.
        context_file: A file that has it instead; UTF-8, of any length.
        context_volume_path: Its path on the provider's volume instead.
    """
    return action(
        "rlm",
        [],
        query=query,
        language_model=language_model,
        context=context,
        context_file=arguments.resolve_path(context_file),
        context_volume_path=context_volume_path,
        **parameters,
    )


@app.command
@add_flow_options
def chunks(
    file: str,
    /,
    *,
    chunks: str | None = None,
    data: str | None = None,
    chunk_size: int | None = None,
    volume_name: str | None = None,
    reduce: str | None = None,
    trust_markers: Annotated[bool, Parameter(negative=())] = False,
    types: Types = None,
    action: FlowAction,
    **parameters: Unpack[SharedParameters],
) -> int:
    """Run one Python file over the chunks of some data, on a volume, and another one to bring the chunks together.

    Args:
        file: A file of Python code that reads chunk_id and data, and submits its fields; /dev/stdin is standard input.
        chunks: A file of chunks: JSON lines, CSV or Parquet, with the id and the data of a chunk in each line.
        data: A file of data to be cut into chunks instead: JSON lines, CSV or Parquet, an item a line.
        chunk_size: How many items of the data make a chunk.
        volume_name: The volume that every sandbox has, made when it is first asked for.
        reduce: A file of Python code that runs once when all chunks are done; what they submitted is in results.
        trust_markers: Take completion markers that are not signed, where code could have written them as well.
    """
    code = arguments.read_code(file)
    reduction = None if reduce is None else arguments.read_code(reduce)
    return action(
        "chunks",
        [file],
        code=code,
        chunks=arguments.resolve_path(chunks),
        data=arguments.resolve_path(data),
        chunk_size=chunk_size,
        volume_name=volume_name,
        reduce=reduction,
        trust_markers=trust_markers,
        types=types,
        **parameters,
    )


@app.command
@add_flow_options
def sequence(
    files: Annotated[list[str], Parameter(negative=())],
    /,
    *,
    stop_on_error: bool = True,
    action: FlowAction,
    **parameters: Unpack[SequenceParameters],
) -> int:
    """Run Python files one after the other in one sandbox: what one defines is there in the next.

    Args:
        files: Files of Python code, a step each; /dev/stdin is standard input.
        stop_on_error: Run no further step once one has failed.
    """
    steps = [arguments.read_code(file) for file in files]
    return action("sequence", files, steps=steps, stop_on_error=stop_on_error, **parameters)


volume = App(name="volume", help="List volumes and what is on them, bring files there and home, and remove them.")
app.command(volume)
VolumeProvider = Annotated[str, Parameter(help="local, or a saved block such as local-sandbox/NAME.")]


@volume.command(name="list")
def list_volumes(*, provider: VolumeProvider = "local", json: Json = False) -> int:
    """List the volumes: the names of all that there are, whoever made them."""
    from .volume import print_volumes

    return print_volumes(provider, is_json=json)


@volume.command
def ls(name: str, path: str = "", /, *, provider: VolumeProvider = "local", json: Json = False) -> int:
    """List the files on a volume, with their sizes in bytes.

    Args:
        name: The volume.
        path: A file or a directory on it; by default all of it.
    """
    from .volume import list_files

    return list_files(provider, name, path, is_json=json)


@volume.command
def get(
    name: str,
    path: str,
    target: str = ".",
    /,
    *,
    force: Annotated[bool, Parameter(negative=())] = False,
    provider: VolumeProvider = "local",
) -> int:
    """Bring a file home from a volume, or a directory with all that is in it.

    Args:
        name: The volume.
        path: The file or the directory on it.
        target: A directory to put it in, or the name to give it; by default this directory.
        force: Overwrite files that are here already; otherwise that is asked.
    """
    from .volume import get_files

    return get_files(provider, name, path, target, force=force)


@volume.command
def put(name: str, source: str, path: str | None = None, /, *, provider: VolumeProvider = "local") -> int:
    """Bring a file to a volume.

    Args:
        name: The volume, made when it is first asked for.
        source: The file on this machine.
        path: Where it goes on the volume; by default its own name.
    """
    from .volume import put_file

    return put_file(provider, name, source, path)


@volume.command
def rm(
    name: str,
    path: str,
    /,
    *,
    recursive: Annotated[bool, Parameter(negative=())] = False,
    provider: VolumeProvider = "local",
) -> int:
    """Remove a file from a volume.

    Args:
        name: The volume.
        path: The file on it.
        recursive: Remove a directory too, with all that is in it.
    """
    from .volume import remove_files

    return remove_files(provider, name, path, recursive=recursive)


@app.command
def report(
    run: str,
    /,
    *,
    html: str | None = None,
    csv: str | None = None,
    raw_csv: Annotated[bool, Parameter(negative=())] = False,
    parquet: str | None = None,
    atif: str | None = None,
    show_output: ShowOutput = False,
    show_queries: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Print the table of a run, and write it with its charts and failures to one HTML file that needs no network.

    Args:
        run: A flow run's id or name, or the path of its results; a run that is under way is told as far as it is.
        html: The HTML file; by default report.html beside the results.
        csv: A file of CSV with a row for each execution. Text that a spreadsheet would run as a formula has an
            apostrophe before it.
        raw_csv: Write text to the file of CSV as it is, for programs other than spreadsheets.
        parquet: The same as Parquet, which needs pyarrow.
        atif: A new or empty directory for the trajectories of recursive language models: a file for each answer, in the
            Agent Trajectory Interchange Format.
        show_queries: Print what the code asked of a language model, and the turns of recursive ones, after the table.
    """
    from .report import show_report

    output = OutputFormat(show_output, json)
    return show_report(run, html, csv, parquet, atif, raw_csv=raw_csv, shows_queries=show_queries, output=output)


@app.command
def reap(
    *,
    provider: str = "local",
    older_than: float | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    json: Json = False,
) -> int:
    """Remove the sandboxes that nobody uses any more: their flow run is over, their host died, or their time is up.

    Args:
        provider: local, container, daytona, modal, or a saved block such as daytona-sandbox/NAME.
        older_than: Also take those of a flow run that is not over, but has been silent for so many seconds; 360 at
            least.
        dry_run: Say what would be removed, and remove nothing.
    """
    from .run_flow import run_reap

    return run_reap(is_json=json, provider=provider, older_than=older_than, dry_run=dry_run)


@app.command
def up(*, port: int | None = None, database: str | None = None, auth: str | None = None) -> int:
    """Start a Prefect server with our deployments and a worker that runs them, until Ctrl-C.

    Args:
        port: Where the server and its UI listen, on this machine only; by default 4200.
        database: A Postgres database instead of SQLite's, as postgresql://USER:PASSWORD@HOST/NAME, where several people
            or machines share it.
        auth: What the server asks everybody for, as NAME:PASSWORD; clients have it in PREFECT_API_AUTH_STRING. Whoever
            may list this machine's processes sees it here, and not in PREFECT_SERVER_API_AUTH_STRING, which does the
            same.
    """
    from ..deployments.up import up

    up(port, database, auth)
    return 0


app.command(build_deploy_app([batch, sweep, chunks, sequence, rlm]))


@app.command
def doctor(*, json: Json = False) -> int:
    """Say which providers and which isolation this machine can use, and what to do about the rest."""
    from .doctor import run_doctor

    return run_doctor(is_json=json)


def _restore_help(commands: App) -> None:
    """Give commands below this one their docstrings, which are their help."""
    for name in commands:
        if not name.startswith("-"):
            command = commands[name]
            if command.default_command is not None:
                command.default_command.__doc__ = read_docstring(command.default_command)
            _restore_help(command)


if sys.flags.optimize >= 2:
    _restore_help(app)
