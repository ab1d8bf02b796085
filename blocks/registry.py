"""The registry of sandbox providers: static data for each, and functions that turn a name into a provider.

A provider is imported when it is first used. An entry makes a provider available to `provider="NAME"`, saved blocks,
`rlm-batch doctor`, the interpreters for scripts and the conformance tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..sandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from prefect.blocks.core import Block

    from .provider import SandboxProvider
    from .settings import SandboxSettings

SLUG_PREFIX = "rlm-"  # of our block types; version 1.0 had none
MACHINE_PROVIDERS = ("local", "container")  # Their sandboxes are on the machine of the process that opens them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """A provider: the package blocks/NAME. The names of its classes and its block type derive from NAME."""

    name: str  # NAME in `provider="NAME"`
    sign_in: str = ""  # `doctor` prints this if there are no credentials.
    kind_setting: str = ""  # the setting that KIND sets in `provider="NAME:KIND"`
    kinds: tuple[str, ...] = ()  # the values of KIND

    @property
    def slug(self) -> str:
        """Return the slug of its block type on a Prefect server, such as `rlm-daytona-sandbox`."""
        return f"{SLUG_PREFIX}{self.name}-sandbox"

    @property
    def block_name(self) -> str:
        """Return the name of its block's class, which the package exports, such as `DaytonaSandbox`."""
        return f"{self.name.title()}Sandbox"

    def load_settings(self) -> type[SandboxSettings]:
        """Import and return the class of its settings, such as `DaytonaSettings`."""
        return getattr(import_module(f".{self.name}.settings", __package__), f"{self.name.title()}Settings")

    def load_provider(self) -> type[SandboxProvider]:
        """Import and return the class that opens its sandboxes without Prefect, such as `DaytonaProvider`."""
        return getattr(import_module(f".{self.name}.provider", __package__), f"{self.name.title()}Provider")

    def load_block(self) -> type[Block]:
        """Import and return its Prefect block. This imports Prefect."""
        return getattr(import_module(f".{self.name}.block", __package__), self.block_name)


PROVIDERS = {
    entry.name: entry
    for entry in (
        ProviderEntry(name="local", kind_setting="isolation", kinds=("bubblewrap", "landlock", "none")),
        ProviderEntry(name="container", kind_setting="engine", kinds=("podman", "docker")),
        ProviderEntry(
            name="daytona",
            sign_in="no key: set the environment variable DAYTONA_API_KEY, or save a block with one, to use it",
        ),
        ProviderEntry(
            name="modal",
            sign_in="no token: run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, to use it",
        ),
    )
}


async def resolve_provider(provider: str | SandboxProvider, options: dict[str, Any] | None = None) -> SandboxProvider:
    """Return a provider, with `options` overriding its settings.

    A name is that of a provider, maybe with a kind (`local:none`, `container:podman`), or of a saved block
    (`rlm-daytona-sandbox/NAME`). Raises ConfigurationError for a missing provider or block, or an invalid option.
    """
    if not isinstance(provider, str):
        return provider.with_options(options)
    unsaved = make_unsaved_provider(provider, options)
    if unsaved is not None:
        return unsaved
    from .saved_blocks import load_saved_block

    name = find_provider_name(provider)
    if name is None:
        slug = provider.partition("/")[0]
        slugs = ", ".join(entry.slug for entry in PROVIDERS.values())
        raise ConfigurationError(f"unknown kind of block {slug!r} in {provider}: use one of {slugs}")
    saved = await load_saved_block(PROVIDERS[name].load_block(), provider)
    return saved.with_options(options)


def find_provider_name(provider: object) -> str | None:
    """Return the name of the provider that `resolve_provider` makes, such as `local`, or None if it is unknown."""
    if not isinstance(provider, str):
        return getattr(provider, "provider_name", None)
    slug, slash, _ = provider.partition("/")
    if slash:
        names = {entry.slug: entry.name for entry in PROVIDERS.values()}
        return names.get(SLUG_PREFIX + slug.removeprefix(SLUG_PREFIX))
    name, _, _ = provider.partition(":")
    return name if name in PROVIDERS else None


def name_provider(provider: SandboxProvider, options: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
    """Return the `provider` and `provider_options` from which `resolve_provider` makes this block with these options.

    A saved block is named. The settings of an unsaved block become options, which the flow run shows, so it may have no
    settings that only a saved block may have.
    """
    name = getattr(provider, "_block_document_name", None)
    slug = PROVIDERS[provider.provider_name].slug
    if name is not None:
        return f"{slug}/{name}", options
    settings = {setting: getattr(provider, setting) for setting in sorted(provider.model_fields_set)}
    isolation = settings.pop("isolation", "auto")
    text = provider.provider_name if isolation == "auto" else f"{provider.provider_name}:{isolation}"
    saved_only = [setting for setting in settings if setting not in provider.list_run_settings()]
    if saved_only:
        raise ConfigurationError(
            f"this {type(provider).__name__} is not saved, and a flow run would show its {', '.join(saved_only)}: "
            f'save it with .save("NAME") and pass it again, or pass provider="{slug}/NAME"'
        )
    merged = {**settings, **(options or {})}
    return text, merged or None


def make_unsaved_provider(text: str, options: dict[str, Any] | None = None) -> SandboxProvider | None:
    """Return the provider that `text` names, or None for a saved block. Raises ConfigurationError if it is unknown."""
    if "/" in text:
        return None
    name, colon, kind = text.partition(":")
    entry = PROVIDERS.get(name)
    if entry is None or (colon and kind not in entry.kinds):
        kinds = [f"{entry.name}:{kind}" for entry in PROVIDERS.values() for kind in entry.kinds]
        known = ", ".join([*PROVIDERS, *kinds])
        raise ConfigurationError(
            f"unknown provider {text!r}: use one of {known}, or a saved block such as rlm-local-sandbox/NAME"
        )
    settings: dict[str, Any] = {entry.kind_setting: kind} if colon else {}
    return entry.load_provider()(**settings).with_options(options)
