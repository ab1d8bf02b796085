"""The options' names in messages, which spell parameters as in Python: `max_workers`."""

import re
from functools import cache

from ..blocks.registry import PROVIDERS
from ..flows.parameters import build_signature, find_form
from ..flows.registry import FLOWS, load_model
from ..sandbox import errors

# Options whose name differs from the parameter's name.
OPTIONS_BY_PARAMETER = {
    "cache_results": "resume",
    "environment": "env",
    "objective": "minimize",
    "secrets": "secret",
}
# Parameters without an option. The command prints failures and shows them in its exit status. Each setting of a
# provider has a separate option.
LEFT_OUT = ("on_failure", "provider_options")
# The start of the message of an exception that code raised.
RAISED = re.compile(r"(?:\w+: )?(?:the code|prepare) raised (\w+)")


def is_foreign(message: str) -> bool:
    """Return whether the message is of an exception that code raised and rlm-batch did not define."""
    match = RAISED.match(message)
    return match is not None and not hasattr(errors, match[1])


def describe_error(error: Exception) -> str:
    """Return an error's text for the terminal. Texts of the code and its exceptions stay as they are."""
    text = str(error).rstrip()
    if not is_foreign(text):
        return name_options(text)
    advice = getattr(error, "advice", "")  # the last line of the text, which is ours
    return text.removesuffix(advice) + name_options(advice)


def name_options(text: str) -> str:
    """Return a message for the terminal, where `max_workers` in backticks becomes --max-workers."""
    if "`" not in text:
        return text
    return re.sub(r"`([a-z_]+)`", lambda match: _list_options().get(match[1], match[0]), text)


@cache
def _list_options() -> dict[str, str]:
    """Return the options of the flows' parameters and of the providers' settings by name."""
    names = {name for entry in PROVIDERS.values() for name in entry.load_settings().list_run_settings()}
    names.add("older_than")  # the parameter of `reap`, which has no model
    for flow in FLOWS:
        for name, parameter in build_signature(load_model(flow)).parameters.items():
            form = find_form(parameter.annotation)
            has_option = name not in LEFT_OUT and form.form != "hidden" and not form.is_argument
            if has_option:
                names.add(name)
    options = {name: f"--{OPTIONS_BY_PARAMETER.get(name, name).replace('_', '-')}" for name in names}
    return {**options, "query": "QUERY"}  # an argument
