"""The sandboxes that a flow run keeps after an execution failed, and the files that `rlm-batch shell` finds there."""

import json
from typing import Any

from ..sandbox.wire.nonfinite import restore_numbers
from .execution import Execution

# Numbers of kept sandboxes. Each one counts against the account's limit and costs money.
MAX_KEPT, MAX_KEPT_OF_SHARD = 3, 1
INPUTS_FOLDER = ".rlm-batch"  # a folder in the sandbox's working directory
INPUTS = """# Defines the variables of the execution. Start it with python3 -i.
import json, os

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "inputs.json")) as _file:
    globals().update(json.load(_file))
"""


def build_input_files(execution: Execution) -> dict[str, bytes]:
    """Return files with an execution's code and variables, by their paths in the sandbox."""
    variables: dict[str, Any] = dict(execution.variables)
    for name, encoded in execution.encoded_variables.items():
        variables[name] = json.loads(encoded.json)
        restore_numbers(variables, encoded.build_pointers(name))
    return {
        f"{INPUTS_FOLDER}/code.py": execution.code.encode("utf-8", "replace"),
        # `json.dumps` writes NaN and infinities as `json.load` reads them.
        f"{INPUTS_FOLDER}/inputs.json": json.dumps(variables).encode(),
        f"{INPUTS_FOLDER}/inputs.py": INPUTS.encode(),
    }
