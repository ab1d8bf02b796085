"""Values of a file of inputs, in the order in which they were parsed: in memory while they are few, then on disk."""

import marshal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from ...sandbox.errors import ConfigurationError

MEMORY_BYTES = 8 * 1024 * 1024  # before they go to a temporary file, which nobody else can open
FORMAT = 2  # marshal's, without its search for what is there twice


class BlockSpool:
    """Blocks of JSON values, which may be read as often as somebody asks. It takes as much room as the file has."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115  # it lives as long as this
        self._lock = threading.Lock()
        self._ends = [0]

    def append(self, block: Any) -> None:
        """Adds a block. Raises ValueError where one is nested too deeply, and ConfigurationError on a full disk."""
        data = marshal.dumps(block, FORMAT)
        try:
            self._file.write(data)
        except OSError as error:
            raise ConfigurationError(
                f"the inputs cannot be kept in a temporary file in {tempfile.gettempdir()}: {error.strerror}. Free "
                "some space, or name another directory with the environment variable TMPDIR"
            ) from None
        self._ends.append(self._ends[-1] + len(data))

    def __iter__(self) -> Iterator[Any]:
        for begin, end in zip(self._ends, self._ends[1:], strict=False):
            with self._lock:
                self._file.seek(begin)
                data = self._file.read(end - begin)
            yield marshal.loads(data)
