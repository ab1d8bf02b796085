"""The origin of a run: the code, options, versions and command that made it, for its record."""

import asyncio
import hashlib
import itertools
import os
import shlex
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from ...blocks.git import describe_checkout
from ...blocks.language_model.credentials import CredentialMask
from ...sandbox.outcomes.text_escape import change_texts
from ...tasks.ledger.run_record import Origin
from ..inputs.host_paths import hash_input
from ..inputs.spilling import read_codes, spill_long_parameters
from ..parameters import find_contents
from .run import Run

MAX_CODE_CHARACTERS = 256 * 1024
MAX_PARAMETERS_BYTES = 32 * 1024  # Records are small, because `rlm-batch runs` reads all of them.


async def describe_origin(run: Run) -> Origin:
    """Return how the run was made, without secrets. Raises ConfigurationError if a parameter cannot be stored."""
    origin = Origin(
        parameters=run.parameters.list_values(),  # type: ignore[union-attr]
        sandbox=await run.compute_fingerprint(),
        facts={
            "Command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "rlm-batch": version("rlm-batch"),
            "Git commit": await describe_checkout(os.getcwd()) or "none: the working directory is in no repository",
        },
    )
    await asyncio.to_thread(_complete_origin, origin, run)
    return origin


def _complete_origin(origin: Origin, run: Run) -> None:
    """Add the texts of code, replace the values of secrets, and move long parameters to files."""
    contents, parameters = find_contents(type(run.parameters)), origin.parameters  # type: ignore[arg-type]
    for name, content in contents.items():
        if content.is_code and parameters[name]:
            text = "\n\n".join(read_codes(parameters[name]))
            origin.code[name] = text[:MAX_CODE_CHARACTERS]
            origin.facts[f"SHA-256 of {name}"] = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        elif content.is_path_if_text and isinstance(parameters[name], str) and os.path.isfile(parameters[name]):
            origin.facts[f"SHA-256 of {name}"] = hash_input(parameters[name])
    models = [] if run.model_access is None else run.model_access.list_settings()
    names = run.options.secrets or ()  # The names of secrets are none.
    hide = CredentialMask(
        options={name: value for name, value in parameters.items() if name not in (*contents, "secrets")},
        settings=[dict(item) for item in (run.provider, *models)],
        words={word: value for word, value in itertools.pairwise(sys.argv) if word[:1] == "-" and value not in names},
        pairs=dict(word.split("=", 1) for word in sys.argv if "=" in word),
    ).build_filter()
    hide_environment = run.provider.build_secret_filter() or hide
    for item in fields(origin):
        value = change_texts(getattr(origin, item.name), lambda text: hide_environment(hide(text)))
        setattr(origin, item.name, value)
    origin.hides_parameters = origin.parameters != parameters
    origin.parameters = spill_long_parameters(origin.parameters, contents, MAX_PARAMETERS_BYTES)
