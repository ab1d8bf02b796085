"""Advice for common mistakes in code: modules and names that a sandbox lacks, notebook commands, pip, and the network.

The code may have written the error messages, so the advice uses only plain identifiers from them.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from typing import TYPE_CHECKING

from ..wire.names import QUERY_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection

MISSING_MODULE = re.compile(r"No module named '([A-Za-z_]\w{0,99}(?:\.\w{1,100})?)'")
MISSING_NAME = re.compile(r"name '([A-Za-z_]\w{0,99})' is not defined\b")
# A line of a traceback with a notebook's command, such as `!ls`, `%time` or `files = !ls`.
NOTEBOOK_COMMAND = re.compile(r'^  File "<[^"\n]*>", line \d+\n[ \t]*(?:\w+ *= *)?([!%]{1,2}[A-Za-z].*)$', re.MULTILINE)
PIP = re.compile(r"\bpip3?\b")
NO_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Could not resolve host|Network is unreachable"
    r"|unable to resolve host address|_socket\.socket\.__init__(?:.*\n){1,3}PermissionError"
)
# Distributions whose name differs from the module's name.
DISTRIBUTIONS = {
    "attr": "attrs", "Bio": "biopython", "bs4": "beautifulsoup4", "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless", "dateutil": "python-dateutil", "docx": "python-docx", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "fitz": "PyMuPDF", "git": "GitPython", "google.protobuf": "protobuf", "jose": "python-jose",
    "jwt": "PyJWT", "magic": "python-magic", "OpenSSL": "pyOpenSSL", "PIL": "pillow", "pkg_resources": "setuptools",
    "pptx": "python-pptx", "psycopg2": "psycopg2-binary", "pywt": "PyWavelets", "serial": "pyserial",
    "skimage": "scikit-image", "sklearn": "scikit-learn", "slugify": "python-slugify", "umap": "umap-learn",
    "usb": "pyusb", "websocket": "websocket-client", "yaml": "PyYAML", "zmq": "pyzmq",
}  # fmt: skip
MAX_STDERR_CHARACTERS = 4000  # end of stderr that can explain an exception
MIN_SIMILARITY = 0.75  # similarity from which a name counts as a misspelling of another name


def find_advice(
    kind: str, message: str, traceback: str, stderr: str, variables: Collection[str] | None, *, has_network: bool
) -> str:
    """Return a sentence on what the caller can do about an exception of the code; empty if the cause is unknown.

    Args:
        kind: The exception's type.
        message: The exception's message.
        traceback: The exception's traceback, with lines of the code.
        stderr: The code's error output, where programs that it started report errors.
        variables: The names of the execution's variables, or None in `prepare`, which has neither these nor functions.
        has_network: The sandbox can reach other machines.
    """
    if kind == "SyntaxError" and (match := NOTEBOOK_COMMAND.search(traceback)):
        remedy = "remove it; packages are set in the provider's `packages`, and subprocess.run runs programs"
        return f"`{match[1][:60]}` is a command of notebooks, and not Python: {remedy}"
    if kind in ("CalledProcessError", "FileNotFoundError", "ModuleNotFoundError") and PIP.search(message):
        return "The code cannot install packages: add them to the provider's `packages`"
    if kind == "ModuleNotFoundError" and (match := MISSING_MODULE.fullmatch(message)):
        return _advise_on_module(match[1], traceback)
    if kind == "NameError" and (match := MISSING_NAME.match(message)):
        return _advise_on_name(match[1], traceback, variables)
    if not has_network and NO_NETWORK.search(f"{message}\n{traceback}\n{stderr[-MAX_STDERR_CHARACTERS:]}"):
        return "The sandbox has no network: get the data before, and pass it as a variable, a file or a tool's answer"
    return ""


def _advise_on_module(module: str, traceback: str) -> str:
    if module == "google" and "google.protobuf" in traceback:
        module = "google.protobuf"
    program = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "notebook")
    for directory in (os.path.dirname(program), os.getcwd()):
        path = os.path.join(directory, module)
        if os.path.isfile(f"{path}.py") or os.path.isdir(path):
            return f"The module {module} is in {directory}: add this folder to `python_path`"
    # A missing submodule (`a.b`) means that the package `a` is installed. Many distributions have parts of `google`.
    is_unclear = "." in module or module == "google" or module in sys.stdlib_module_names
    if is_unclear and module not in DISTRIBUTIONS:
        return ""
    distribution = DISTRIBUTIONS.get(module, module)
    return (
        f"The sandbox has no module {module}: add {distribution} to the provider's `packages`, or your own module's "
        "folder to `python_path`"
    )


def _advise_on_name(name: str, traceback: str, variables: Collection[str] | None) -> str:
    if variables is not None:
        known_names = (*variables, "SUBMIT", "report", "display", *QUERY_NAMES)
        spellings = {known_name.replace("_", "").casefold(): known_name for known_name in known_names}
        close = difflib.get_close_matches(name.replace("_", "").casefold(), spellings, 1, MIN_SIMILARITY)
        if close:
            return f"{name} is not defined: did you mean {spellings[close[0]]}?"
    if name in sys.stdlib_module_names:
        return f"{name} is not imported: add `import {name}` to the code"
    if variables is None:
        return "prepare has no SUBMIT, report, queries, tools or variables: use them in the code, which runs after it"
    if re.search(rf"\b{name}\s*\(", traceback) is not None:  # The code calls it, and a variable cannot be called.
        return ""
    shown_variables = f" (it has {', '.join(sorted(variables)[:10])})" if variables else ""
    return (
        f"{name} is not a variable of the execution{shown_variables}: define it in the code, or pass it as a variable"
    )
