"""The command's options: names, defaults, descriptions and None values are those of the flows' parameters."""

import inspect
import subprocess
import sys
from types import NoneType
from typing import Any, get_args

import pytest

from rlm_batch.blocks.registry import PROVIDERS
from rlm_batch.cli.commands import app
from rlm_batch.cli.parameter_options import LEFT_OUT, OPTION_NAMES
from rlm_batch.flows.batch import batch
from rlm_batch.flows.chunks import chunks
from rlm_batch.flows.parameters import FORM_ORDER, find_field
from rlm_batch.flows.reap import reap
from rlm_batch.flows.rlm import rlm
from rlm_batch.flows.sequence import sequence
from rlm_batch.flows.sweep import sweep

FLOWS: dict[str, Any] = {
    "batch": batch,
    "sweep": sweep,
    "chunks": chunks,
    "sequence": sequence,
    "rlm": rlm,
    "reap": reap,
}
# Parameters that a command takes in another form: files of code, grids and spaces as text, an option per direction.
WORDS = {"code", "steps", "query", "grid", "space", "objective", "direction", *LEFT_OUT}
OPTIONS_ALONE = {"isolation", "minimize", "maximize", "grid", "space", "show_output", "json"}
SETTINGS = {name for entry in PROVIDERS.values() for name in entry.load_settings().list_run_settings()}
PAIRS = {"mounts": "TARGET=PATH", "tools": "NAME=MODULE:FUNCTION"}  # the form of a dict on the command line
NEEDED = {"rlm": ["--language-model", "m"]}


@pytest.mark.parametrize("name", FLOWS)
def test_a_commands_options_are_the_parameters_of_its_flow(name: str) -> None:
    options = {
        item.field_info.name: item for item in app[name].assemble_argument_collection() if item.name.startswith("--")
    }
    parameters = {
        OPTION_NAMES.get(name, name): value
        for name, value in inspect.signature(FLOWS[name].fn).parameters.items()
        if name not in WORDS
    }
    assert set(options) - OPTIONS_ALONE - SETTINGS == set(parameters) - SETTINGS
    assert set(options) >= (SETTINGS if name != "reap" else set())
    assert not {"repo_token", "api_key", "token_id", "environment", "api_url", "limit_name"} & set(options)
    shared = {OPTION_NAMES.get(item, item) for item in FORM_ORDER}
    nullable: list[str] = []
    for option, parameter in parameters.items():
        assert options[option].field_info.default == parameter.default, option
        field = find_field(parameter.annotation)
        assert field is not None
        if option in shared and name != "reap" and (name, option) != ("rlm", "language_model"):
            form = f": {PAIRS[option]}, once for each" if option in PAIRS else ""
            assert options[option].parameter.help == f"{field.description}{form}.", option
        # A type such as that of code is `str` with a note on its content.
        kinds = [getattr(kind, "__origin__", kind) for kind in get_args(get_args(parameter.annotation)[0])]
        if NoneType in kinds and str not in kinds:
            nullable.append(option)
    words = [word for option in nullable for word in (f"--{option.replace('_', '-')}", "none")]
    command = [name, *([] if name == "reap" else ["x"]), *NEEDED.get(name, []), *words]
    _, bound, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    values = {**bound.arguments, **bound.kwargs}
    assert {option: values.get(option) for option in nullable} == dict.fromkeys(nullable)


PROGRAM = """
import sys
from rlm_batch.cli.main import main
for words in sys.stdin:
    try:
        main(words.split())
    except SystemExit as end:
        print(end.code, file=sys.stderr)
assert "prefect" not in sys.modules
"""


def test_help_and_usage_errors_do_not_import_prefect() -> None:
    commands = {
        "--version": "0\n",
        "batch --help": "0\n",
        "batch x.py --no-such-option": "--no-such-option",
        f"batch {__file__} --max-workers 0 --retries -1": (
            "retries: Input should be greater than or equal to 0; "
            "max_workers: Input should be greater than or equal to 1\n2\n"
        ),
        **{
            f"{command} nosuch.py": "rlm-batch: the file nosuch.py cannot be read: No such file or directory\n2\n"
            for command in ("batch", "sweep", "chunks", "sequence")
        },
    }
    words = "\n".join(commands)
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for text in commands.values():
        assert text in done.stderr
