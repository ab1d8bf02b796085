"""Starts the stand-in: `python tests/standins/modal`."""

import importlib
import sys
from pathlib import Path

# As a package's module, and not of a package with the name of the SDK.
sys.path[0] = str(Path(__file__).resolve().parents[2])
importlib.import_module("standins.modal.command_line").main()
