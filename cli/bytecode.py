"""A warning for an environment in which Python compiles all modules again for every command."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path


def describe_missing_bytecode() -> str | None:
    """Return what to do if Prefect is not compiled, and this process cannot store compiled modules; otherwise None."""
    spec = find_spec("prefect")
    if spec is None or spec.cached is None or spec.origin is None or os.path.exists(spec.cached):
        return None
    modules = Path(spec.origin).parents[1]
    cache = Path(spec.cached)
    if sys.dont_write_bytecode:
        reason = "PYTHONDONTWRITEBYTECODE is set"
    elif not os.access(next(path for path in cache.parents if path.exists()), os.W_OK):
        reason = f"{modules} cannot be written"
    else:
        return None
    command = shlex.join([sys.executable, "-m", "compileall", "-q", str(modules)])
    return (
        f"Python compiles Prefect again for every command, which takes half a minute, because {reason}: run this once, "
        f"as a user who can write there: {command}"
    )
