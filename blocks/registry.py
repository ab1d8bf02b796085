"""From a provider's name in a flow's parameters to the provider."""

from __future__ import annotations

from ..sandbox.errors import ConfigurationError
from .daytona.block import DaytonaSandbox
from .local.block import LocalSandbox
from .modal.block import ModalSandbox
from .provider import SandboxProvider

PROVIDERS: dict[str, type[SandboxProvider]] = {
    "local": LocalSandbox,
    "daytona": DaytonaSandbox,
    "modal": ModalSandbox,
}
ISOLATIONS = ("bubblewrap", "landlock", "none")


async def resolve(text: str) -> SandboxProvider:
    """The provider that `text` names.

    `local`, `daytona` and `modal` are the providers with their defaults, `local:none` (or `:landlock`, `:bubblewrap`)
    the local one with that isolation, and `daytona-sandbox/NAME` a block that was saved under that name. Raises
    ConfigurationError.
    """
    found = unsaved(text)
    if found is not None:
        return found
    slug, _, name = text.partition("/")
    return await _saved(slug, name)


def unsaved(text: str) -> SandboxProvider | None:
    """The provider that `text` names if that takes no Prefect server to know, else None. Raises ConfigurationError."""
    if "/" in text:
        return None
    provider, colon, isolation = text.partition(":")
    block = PROVIDERS.get(provider)
    if block is None:
        known = ", ".join([*PROVIDERS, *(f"local:{level}" for level in ISOLATIONS)])
        raise ConfigurationError(
            f"unknown provider {text!r}: it is one of {known}, or a saved block such as local-sandbox/NAME"
        )
    if not colon:
        return block()
    if block is not LocalSandbox or isolation not in ISOLATIONS:
        raise ConfigurationError(
            f"unknown isolation in {text!r}: it is one of {', '.join(f'local:{i}' for i in ISOLATIONS)}"
        )
    return LocalSandbox(isolation=isolation)


async def _saved(slug: str, name: str) -> SandboxProvider:
    for block in PROVIDERS.values():
        if block.get_block_type_slug() == slug:
            try:
                return await block.aload(name)  # type: ignore[return-value]
            except ValueError as error:
                raise ConfigurationError(
                    f"there is no block {slug}/{name} on this Prefect server: save it in the UI or with .save({name!r})"
                ) from error
    known = ", ".join(block.get_block_type_slug() for block in PROVIDERS.values())
    raise ConfigurationError(f"unknown kind of block {slug!r} in {slug}/{name}: it is one of {known}")
