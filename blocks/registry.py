"""The providers of sandboxes: an entry of static data for each, and the way from a name in a parameter to a provider.

Nothing of a provider is imported before it is asked for. An entry makes a provider known to `provider="NAME"`, to
saved blocks, `rlm-batch doctor`, the interpreters for scripts and the conformance tests.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """One provider: the package blocks/NAME, whose classes and block type are called after it."""

    name: str  # of `provider="NAME"`
    sign_in: str = ""  # what `doctor` says where there are no credentials
    isolations: tuple[str, ...] = ()  # what `provider="NAME:ISOLATION"` takes
    probed_isolations: tuple[str, ...] = ()  # those of them that `doctor` tries, and of which one has to work
    engines: tuple[str, ...] = ()  # what `provider="NAME:ENGINE"` takes

    @property
    def kinds(self) -> tuple[str, ...]:
        """What `provider="NAME:KIND"` takes."""
        return self.isolations or self.engines

    @property
    def kind_setting(self) -> str:
        """The setting that a kind stands for."""
        return "engine" if self.engines else "isolation"

    @property
    def slug(self) -> str:
        """Of its block type on a Prefect server: `daytona-sandbox`."""
        return f"{self.name}-sandbox"

    @property
    def block_name(self) -> str:
        """Of its block's class, a public name of the package: `DaytonaSandbox`."""
        return f"{self.name.title()}Sandbox"

    def load_settings(self) -> type[SandboxSettings]:
        """The settings of its block without the block, such as `DaytonaSettings`, imported now."""
        return getattr(import_module(f".{self.name}.settings", __package__), f"{self.name.title()}Settings")

    def load_provider(self) -> type[SandboxProvider]:
        """The class that opens its sandboxes without Prefect, such as `DaytonaProvider`, imported now."""
        return getattr(import_module(f".{self.name}.provider", __package__), f"{self.name.title()}Provider")

    def load_block(self) -> type[Block]:
        """The Prefect block, imported now, and Prefect with it."""
        return getattr(import_module(f".{self.name}.block", __package__), self.block_name)


PROVIDERS = {
    entry.name: entry
    for entry in (
        ProviderEntry(
            name="local",
            isolations=("bubblewrap", "landlock", "none"),
            probed_isolations=("bubblewrap", "landlock"),
        ),
        ProviderEntry(name="container", engines=("podman", "docker")),
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
    """The provider of that name, or the block itself, with `options` in the place of its own settings of those names.

    `local`, `daytona` and `modal` are the providers with their defaults, `local:none` (or `:landlock`, `:bubblewrap`)
    the local one with that isolation, and `daytona-sandbox/NAME` a block that was saved under that name. Raises
    ConfigurationError.
    """
    if not isinstance(provider, str):
        return provider.with_options(options)
    unsaved = make_unsaved_provider(provider, options)
    if unsaved is not None:
        return unsaved
    from pydantic import ValidationError

    from .settings import describe_problems

    slug, _, name = provider.partition("/")
    for entry in PROVIDERS.values():
        if entry.slug == slug:
            try:
                saved: Any = await entry.load_block().aload(name)
            except ValidationError as error:
                wrong = describe_problems(error)
                raise ConfigurationError(f"the block {provider} cannot be used as it was saved: {wrong}") from None
            except ValueError as error:
                raise ConfigurationError(
                    f"there is no block {slug}/{name} on this Prefect server: save it in the UI or with .save({name!r})"
                ) from error
            return saved.with_options(options)
    known = ", ".join(entry.slug for entry in PROVIDERS.values())
    raise ConfigurationError(f"unknown kind of block {slug!r} in {slug}/{name}: it is one of {known}")


def name_provider(provider: SandboxProvider, options: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
    """Return the `provider` and `provider_options` by which `resolve_provider` makes this block with these options.

    A saved block is referred to by its name. The settings of an unsaved block become options, which everybody sees who
    sees the run. Raises ConfigurationError for settings that only a saved block may have.
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


def make_unsaved_provider(text: str, options: dict[str, Any] | None = None) -> SandboxProvider | None:
    """The provider that `text` names, with these options; None where it names a saved block.

    Raises ConfigurationError.
    """
    if "/" in text:
        return None
    name, colon, kind = text.partition(":")
    entry = PROVIDERS.get(name)
    if entry is None:
        kinds = [f"{entry.name}:{kind}" for entry in PROVIDERS.values() for kind in entry.kinds]
        known = ", ".join([*PROVIDERS, *kinds])
        raise ConfigurationError(
            f"unknown provider {text!r}: it is one of {known}, or a saved block such as local-sandbox/NAME"
        )
    if colon and kind not in entry.kinds:
        if not entry.kinds:
            raise ConfigurationError(
                f"the provider {name} has nothing to choose after a colon, as in {text!r}: leave it out"
            )
        choices = ", ".join(f"{name}:{kind}" for kind in entry.kinds)
        raise ConfigurationError(f"unknown {entry.kind_setting} in {text!r}: it is one of {choices}")
    settings: dict[str, Any] = {entry.kind_setting: kind} if colon else {}
    return entry.load_provider()(**settings).with_options(options)
