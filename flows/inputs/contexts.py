"""The contexts of recursive queries: the code that reads a context in a sandbox, its variables and its files."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...tasks.repeats import Item
from .file_patterns import compute_file_digest
from .host_paths import check_input_path
from .spilling import read_json_reference, spill_text

FOLDER = ".rlm-contexts"  # folder of contexts in the sandbox
# A longer context is a file in the sandbox, which is sent once and is not in the ledger.
MAX_VARIABLE_CHARACTERS = 64 * 1024

# The code asks one recursive query, which has depth 1 as in all code, and submits the answer.
ASK = "SUBMIT(answer=rlm_query(query, context=context))"
ASK_WITHOUT = "SUBMIT(answer=rlm_query(query))"
ASK_VOLUME = f"context = load_from_volume(context_path, binary=False)\n{ASK}"
# Code of another question in the same sandbox could have changed the file, so its digest is checked.
READ = f"""\
import hashlib, json

def read(digest):
    with open("{FOLDER}/" + digest, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError("the code of an earlier question changed the context: set reuse_sandboxes to False")
    return data.decode("utf-8", "replace")

context = {{context}}
{ASK}
"""


@dataclass(slots=True)
class ContextReader:
    """Reads contexts, and keeps the files that each piece of code needs.

    `files` has the files by the code that reads them, and by their paths in the sandbox.
    """

    files: dict[str, dict[str, Path]] = field(default_factory=dict[str, dict[str, Path]])
    _digests: dict[Path, str] = field(default_factory=dict[Path, str])

    def read(self, query: str, context: Any, context_file: Any, volume_path: str | None) -> Item:
        """Return the code of the question about a context, and its variables. Raises ConfigurationError.

        The context is a JSON value, a path or a list of paths of the host, or the path of a text on the volume.
        """
        sources = [context not in (None, ""), bool(context_file), bool(volume_path)]
        if sum(sources) > 1:
            raise ConfigurationError(
                "the context is given twice: pass only one of `context`, `context_file` and `context_volume_path`"
            )
        variables: dict[str, Any] = {"query": query}
        if volume_path:
            return (ASK_VOLUME, {**variables, "context_path": volume_path})
        if context_file:
            paths: list[str] = [
                str(path) for path in (context_file if isinstance(context_file, list) else [context_file])
            ]
            names = name_files(paths)
            reads: dict[str, str] = {}
            files: dict[str, Path] = {}
            for name, text in names.items():
                path = Path(os.path.realpath(check_input_path(Path(text).expanduser().absolute())))
                if path not in self._digests:
                    self._digests[path] = compute_file_digest(path)
                reads[name] = f"read({self._digests[path]!r})"
                files[self._digests[path]] = path
            if isinstance(context_file, list):
                text = ", ".join(f"{name!r}: {read}" for name, read in reads.items())
                return self._ask_file(f"{{{text}}}", files, {**variables, "context_file": list(names)})
            ((name, read),) = reads.items()
            return self._ask_file(read, files, {**variables, "context_file": name})
        if context in (None, ""):
            return (ASK_WITHOUT, variables)
        context = read_json_reference(context)
        is_text = isinstance(context, str)
        text = context if is_text else json.dumps(context)
        if len(text) <= MAX_VARIABLE_CHARACTERS:
            return (ASK, {**variables, "context": context})
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        read = f"read({digest!r})" if is_text else f"json.loads(read({digest!r}))"
        return self._ask_file(read, {digest: Path(os.path.realpath(spill_text(text)))}, variables)

    def _ask_file(self, context: str, files: Mapping[str, Path], variables: dict[str, Any]) -> Item:
        code = READ.format(context=context)
        self.files.setdefault(code, {f"{FOLDER}/{digest}": path for digest, path in files.items()})
        return (code, variables)


def name_files(paths: list[str]) -> dict[str, str]:
    """Return the paths by the shortest ends that tell them apart."""
    parts = {path: PurePath(path).parts for path in paths}
    for length in range(1, max(map(len, parts.values()), default=1) + 1):
        names = {"/".join(part[-length:]): path for path, part in parts.items()}
        if len(names) == len(parts):
            return names
    return {path: path for path in paths}
