"""The origin of a run: the code, options, versions and command that made it, for its record."""

import asyncio
import hashlib
import itertools
import os
import shlex
import sys
from importlib.metadata import version
from typing import Any

from ...blocks.git import describe_checkout
from ...blocks.language_model.credentials import CredentialMask
from ...sandbox.outcomes.text_escape import change_texts
from ...tasks.ledger.run_record import Origin
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
            "Command": shlex.join([*map(os.path.basename, sys.argv[:1]), *sys.argv[1:]]),
            "rlm-batch": version("rlm-batch"),
            "Git commit": await describe_checkout() or "none",
        },
    )
    await asyncio.to_thread(_complete_origin, origin, run)
    return origin


def _complete_origin(origin: Origin, run: Run) -> None:
    """Add the texts of code, replace the values of secrets, and move long parameters to files."""
    contents, parameters = find_contents(type(run.parameters)), dict(origin.parameters)  # type: ignore[arg-type]
    for name, content in contents.items():
        if content.is_code and parameters[name]:
            text = "\n\n".join(read_codes(parameters[name]))
            origin.code[name] = text[:MAX_CODE_CHARACTERS]
            origin.facts[f"SHA-256 of {name}"] = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    options = {name: value for name, value in parameters.items() if name not in contents}
    hide = _make_mask(run, options).build_filter()
    hide_environment = run.provider.build_secret_filter() or hide
    for values in (origin.parameters, origin.sandbox, origin.facts, origin.code):
        for name, value in values.items():  # The names are ours, even if a secret is equal to one.
            values[name] = change_texts(value, lambda text: hide_environment(hide(text)))
    origin.hides_parameters = origin.parameters != parameters
    origin.parameters = spill_long_parameters(origin.parameters, contents, MAX_PARAMETERS_BYTES)


def _make_mask(run: Run, options: dict[str, Any]) -> CredentialMask:
    """Return a mask of the secrets in the options, in the blocks of the provider and the models, and in the command."""
    names = options.pop("secrets", None) or ()  # A name of a secret is not secret itself.
    models = [] if run.model_access is None else run.model_access.list_settings()
    pairs = [pair for pair in itertools.pairwise(sys.argv) if pair[0].startswith("-")]
    pairs += [tuple(word.split(mark, 1)) for mark in "=:" for word in sys.argv if mark in word]
    named = [{name: value} for name, value in pairs if value not in names]
    settings = [dict(item) for item in (run.provider, *models)]
    return CredentialMask(options=options, settings=settings, words=sys.argv, named=named)
