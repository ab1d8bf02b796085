"""Advice for common mistakes in code: modules and names that a sandbox lacks, notebook commands, pip, and the network.

The code may have written the error messages, so the advice uses only plain identifiers from them.
"""

from __future__ import annotations

import builtins
import difflib
import itertools
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

from ..wire.names import QUERY_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection

MISSING_MODULE = re.compile(r"No module named '([A-Za-z_]\w{0,99}(?:\.\w{1,100})?)'")
MISSING_NAME = re.compile(r"name '([A-Za-z_]\w{0,99})' is not defined\b")
# A line of a traceback with a notebook's command, such as `!ls`, `%time` or `files = !ls`.
NOTEBOOK_COMMAND = re.compile(r'^  File "<[^"\n]*>", line \d+\n[ \t]*(?:\w+ *= *)?([!%]{1,2}[A-Za-z].*)$', re.MULTILINE)
COMMAND_WORD = re.compile(r"[^\s,'\"]+")
PACKAGE = re.compile(r"[A-Za-z][\w.-]*(?:\[\w+\])?(?:[<>=~!]{1,2}[\w.*]+)?")  # a name, an extra and a version
PLAIN_OPTIONS = ("-q", "-U", "--quiet", "--upgrade", "--user", "--no-index")  # options of pip without a value
NO_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Could not resolve host|Network is unreachable"
    r"|unable to resolve host address|_socket\.socket\.__init__(?:.*\n){1,3}PermissionError"
)
# Distributions whose name differs from the module's name. A module of the namespace `google` has two parts.
DISTRIBUTIONS = {
    "attr": "attrs", "Bio": "biopython", "bs4": "beautifulsoup4", "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless", "dateutil": "python-dateutil", "docx": "python-docx", "dotenv": "python-dotenv",
    "faiss": "faiss-cpu", "fitz": "PyMuPDF", "git": "GitPython", "google.protobuf": "protobuf", "jose": "python-jose",
    "jwt": "PyJWT", "magic": "python-magic", "OpenSSL": "pyOpenSSL", "PIL": "pillow", "pkg_resources": "setuptools",
    "pptx": "python-pptx", "psycopg2": "psycopg2-binary", "pywt": "PyWavelets", "serial": "pyserial",
    "skimage": "scikit-image", "sklearn": "scikit-learn", "slugify": "python-slugify", "umap": "umap-learn",
    "usb": "pyusb", "websocket": "websocket-client", "yaml": "PyYAML", "zmq": "pyzmq",
}  # fmt: skip
# Common packages that are called as their module.
PACKAGES = frozenset({
    "aiohttp", "httpx", "jax", "lightgbm", "matplotlib", "networkx", "nltk", "numpy", "openai", "openpyxl", "pandas",
    "plotly", "polars", "pyarrow", "pydantic", "requests", "scipy", "seaborn", "spacy", "statsmodels", "sympy",
    "tensorflow", "torch", "tqdm", "transformers", "xgboost",
})  # fmt: skip
# Modules that newer versions of Python no longer have.
REMOVED = frozenset({"asynchat", "asyncore", "cgi", "cgitb", "crypt", "imghdr", "imp", "pipes", "smtpd", "telnetlib"})
IMPORTS = {  # Import statements for names that many programs use.
    "np": "import numpy as np", "pd": "import pandas as pd", "plt": "import matplotlib.pyplot as plt",
    "Path": "from pathlib import Path", "datetime": "from datetime import datetime",
}  # fmt: skip
MAX_STDERR_CHARACTERS = 4000  # end of stderr that can explain an exception
MIN_SIMILARITY = 0.75  # similarity from which a name counts as a misspelling of another name


def find_advice(
    kind: str, message: str, traceback: str, stderr: str, variables: Collection[str] | None, *, has_network: bool
) -> str:
    """Return what the caller can do about an exception of the code, or an empty string.

    Args:
        kind: The exception's type.
        message: The exception's message.
        traceback: The exception's traceback, with lines of the code.
        stderr: The code's error output, where programs that it started report errors.
        variables: The names of the execution's variables, or None in `prepare`, which has neither these nor functions.
        has_network: The sandbox can reach other machines.
    """
    if kind == "SyntaxError":
        return _advise_on_notebook_command(traceback)
    names_program = kind in ("CalledProcessError", "FileNotFoundError") or message == "No module named 'pip'"
    if names_program and (packages := _find_pip_packages(message)):
        return f"The code cannot install packages: add {packages}"
    if kind == "ModuleNotFoundError" and (match := MISSING_MODULE.fullmatch(message)):
        return _advise_on_module(match[1], traceback)
    if kind == "NameError" and (match := MISSING_NAME.match(message)):
        return _advise_on_name(match[1], traceback, variables)
    if not has_network and NO_NETWORK.search(f"{message}\n{traceback}\n{stderr[-MAX_STDERR_CHARACTERS:]}"):
        return "The sandbox has no network: get the data before, and pass it as a variable, a file or a tool's answer"
    return ""


def _advise_on_notebook_command(traceback: str) -> str:
    match = NOTEBOOK_COMMAND.search(traceback)
    if match is None:
        return ""
    command = match[1]
    if packages := _find_pip_packages(command):
        remedy = f"remove it, and add {packages}"
    else:
        remedy = "run the program with subprocess.run" if command.startswith("!") else "remove it"
    return f"`{command[:60]}` is a command of notebooks, and not Python: {remedy}"


def _find_pip_packages(command: str) -> str:
    """Return the setting that replaces a call of pip in a command or in an error about it; empty without a call."""
    words = COMMAND_WORD.findall(command.partition("' returned ")[0])
    name = next((word for word in words if word.lstrip("!%").rpartition("/")[2] in ("pip", "pip3")), None)
    if name is None:
        return ""
    arguments = words[words.index("install") + 1 :] if "install" in words else []
    # After an option such as -r, a word is no package.
    plain = itertools.takewhile(lambda word: word in PLAIN_OPTIONS or PACKAGE.fullmatch(word), arguments)
    packages = [word for word in plain if word not in PLAIN_OPTIONS]
    return f"{', '.join(packages) or 'the package'} to the provider's `packages`"


def _advise_on_module(module: str, traceback: str) -> str:
    if module == "google" and "google.protobuf" in traceback:
        module = "google.protobuf"
    program = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "notebook")
    for directory in (os.path.dirname(program), os.getcwd()):
        path = os.path.join(directory, module)
        if os.path.isfile(f"{path}.py") or os.path.isdir(path):
            return f"The module {module} is in {directory}: add this folder to `python_path`"
    # No advice for a submodule (`a.b`): the error means that the package `a` is installed but lacks the submodule.
    is_known = module in DISTRIBUTIONS or ("." not in module and module not in REMOVED | sys.stdlib_module_names)
    if not is_known:
        return ""
    start = f"The sandbox has no module {module}"
    if module in DISTRIBUTIONS or module in PACKAGES or _is_installed(module):
        return f"{start}: add {DISTRIBUTIONS.get(module, module)} to the provider's `packages`"
    return f"{start}: check the spelling, or add a package to `packages`, or your module's folder to `python_path`"


def _is_installed(module: str) -> bool:
    """Return True if a distribution on this machine has the module's name."""
    try:
        distribution(module)
    except (PackageNotFoundError, ValueError):
        return False
    return True


def _advise_on_name(name: str, traceback: str, variables: Collection[str] | None) -> str:
    if similar := _find_similar(name, variables or ()):
        return f"{name} is not a variable of the execution: did you mean {similar}?"
    similar = _find_similar(name, ("SUBMIT", "report", "display", *QUERY_NAMES))
    if similar and variables is not None:
        return f"{name} is not a function: did you mean {similar}?"
    if name in IMPORTS or name in sys.stdlib_module_names:
        return f"{name} is not imported: add `{IMPORTS.get(name, f'import {name}')}` to the code"
    if variables is None:
        return "prepare has no SUBMIT, report, queries, tools or variables: use them in the code, which runs after it"
    is_called = re.search(rf"\b{name}\s*\(", traceback) is not None  # A variable is no remedy for a call.
    if is_called or _find_similar(name, dir(builtins)):
        return ""
    known = f" (it has {', '.join(sorted(variables)[:10])})" if variables else ""
    return f"{name} is not a variable of the execution{known}: define it in the code, or pass it as a variable"


def _find_similar(name: str, known: Collection[str]) -> str:
    """Return the known name that `name` probably misspells, or an empty string."""
    spellings = {word.replace("_", "").casefold(): word for word in known}
    close = difflib.get_close_matches(name.replace("_", "").casefold(), spellings, 1, MIN_SIMILARITY)
    return spellings[close[0]] if close else ""
