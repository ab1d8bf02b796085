"""The commands and their options."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from ..flows.registry import FLOWS
from ..sandbox.errors import ConfigurationError
from .output import Json, OutputFormat, ShowOutput, ShowUsage

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
OutputFile = Annotated[str | None, Parameter(metavar="FILE")]
# Commands whose modules are imported when they are first used. Looking one up in `app` imports it.
IMPORTED_LATER = (*FLOWS, "deploy")

app = App(
    name="rlm-batch",
    help="Run many pieces of Python, each in a sandbox, as Prefect flows.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` reports an interrupt.
)


for number, (flow_name, summary) in enumerate(FLOWS.items()):
    app.command(f"{__package__}.parameter_options:{flow_name}", name=flow_name, help=summary, sort_key=number)


@app.command
def report(
    *runs: Annotated[str, Parameter(metavar="RUN")],
    html: OutputFile = None,
    csv: OutputFile = None,
    execution: Annotated[int | None, Parameter(metavar="N")] = None,
    raw_csv: Flag = False,
    parquet: OutputFile = None,
    messages: OutputFile = None,
    show_output: ShowOutput = False,
    show_queries: Flag = False,
    usage: ShowUsage = False,
    json: Json = False,
) -> int:
    """Print a run's table and write its HTML report, or compare two runs.

    The report has charts and failures in one file that needs no network. A comparison joins executions by their
    variables.

    Args:
        runs: Id or name of a flow run or its beginning, or the path of its results; by default the last run. A running
            flow run is reported up to now. Two runs are compared.
        html: HTML file; by default report.html next to the results
        csv: CSV file with a row for each execution. Text that a spreadsheet would run as a formula gets a leading
            apostrophe.
        execution: Print all of one execution instead: variables, fields or error, and output
        raw_csv: Write text to the CSV file unchanged, for programs other than spreadsheets
        parquet: Parquet file with the rows of the CSV file; needs pyarrow
        messages: File with a line of JSON for each conversation with a language model, as chat messages. The run needs
            --record full.
        show_queries: Print the code's queries to language models after the table, with the turns of recursive ones
    """
    from .report import find_last_path, show_comparison, show_execution, show_report

    output = OutputFormat(show_output, json, usage)
    if len(runs) > 1:
        options = (html, csv, execution, parquet, messages, raw_csv, show_output, show_queries, usage)
        if len(runs) > 2 or any(option is not None and option is not False for option in options):
            raise ConfigurationError("report compares two runs, and then takes only --json: name one run for the rest")
        return show_comparison(runs, output)
    run = runs[0] if runs else find_last_path()
    if execution is not None:
        return show_execution(run, execution, output)
    return show_report(run, html, csv, parquet, messages, raw_csv=raw_csv, shows_queries=show_queries, output=output)


@app.command
def rerun(
    run: str, number: int, /, *, show_output: ShowOutput = False, usage: ShowUsage = False, json: Json = False
) -> int:
    """Run one execution of a run again, with its output live.

    The result is a run of its own: the earlier results stay as they are.

    Args:
        run: Id or name of a flow run, or the path of its results
        number: The number of the execution in the run's table
    """
    from .rerun import rerun_execution

    return rerun_execution(run, number, OutputFormat(show_output, json, usage))


@app.command
def shell(run: str, number: int, /) -> int:
    """Open a terminal in a sandbox that --keep-failed has kept.

    It has the files of the failed execution. `python3 -i .rlm-batch/inputs.py` starts Python with its variables.

    Args:
        run: Id or name of a flow run, or the path of its results
        number: The number of the execution in the run's table
    """
    from .shell import open_shell

    return open_shell(run, number)


@app.command
def runs(*, json: Json = False) -> int:
    """List the runs of this machine, the latest first.

    These are the runs below the results root, and those with results elsewhere.
    """
    from .runs import show_runs

    return show_runs(is_json=json)


@app.command
def prune(
    *,
    older_than: Annotated[str, Parameter(metavar="AGE")],
    dry_run: Flag = False,
    yes: Flag = False,
    json: Json = False,
) -> int:
    """Delete old results and old folders of the cache.

    Results that a run is writing, results outside of the results root, and folders in use stay.

    Args:
        older_than: Age since the last change of results, or the last use of a folder of the cache: 30d, 12h, 45m or 90s
        dry_run: Show what would be deleted, and delete nothing
        yes: Delete without a question
    """
    from .prune import prune

    return prune(older_than, dry_run=dry_run, is_agreed=yes, is_json=json)


app.command(
    f"{__package__}.deploy:app",
    name="deploy",
    help="Create deployments on the Prefect server in PREFECT_API_URL.",
    sort_key=len([*app]),
)


@app.command
def up(
    *,
    port: Annotated[int | None, Parameter(metavar="PORT")] = None,
    database: Annotated[str | None, Parameter(metavar="URL")] = None,
    auth: Annotated[str | None, Parameter(metavar="NAME:PASSWORD")] = None,
) -> int:
    """Start a Prefect server, a worker and rlm-batch's deployments.

    They run until Ctrl-C.

    Args:
        port: Port of the server and its UI on this machine; by default 4200
        database: Postgres database instead of SQLite, for several people or machines:
            postgresql://USER:PASSWORD@HOST/NAME
        auth: Name and password for the server. Clients set them in PREFECT_API_AUTH_STRING. This option is visible in
            the list of processes; the variable PREFECT_SERVER_API_AUTH_STRING has the same effect and is not.
    """
    from ..deployments.up import up

    up(port, database, auth)
    return 0


server = App(name="server", help="Show the shared Prefect server of the command line, or end it.")
app.command(server)


@server.default
def show_servers() -> int:
    """Show the shared Prefect server of the command line, and the address that signs in to its UI.

    Commands start it when they need it. It ends after 15 minutes without a request.
    """
    from .server import show_servers

    return show_servers()


@server.command
def stop(*, force: Flag = False) -> int:
    """End the shared Prefect server.

    Args:
        force: End it even while a command uses it; that command fails, and keeps its results
    """
    from .server import stop_servers

    return stop_servers(force=force)


volume = App(name="volume", help="List volumes, and list, copy and remove their files.")
app.command(volume)
VolumeProvider = Annotated[
    str, Parameter(help="local, or a saved block such as local-sandbox/NAME", metavar="PROVIDER")
]


@volume.command(name="list")
def list_volumes(*, provider: VolumeProvider = "local", json: Json = False) -> int:
    """List the names of all volumes."""
    from .volume import print_volumes

    return print_volumes(provider, is_json=json)


@volume.command
def ls(name: str, path: str = "", /, *, provider: VolumeProvider = "local", json: Json = False) -> int:
    """List the files on a volume, with their sizes in bytes.

    Args:
        name: The volume
        path: A file or directory on the volume; by default all files
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
    force: Flag = False,
    provider: VolumeProvider = "local",
) -> int:
    """Copy a file, or a directory with its contents, from a volume to this machine.

    Args:
        name: The volume
        path: The file or directory on the volume
        target: Directory for the copy, or its new name; by default the current directory
        force: Overwrite existing files without asking
    """
    from .volume import get_files

    return get_files(provider, name, path, target, force=force)


@volume.command
def put(name: str, source: str, path: str | None = None, /, *, provider: VolumeProvider = "local") -> int:
    """Copy a file to a volume.

    Args:
        name: The volume, created if it is missing
        source: The file on this machine
        path: Path on the volume; by default the file's name
    """
    from .volume import put_file

    return put_file(provider, name, source, path)


@volume.command
def rm(
    name: str,
    path: str,
    /,
    *,
    recursive: Flag = False,
    provider: VolumeProvider = "local",
) -> int:
    """Remove a file from a volume.

    Args:
        name: The volume
        path: The file on the volume
        recursive: Remove a directory with its contents
    """
    from .volume import remove_files

    return remove_files(provider, name, path, recursive=recursive)


snapshot = App(name="snapshot", help="List and delete the set-ups of sandboxes that a provider keeps.")
app.command(snapshot)
SnapshotProvider = Annotated[
    str, Parameter(help="daytona, or a saved block such as daytona-sandbox/NAME", metavar="PROVIDER")
]


@snapshot.command(name="list")
def list_snapshots(*, provider: SnapshotProvider = "daytona", json: Json = False) -> int:
    """List the snapshots of set-ups, with their sizes, ages and last use."""
    from .snapshot import print_snapshots

    return print_snapshots(provider, is_json=json)


@snapshot.command(name="rm")
def remove_snapshots(name: str, /, *names: str, provider: SnapshotProvider = "daytona") -> int:
    """Delete snapshots of set-ups. The next run with such a set-up makes it again.

    Args:
        name: The snapshot
        names: More snapshots
    """
    from .snapshot import remove_snapshots

    return remove_snapshots(provider, [name, *names])


@app.command
def reap(
    *,
    provider: Annotated[str, Parameter(metavar="PROVIDER")] = "local",
    older_than: Annotated[float | None, Parameter(metavar="SECONDS")] = None,
    kept: Flag = False,
    dry_run: Flag = False,
    json: Json = False,
) -> int:
    """Remove the sandboxes of runs that have ended or died.

    Expired sandboxes are removed, too.

    Args:
        provider: local, container, daytona, modal, or a saved block such as daytona-sandbox/NAME
        older_than: Seconds of silence after which sandboxes of an unfinished flow run are removed, too; at least 360
        kept: Also remove the sandboxes that --keep-failed keeps, before their hour is over
        dry_run: Show what would be removed, and remove nothing
    """
    from .run_flow import run_reap

    return run_reap(is_json=json, provider=provider, older_than=older_than, dry_run=dry_run, kept=kept)


@app.command
def doctor(*, json: Json = False) -> int:
    """Show which providers and isolation levels work here.

    For the others it shows how to enable them.
    """
    from .doctor import run_doctor

    return run_doctor(is_json=json)


def _list_in_order(commands: App) -> None:
    """List the commands below this one in the order of their definition instead of the alphabet's."""
    for number, name in enumerate(commands):
        if not name.startswith("-") and name not in IMPORTED_LATER:
            commands[name].sort_key = number
            _list_in_order(commands[name])


_list_in_order(app)


def _restore_help(commands: App) -> None:
    """Restore the docstrings of all commands below this one, which are their help texts."""
    from ..flows.parameters import read_docstring

    for name in commands:
        if not name.startswith("-"):
            command = commands[name]
            if command.default_command is not None:
                command.default_command.__doc__ = read_docstring(command.default_command)
            _restore_help(command)


if sys.flags.optimize >= 2:
    _restore_help(app)
