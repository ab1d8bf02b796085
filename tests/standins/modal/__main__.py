"""The program that starts the stand-in: `python tests/standins/modal`."""

import importlib
import sys
from pathlib import Path

# The module is imported from `standins`, because a package named `modal` would hide the client.
sys.path[0] = str(Path(__file__).resolve().parents[2])
importlib.import_module("standins.modal.command_line").main()
