"""The contexts of recursive queries: the code that reads a context in a sandbox, its variables and its files."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.wire.images import build_image_url
from ...tasks.repeats import Item
from .file_patterns import compute_file_digest, open_file
from .host_paths import check_input_path
from .spilling import spill_text

CONTEXT_COLUMNS = ("context", "context_file", "context_volume_path")  # parameters, and columns of a row
IMAGE_HEADER_BYTES = 12  # bytes at the beginning of a file that tell an image
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


def find_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters or columns of a context that are not empty. Raises ConfigurationError for two of them."""
    context = {name: values[name] for name in CONTEXT_COLUMNS if values.get(name) not in (None, "", [])}
    if len(context) > 1:
        raise ConfigurationError(
            "the context is given twice: pass only one of `context`, `context_file` and `context_volume_path`"
        )
    return context


@dataclass(slots=True)
class ContextReader:
    """A reader of contexts, which notes the files that each piece of code needs.

    `files[code]` has the host's files that the code reads, by their paths in the sandbox.
    """

    files: dict[str, dict[str, Path]] = field(default_factory=dict[str, dict[str, Path]])
    # the digest and the path of each file's text
    _texts: dict[Path, tuple[str, Path]] = field(default_factory=dict[Path, tuple[str, Path]])

    def read(self, query: str, context: Mapping[str, Any]) -> Item:
        """Return the code of the question about a context, and its variables. Raises ConfigurationError.

        The context is a result of `find_context`: a JSON value, a path or a list of paths of the host, or the path of a
        text on the volume.
        """
        variables: dict[str, Any] = {"query": query}
        if "context_volume_path" in context:
            return (ASK_VOLUME, {**variables, "context_path": context["context_volume_path"]})
        if "context_file" in context:
            return self._read_files(context["context_file"], variables)
        if "context" in context:
            return self._read_value(context["context"], variables)
        return (ASK_WITHOUT, variables)

    def _read_value(self, context: Any, variables: dict[str, Any]) -> Item:
        is_text = isinstance(context, str)
        text = context if is_text else json.dumps(context)
        if len(text) <= MAX_VARIABLE_CHARACTERS:
            return (ASK, {**variables, "context": context})
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        expression = f"read({digest!r})" if is_text else f"json.loads(read({digest!r}))"
        return self._ask_file(expression, {digest: Path(os.path.realpath(spill_text(text)))}, variables)

    def _read_files(self, context_file: str | list[str], variables: dict[str, Any]) -> Item:
        """Ask about a file, or about a list of files, which becomes a dict of texts by name."""
        is_list = isinstance(context_file, list)
        texts = [str(text) for text in context_file] if is_list else [context_file]
        items: list[str] = []  # the pairs of a Python dict
        files: dict[str, Path] = {}
        names = name_files(texts)
        for name, text in names.items():
            path = Path(os.path.realpath(check_input_path(Path(text).expanduser().absolute())))
            if path not in self._texts:
                self._texts[path] = _find_text(path)
            digest, text_path = self._texts[path]
            items.append(f"{name!r}: read({digest!r})")
            files[digest] = text_path
        if is_list:
            expression = "{" + ", ".join(items) + "}"
            return self._ask_file(expression, files, {**variables, "context_file": list(names)})
        (name,), (digest,) = names, files
        return self._ask_file(f"read({digest!r})", files, {**variables, "context_file": name})

    def _ask_file(self, expression: str, files: Mapping[str, Path], variables: dict[str, Any]) -> Item:
        """Ask about the value of an expression that reads files, which are given by their digests."""
        code = READ.format(context=expression)
        self.files.setdefault(code, {f"{FOLDER}/{digest}": path for digest, path in files.items()})
        return (code, variables)


def _find_text(path: Path) -> tuple[str, Path]:
    """Return the digest and the path of a file's text. That of an image is its data URL, in another file.

    Raises ConfigurationError if the file cannot be read.
    """
    digest = compute_file_digest(path)
    with open_file(path) as stream:
        content = stream.read(IMAGE_HEADER_BYTES)
        if not build_image_url(content):
            return digest, path
        content += stream.read()
    url_path = Path(os.path.realpath(spill_text(build_image_url(content))))
    return compute_file_digest(url_path), url_path


def name_files(paths: list[str]) -> dict[str, str]:
    """Return the paths by the shortest ends that tell them apart, such as `a/notes.txt` and `b/notes.txt`."""
    parts = {path: PurePath(path).parts for path in paths}
    most_parts = max(map(len, parts.values()), default=0)
    for length in range(1, most_parts + 1):
        names = {"/".join(parts[path][-length:]): path for path in parts}
        if len(names) == len(parts):
            return names
    return {path: path for path in paths}
