"""The commands and their options."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from ..flows.docstrings import read_docstring
from ..flows.registry import MODELS
from .deploy import build_deploy_app
from .outcome_output import OutputFormat
from .parameter_options import OUTPUT_OPTIONS, Json, ShowOutput, build_flow_command, make_run_action

app = App(
    name="rlm-batch",
    help="Runs many pieces of Python, each in a sandbox, as Prefect flows.",
    suppress_keyboard_interrupt=False,  # main says what an interrupt leaves behind
)


for flow_model in MODELS:
    app.command(build_flow_command(flow_model, OUTPUT_OPTIONS, make_run_action), name=flow_model.flow_name)


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


app.command(build_deploy_app())


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
