"""The configuration of Sphinx, which builds the documentation's site (`make docs`)."""

# Sphinx is maintained, while mkdocs-material calls itself inactive and mkdocs had its last release in 2024. Sphinx
# imports what it documents: flows and blocks get their parameters at run time, so a reader of the source misses them.

import inspect
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

from prefect import Task
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger
from sphinx.util.typing import stringify_annotation

import rlm_batch
from rlm_batch.blocks.interpreters import ProviderSandboxes
from rlm_batch.flows.parameters import find_field
from rlm_batch.flows.prefect_flow import BatchFlow
from rlm_batch.sandbox.errors import RlmBatchError

project = "rlm-batch"
version = release = rlm_batch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [".*", "build", "dist"]
html_theme = "furo"
html_title = f"rlm-batch {release}"
html_copy_source = html_show_copyright = html_show_sphinx = False
myst_heading_anchors = 3
autodoc_member_order = "bysource"
default_role = "code"  # Docstrings mark code with single backticks, as Markdown does.
autodoc_typehints_format = "short"
autodoc_mock_imports = ["dspy"]  # Importing it takes many seconds.
maximum_signature_line_length = 88

# The pages below a page in the navigation: those that it links to in this form.
NAVIGATION = {"README": r"\]\((docs/\w[\w-]*|[A-Z]+)\.md\)", "docs/reference": r"\]\((api/\w+)\.rst"}
RETRIES = {
    "never": "It is not retried.",
    "always": "It is retried, up to `retries` times.",
    "if asked": "It is retried with `retry_code_errors`.",
    "if idempotent": "It is retried with `idempotent`.",
}
log = getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Register the handlers; those of docstrings run before napoleon's."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", complete_docstring, priority=100)
    app.connect("autodoc-process-signature", shorten_signature)


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Add a page's links to the navigation, in the page's order."""
    if page in NAVIGATION:
        pages = dict.fromkeys(re.findall(NAVIGATION[page], source[0]))
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", *pages, "```"])


def complete_docstring(_app: Sphinx, what: str, name: str, item: Any, _options: object, lines: list[str]) -> None:
    """Add what the code declares outside the docstring, and warn of parameters and results without documentation."""
    text = "\n".join(lines)
    if isinstance(item, BatchFlow):
        text = insert_arguments(re.sub(r"^Args:\n.*", "", text, flags=re.DOTALL | re.MULTILINE), list_parameters(item))
    elif isinstance(item, type) and issubclass(item, BaseModel):
        text = insert_arguments(text, list_fields(item))
    elif isinstance(item, type) and issubclass(item, ProviderSandboxes):
        text += "\n" + (inspect.getdoc(ProviderSandboxes) or "").partition("\n")[2]
    elif isinstance(item, type) and issubclass(item, RlmBatchError):
        text += f"\n{RETRIES[item.retry_rule]}"
    lines[:] = format_code_blocks(text).splitlines()
    if missing := list_undocumented(what, item, text):
        log.warning("the docstring of %s has no %s", name, ", ".join(missing))


def shorten_signature(
    _app: Sphinx, _what: str, _name: str, item: Any, _options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return a flow's signature without types, which its parameters have, and none where callers need none."""
    if isinstance(item, BatchFlow):
        parameters = inspect.signature(item.fn).parameters.values()
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
        return str(inspect.Signature(plain)), ""
    has_none = isinstance(item, type) and issubclass(item, BaseModel | RlmBatchError | BatchFlow | ProviderSandboxes)
    return ("", "") if has_none else (signature, returned)


def list_parameters(flow: BatchFlow[..., Any]) -> Iterator[str]:
    """Yield a line of an Args section for each parameter of a flow."""
    for parameter in inspect.signature(flow.fn).parameters.values():
        field = find_field(parameter.annotation)
        hints = get_type_hints(SimpleNamespace(__annotations__={"type": parameter.annotation}))  # without Annotated
        yield describe(parameter.name, hints["type"], parameter.default, field and field.description)


def list_fields(model: type[BaseModel]) -> Iterator[str]:
    """Yield a line of an Args section for each field of a model."""
    for name, field in model.model_fields.items():
        yield describe(name, field.annotation, field.get_default(call_default_factory=True), field.description)


def describe(name: str, annotation: Any, default: Any, description: str | None) -> str:
    """Return a line of an Args section: name, type, description and default."""
    kind = re.sub(r"~?\b(?:\w+\.)+", "", stringify_annotation(annotation, "smart"))  # without modules
    text = re.sub(r"([\\*`|]|_(?!\w))", r"\\\1", description or "")  # It is plain text.
    if default is inspect.Parameter.empty or default is PydanticUndefined:
        text += " Required."
    elif default is not None or "default" not in text:
        text += f" Default: `{default!r}`."
    return f"    {name} ({kind}): {text}"


def insert_arguments(text: str, arguments: Iterable[str]) -> str:
    """Return the docstring with an Args section before its other sections."""
    head, *rest = re.split(r"^(?=(?:Returns|Raises|Example):$)", text.rstrip(), maxsplit=1, flags=re.MULTILINE)
    return "\n".join([head.rstrip(), "", "Args:", *arguments, "", *rest])


def format_code_blocks(text: str) -> str:
    """Return the text with Markdown's blocks of code as reStructuredText."""

    def indent(match: re.Match[str]) -> str:
        return f"\n{match[1]}.. code-block:: python\n\n" + re.sub(r"^(?=.)", "    ", match[2], flags=re.MULTILINE)

    return re.sub(r"^( *)```python\n(.*?)^ *```$", indent, text, flags=re.DOTALL | re.MULTILINE)


def list_undocumented(what: str, item: Any, text: str) -> list[str]:
    """Return the parameters of a function or class, and its Returns section, that its docstring lacks."""
    if what not in ("function", "method", "class"):
        return []
    if isinstance(item, type) and issubclass(item, RlmBatchError | BatchFlow | BaseModel):
        return []
    signature = inspect.signature(item.fn if isinstance(item, BatchFlow | Task) else item)
    names = [name for name in signature.parameters if name != "self"]
    missing = [name for name in names if not re.search(rf"^ +\**{name}( \(.*\))?: ", text, re.MULTILINE)]
    is_plain = what == "class" or signature.return_annotation in ("None", None, inspect.Signature.empty)
    return missing if is_plain or "Returns:" in text else [*missing, "Returns section"]
