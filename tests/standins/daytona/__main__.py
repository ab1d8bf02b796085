"""The program that starts the stand-in: `python tests/standins/daytona`."""

import asyncio
import contextlib
import importlib
import sys
from pathlib import Path

# The module is imported from `standins`, because a package named `daytona` would hide the SDK.
sys.path[0] = str(Path(__file__).resolve().parents[2])
serve = importlib.import_module("standins.daytona.server").serve
with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(serve("--pipe" in sys.argv))
