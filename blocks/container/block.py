"""The Prefect block for sandboxes in containers."""

from typing import ClassVar

from pydantic import HttpUrl

from ..sandbox_block import SandboxBlock
from .provider import ContainerProvider


class ContainerSandbox(ContainerProvider, SandboxBlock):
    """Sandboxes in containers of Docker or Podman on this machine. They need no account.

    Any image with Python works. Code runs as a user that is not root, without capabilities or network, and with a
    read-only root. Memory, processes, processors and files are limited for the container as a whole. Linux containers
    share the host's kernel, unless `runtime` names a runtime that does not, such as runsc.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import ContainerSandbox, batch

        sandbox = ContainerSandbox.load("BLOCK_NAME")
        results = batch.sync("SUBMIT(y=x * x)", inputs=[{"x": 2}, {"x": 3}], provider=sandbox)
        print([result.y for result in results])
        ```
    """

    _block_type_name: ClassVar[str] = "RLM Container Sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "Runs code in containers of Docker or Podman, one of which has to be installed on the worker's machine."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://docs.podman.io/")  # type: ignore[misc]
