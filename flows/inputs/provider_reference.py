"""A block in the place of a provider's name: as text and options, which are what a flow run's parameters may hold."""

from typing import Any

from ...blocks.provider import SandboxProvider
from ...sandbox.errors import ConfigurationError


def name_provider(provider: SandboxProvider, options: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
    """The `provider` and the `provider_options` that stand for a block and these options.

    A saved block goes by its name, and a run has it as it is saved. Of one that is not saved the settings go along,
    which everybody sees who sees the run. Raises ConfigurationError where there are some that are not for that.
    """
    kind, name = type(provider), getattr(provider, "_block_document_name", None)
    if name is not None:
        return f"{provider.provider_name}-sandbox/{name}", options
    settings = {setting: getattr(provider, setting) for setting in sorted(provider.model_fields_set)}
    isolation = settings.pop("isolation", "auto")
    text = provider.provider_name if isolation == "auto" else f"{provider.provider_name}:{isolation}"
    saved_only = [setting for setting in settings if setting not in kind.list_run_settings()]
    if saved_only:
        raise ConfigurationError(
            f"this {kind.__name__} is not saved, and {', '.join(saved_only)} must not stand in a flow run's "
            f'parameters: save it with .save("NAME") and pass it again, or its name, such as '
            f'provider="{provider.provider_name}-sandbox/NAME"'
        )
    merged = {**settings, **(options or {})}
    return text, merged or None
