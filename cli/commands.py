"""The commands. The module of a command is imported when the command is first used."""

from importlib.util import resolve_name

from cyclopts import App

from ..flows.registry import FLOWS

# The help of each command. The list of commands shows the first line.
COMMANDS = {
    **FLOWS,
    "report": """Print a run's table and write its HTML report, or compare two runs.

The report has charts and failures in one file that needs no network. A comparison joins executions by their variables,
or by those of --by.
""",
    "rerun": """Run one execution of a run again, with its output live.

The result is a run of its own: the earlier results stay as they are.
""",
    "shell": """Open a terminal in a sandbox that --keep-failed has kept.

It has the files of the failed execution. `python3 -i .rlm-batch/inputs.py` starts Python with its variables.
""",
    "runs": """List the runs of this machine, the latest first.

These are the runs below the results root, and those with results elsewhere.
""",
    "prune": """Delete old results and old folders of the cache.

Results that a run is writing, results outside of the results root, and folders in use stay.
""",
    "deploy": "Create deployments on the Prefect server in PREFECT_API_URL.",
    "up": """Start a Prefect server, a worker and rlm-batch's deployments.

They run until Ctrl-C.
""",
    "worker": """Run the flow runs of deployments on this machine.

At Ctrl-C or SIGTERM they end, report their state, and leave no sandbox.
""",
    "server": "Show the shared Prefect server of the command line, or end it.",
    "volume": "List volumes, and list, copy and remove their files.",
    "snapshot": "List and delete the set-ups of sandboxes that a provider keeps.",
    "reap": """Remove the sandboxes of runs that have ended or died.

Expired sandboxes are removed, too.
""",
    "doctor": """Show which providers and isolation levels work here.

For the others it shows how to enable them.
""",
}
# Modules of commands that are not in a module of the command's name.
MODULES = dict.fromkeys(FLOWS, ".parameter_options") | {"up": "..deployments.up", "worker": "..deployments.worker"}

app = App(
    name="rlm-batch",
    help="Run many pieces of Python, each in a sandbox, as Prefect flows.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` reports an interrupt.
)
for number, (name, text) in enumerate(COMMANDS.items()):
    module = resolve_name(MODULES.get(name, f".{name}"), __package__)
    app.command(f"{module}:{name}", name=name, help=text, sort_key=number)
