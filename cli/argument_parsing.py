"""From words on the command line to a flow's parameters. What is wrong is a ConfigurationError, in one sentence."""

import json
from pathlib import Path
from typing import Any

from ..blocks.storage.location_parsing import make_absolute
from ..sandbox.errors import ConfigurationError


def read_code(file: str) -> str:
    """The text of a file of code."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the file {file} is not UTF-8 text: it should be Python code") from None


def resolve_path(path: str | None) -> str | None:
    """A path as this directory means it, for a flow that may run in another; a location as it is.

    Raises ConfigurationError.
    """
    if path is not None and not path.strip():
        raise ConfigurationError("a path was given that is empty: is the variable set that it was to come from?")
    return None if path is None else make_absolute(path)


def build_provider(name: str, isolation: str | None) -> str:
    """The flow's `provider`, with the isolation that was insisted on."""
    if isolation is None:
        return name
    if name != "local":
        raise ConfigurationError(f"--isolation is for the local provider, and the provider is {name}")
    return f"local:{isolation}"


def parse_grid(words: list[str]) -> dict[str, list[Any]]:
    """Variables and their values, from words such as `lr=0.001,0.01` or `layers=[[64],[64,64]]`."""
    from ..flows.inputs.readers import parse_cell

    found: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name.strip():
            raise ConfigurationError(f"--grid {word}: it is a variable and its values, as in lr=0.001,0.01")
        name = name.strip()
        if name in found:
            raise ConfigurationError(f"--grid has {name} twice: name all of its values in one")
        if not values.strip():
            raise ConfigurationError(f"--grid {word}: there are no values after the sign; name at least one")
        if values.lstrip().startswith("["):
            try:
                found[name] = json.loads(values)
            except ValueError as error:
                raise ConfigurationError(
                    f"--grid {word}: a list of values in brackets is JSON, and this is not: {error}"
                ) from None
        else:
            found[name] = [parse_cell(value.strip()) for value in values.split(",")]
    return found
