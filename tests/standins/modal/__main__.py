"""The program that starts the stand-in: `python tests/standins/modal`."""

import asyncio
import importlib
import sys
from pathlib import Path

# The module is imported from `standins`, because a package named `modal` would hide the client.
sys.path[0] = str(Path(__file__).resolve().parents[2])
asyncio.run(importlib.import_module("standins.modal.command_line").serve("--pipe" in sys.argv))
