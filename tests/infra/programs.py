"""Programs that a test runs to their end, as a user does."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 250.0  # seconds; a program that takes longer to import Prefect and start its server has hung
COMMAND = str(Path(sys.executable).with_name("rlm-batch"))


def run_program(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its output and status. `options` are those of `subprocess.run`."""
    options = {"timeout": PATIENCE, "text": True, **options}
    return subprocess.run(words, capture_output=True, check=False, **options)
