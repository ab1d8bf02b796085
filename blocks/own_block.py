"""The base class of rlm-batch's blocks, whose types replace no type of another package."""

from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import UUID

from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger, get_run_logger
from prefect.utilities.asyncutils import run_coro_as_sync

from ..sandbox.errors import ConfigurationError
from .registry import SLUG_PREFIX

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    # Prefect's own type is a union that neither sync nor async code can use. Type checkers see the sync method here;
    # async code that they check calls the async one by its name.
    def async_dispatch(async_impl: Callable[..., Any]) -> Callable[[F], F]: ...
else:
    from prefect._internal.compatibility.async_dispatch import async_dispatch


class OwnBlock(Block, ABC):
    """A block of rlm-batch. The block types of all packages share one namespace, so the names of ours have a prefix.

    Prefect derives the slugs from the names. Version 1.0 had no prefix, and `load` finds the blocks that it saved, too.
    """

    @classmethod
    async def aregister_type_and_schema(cls, client: PrefectClient | None = None) -> None:
        """Register the block type. Raises ConfigurationError if another package's type has its slug or its name."""
        slug, name = cls.get_block_type_slug(), cls.get_block_type_name()
        async with get_client() as reader:
            block_types = await reader.read_block_types()
        for block_type in block_types:
            is_ours = block_type.slug == slug and "from rlm_batch import" in (block_type.code_example or "")
            # For a new type, Prefect returns the id of any type with its name.
            if not is_ours and (block_type.slug == slug or block_type.name == name):
                raise ConfigurationError(
                    f"the block type {block_type.slug} ({block_type.name}) of this Prefect server belongs to another "
                    "package, and stays as it is: use another server, or ask its owner to rename it"
                )
        await super().aregister_type_and_schema(client=client)

    @classmethod
    @async_dispatch(aregister_type_and_schema)
    def register_type_and_schema(cls, client: PrefectClient | None = None) -> None:
        """Register the block type as `aregister_type_and_schema` does, outside of async code."""
        run_coro_as_sync(cls.aregister_type_and_schema())

    @classmethod
    async def aload(cls, name: str, validate: bool = True, client: PrefectClient | None = None) -> Self:
        """Load a saved block as `load` does, in async code."""
        try:
            return await super().aload(name, validate=validate, client=client)
        except ValueError as error:
            is_missing = isinstance(error.__cause__, ObjectNotFound)
            old_id = await cls._find_old_block(name) if is_missing else None
            if old_id is None:
                raise
        return await cls.aload_from_ref(old_id, validate=validate, client=client)

    @classmethod
    @async_dispatch(aload)
    def load(cls, name: str, validate: bool = True, client: PrefectClient | None = None) -> Self:
        """Load the saved block of that name, as other blocks of Prefect do."""
        return run_coro_as_sync(cls.aload(name, validate))

    @classmethod
    async def _find_old_block(cls, name: str) -> UUID | None:
        """Return the id of a block with the slug of version 1.0, or None. Raises ConfigurationError for a stranger."""
        slug = cls.get_block_type_slug()
        old_slug = slug.removeprefix(SLUG_PREFIX)
        try:
            async with get_client() as client:
                document = await client.read_block_document_by_name(name, old_slug)
        except ObjectNotFound:
            return None
        fields = document.block_schema.fields["properties"].keys() if document.block_schema else set[str]()
        # Earlier versions had a few fields less. Another package's type has the class's name or some fields by chance.
        is_ours = fields <= cls.model_fields.keys() and len(fields) > len(cls.model_fields) / 2
        if not is_ours:
            raise ConfigurationError(
                f"this Prefect server has no block {slug}/{name}, and {old_slug}/{name} is another package's block: "
                f"save yours with {cls.__name__}(...).save({name!r})"
            )
        log = get_run_logger() if FlowRunContext.get() else get_logger("rlm_batch")
        log.warning(
            "the block %s/%s is of an earlier version: %s.load(%r).save(%r) moves it to %s",
            *(old_slug, name, cls.__name__, name, name, slug),
        )
        return document.id
