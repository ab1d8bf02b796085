"""The sandboxes that a flow run keeps after an execution failed, and the files that `rlm-batch shell` finds there."""

import json
from typing import Any

from ..sandbox.wire.nonfinite import restore_numbers
from .execution import Execution

# sandboxes of a flow run, and of each shard, because each one counts against the account's limit and costs money
MAX_KEPT, MAX_KEPT_OF_SHARD = 3, 1
INPUTS_FOLDER = ".rlm-batch"  # a folder in the sandbox's working directory
INPUTS = """# Defines the variables of the execution. Start it with python3 -i.
import json, os

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "inputs.json")) as _file:
    globals().update(json.load(_file))
"""


def build_input_files(execution: Execution) -> dict[str, bytes]:
    """Return files with an execution's code and variables, by their paths in the sandbox.

    `json.load` reads NaN and infinities as `json.dumps` writes them.
    """
    variables: dict[str, Any] = dict(execution.variables)
    for name, encoded in execution.encoded_variables.items():
        value = {name: json.loads(encoded.json)}
        restore_numbers(value, encoded.build_pointers(name))
        variables.update(value)
    files = {
        "code.py": execution.code.encode("utf-8", "replace"),
        "inputs.json": json.dumps(variables).encode(),
        "inputs.py": INPUTS.encode(),
    }
    return {f"{INPUTS_FOLDER}/{name}": data for name, data in files.items()}
