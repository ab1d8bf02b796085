"""The commands and their options."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from ..flows.parameters import read_docstring
from ..flows.registry import MODELS
from .deploy import build_deploy_app
from .output import OutputFormat
from .parameter_options import OUTPUT_OPTIONS, Json, ShowOutput, build_flow_command, make_run_action

app = App(
    name="rlm-batch",
    help="Runs many pieces of Python, each in a sandbox, as Prefect flows.",
    suppress_keyboard_interrupt=False,  # `main` reports an interrupt.
)


for flow_model in MODELS:
    app.command(build_flow_command(flow_model, OUTPUT_OPTIONS, make_run_action), name=flow_model.flow_name)


volume = App(name="volume", help="List volumes and what is on them, bring files there and home, and remove them.")
app.command(volume)
VolumeProvider = Annotated[str, Parameter(help="local, or a saved block such as local-sandbox/NAME.")]


@volume.command(name="list")
def list_volumes(*, provider: VolumeProvider = "local", json: Json = False) -> int:
    """List the names of all volumes."""
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
    """Copy a file, or a directory with its contents, from a volume to this machine.

    Args:
        name: The volume.
        path: The file or the directory on it.
        target: A directory to put it in, or a new name for it; by default the current directory.
        force: Overwrite existing files without a question.
    """
    from .volume import get_files

    return get_files(provider, name, path, target, force=force)


@volume.command
def put(name: str, source: str, path: str | None = None, /, *, provider: VolumeProvider = "local") -> int:
    """Copy a file to a volume.

    Args:
        name: The volume, created if it is missing.
        source: The file on this machine.
        path: The file's path on the volume; by default its own name.
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
        recursive: Remove a directory with its contents.
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
    """Print the table of a run, and write it with charts and failures to one HTML file that needs no network.

    Args:
        run: A flow run's id or name, or the path of its results. A running flow run is reported up to now.
        html: The HTML file; by default report.html next to the results.
        csv: A CSV file with a row for each execution. Text that a spreadsheet would run as a formula gets a leading
            apostrophe.
        raw_csv: Write text to the CSV file unchanged, for programs other than spreadsheets.
        parquet: A Parquet file with the rows of the CSV file; needs pyarrow.
        atif: A new or empty directory for the trajectories of recursive language models: one file per answer, in the
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
    """Remove unused sandboxes: their flow run has ended, their host process has died, or they have expired.

    Args:
        provider: local, container, daytona, modal, or a saved block such as daytona-sandbox/NAME.
        older_than: Also remove sandboxes of a flow run that has not ended, but has been silent for so many seconds; at
            least 360.
        dry_run: Print what would be removed, and remove nothing.
    """
    from .run_flow import run_reap

    return run_reap(is_json=json, provider=provider, older_than=older_than, dry_run=dry_run)


@app.command
def up(*, port: int | None = None, database: str | None = None, auth: str | None = None) -> int:
    """Start a Prefect server with rlm-batch's deployments and a worker that runs them, until Ctrl-C.

    Args:
        port: The port of the server and its UI, on this machine only; by default 4200.
        database: A Postgres database instead of SQLite, as postgresql://USER:PASSWORD@HOST/NAME, for several people or
            machines.
        auth: The server's NAME:PASSWORD, which clients set in PREFECT_API_AUTH_STRING. This option is visible in the
            list of processes; the variable PREFECT_SERVER_API_AUTH_STRING has the same effect and is not.
    """
    from ..deployments.up import up

    up(port, database, auth)
    return 0


app.command(build_deploy_app())


@app.command
def doctor(*, json: Json = False) -> int:
    """Show which providers and isolation levels this machine can use, and how to enable the others."""
    from .doctor import run_doctor

    return run_doctor(is_json=json)


def _restore_help(commands: App) -> None:
    """Restore the docstrings of all commands below this one, which are their help texts."""
    for name in commands:
        if not name.startswith("-"):
            command = commands[name]
            if command.default_command is not None:
                command.default_command.__doc__ = read_docstring(command.default_command)
            _restore_help(command)


if sys.flags.optimize >= 2:
    _restore_help(app)
