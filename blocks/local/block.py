"""The Prefect block of the local provider."""

from typing import ClassVar

from pydantic import HttpUrl

from ..sandbox_block import SandboxBlock
from .provider import LocalProvider


class LocalSandbox(LocalProvider, SandboxBlock):
    """Sandboxes on this machine, which need no account.

    Code runs in separate processes without a network and without the host's environment variables. It can read the
    system's files, and can write to one folder. Memory, processes, file sizes and time are limited. A sandbox shares
    the host's kernel, so a kernel bug can break the isolation. It protects against wrong code, not against a
    determined attacker.

    Example:
        Load a saved block, and run a batch in its sandboxes:
        ```python
        from rlm_batch import LocalSandbox, batch

        sandbox = LocalSandbox.load("BLOCK_NAME")
        results = batch.sync("SUBMIT(y=x * x)", inputs=[{"x": 2}, {"x": 3}], provider=sandbox)
        print([result.y for result in results])
        ```
    """

    _block_type_name: ClassVar[str] = "RLM Local Sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = (  # type: ignore[misc]
        "Runs code in isolated processes on the worker's machine, which has Linux, with no account. Debian's package "
        "bubblewrap isolates more, and is used where it is installed."
    )
    _documentation_url: ClassVar[HttpUrl] = HttpUrl("https://github.com/containers/bubblewrap")  # type: ignore[misc]
