"""What a deployment's run may do on its worker's host: what the worker's environment allows.

Whoever starts such a run chooses its parameters, and with them which code runs in no sandbox and which files are read
and written as the worker's user. A script's own call and the command line consent for themselves: who starts them could
do all that without us.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..sandbox.errors import ConfigurationError
from .storage.data_dirs import resolve_data_dir

ALLOW_NO_ISOLATION = "RLM_BATCH_ALLOW_NO_ISOLATION"
ALLOWED_PATHS = "RLM_BATCH_ALLOWED_PATHS"
ALLOWED_TOOLS = "RLM_BATCH_ALLOWED_TOOLS"
ALLOW_NETWORK = "RLM_BATCH_ALLOW_NETWORK"
# By another name Podman would start whatever program of the PATH is called so, with root's rights where it has them.
OCI_RUNTIMES = {"crun", "kata", "kata-runtime", "krun", "nvidia", "runc", "runsc", "youki"}
# Prefect sets them for the process that a worker, or `.serve()`, runs a flow run in: the latter has only the second.
RUN_VARIABLES = ("PREFECT__FLOW_RUN_ID", "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS")
# Of stores beyond the worker's host. HTTP is not among them: with it whoever starts a run could have the worker read
# addresses of its own network, and see what they answer.
STORE_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "hf", "memory"}
STORE_SCHEMES |= {"sftp", "ssh", "ftp", "smb", "hdfs"}
# What git reaches over a network: an address with a scheme, or `user@host:path`.
REMOTE_REPOSITORY = re.compile(r"(https?|ssh|git|git\+ssh|ssh\+git)://|[^/:]+:(?!:|//)")


def is_deployment_run() -> bool:
    """Whether this process was started for a deployment's run, or the flow run that this is called in is one."""
    if any(name in os.environ for name in RUN_VARIABLES):
        return True
    # Whoever runs a flow has imported it. Tasks of a run have it also in processes of Dask or Ray.
    context: Any = getattr(sys.modules.get("prefect.context"), "FlowRunContext", None)
    run = None if context is None else context.get()
    return run is not None and run.flow_run is not None and run.flow_run.deployment_id is not None


def check_no_isolation() -> None:
    """Returns if code may run here with no isolation. Raises ConfigurationError."""
    if is_deployment_run() and os.environ.get(ALLOW_NO_ISOLATION) != "1":
        raise ConfigurationError(
            "this worker runs no code without isolation (provider local:none, or a block with isolation none): take "
            f"another, or set {ALLOW_NO_ISOLATION}=1 in the worker's environment. Then whoever starts its runs can do "
            "whatever the worker's user can"
        )


def check_network(purpose: str) -> None:
    """Returns if containers on this host may have its network, for what `purpose` names. Raises ConfigurationError."""
    if is_deployment_run() and os.environ.get(ALLOW_NETWORK) != "1":
        raise ConfigurationError(
            f"this worker gives containers no network ({purpose}): go without, or set {ALLOW_NETWORK}=1 in the "
            "worker's environment. Then whoever starts its runs can reach what the worker's network has"
        )


def check_tool(path: str) -> None:
    """Returns if code may call the host's function with that import path. Raises ConfigurationError."""
    if is_deployment_run() and path not in [name.strip() for name in os.environ.get(ALLOWED_TOOLS, "").split(",")]:
        raise ConfigurationError(
            f"this worker does not let runs of deployments call {path}: name it in {ALLOWED_TOOLS} of the worker's "
            "environment (several with commas between them)"
        )


def check_runtime(name: str) -> None:
    """Returns if containers on this host may be run by that OCI runtime. Raises ConfigurationError."""
    if is_deployment_run() and name not in OCI_RUNTIMES:
        raise ConfigurationError(
            f"runs of deployments do not name the runtime {name!r}: it is one of {', '.join(sorted(OCI_RUNTIMES))}"
        )


def check_path(path: Path, below: Path | None = None) -> Path:
    """The path, if this process may use it because of a parameter; of a deployment's run with its links resolved.

    A deployment's run may use what is below `RLM_BATCH_ALLOWED_PATHS`, or `below`. Raises ConfigurationError.
    """
    if not is_deployment_run():
        return path
    real = resolve_links(path)
    roots = [os.path.expanduser(root) for root in os.environ.get(ALLOWED_PATHS, "").split(os.pathsep)]
    roots = [os.path.realpath(root) for root in (*roots, *([] if below is None else [below])) if os.path.isabs(root)]
    if real is None or not any(real.is_relative_to(root) for root in roots):
        raise ConfigurationError(
            f"this worker does not let runs of deployments use {path}: set {ALLOWED_PATHS} in the worker's environment "
            f"to a directory that it is in, after links are followed (several with {os.pathsep!r} between them)"
        )
    return real


def check_writable_directory(path: Path) -> None:
    """Raise ConfigurationError if a deployment's run may not have code write to the directory.

    The worker's own processes run what is in Python's directories, in PREFECT_HOME and in the user's home, and Prefect
    unpickles files of the results root.
    """
    if not is_deployment_run():
        return
    home = Path(os.path.expanduser("~"))
    prefect_home = os.environ.get("PREFECT_HOME") or home / ".prefect"
    own = {sys.prefix, *sys.path, prefect_home, resolve_data_dir("results", "RLM_BATCH_RESULTS")}
    closed = [Path(os.path.realpath(place)) for place in own if os.path.isabs(place)]
    if any(path.is_relative_to(place) or place.is_relative_to(path) for place in closed) or home.is_relative_to(path):
        raise ConfigurationError(
            f"runs of deployments have no volume in {path}, where the worker's own files are: name another directory"
        )


def resolve_links(path: Path) -> Path | None:
    """The path with its links resolved, None where it is no path that could be."""
    try:
        return Path(os.path.realpath(path))
    except (ValueError, OSError):  # a null character; or a link that has just been exchanged for something else
        return None


def check_location(text: str, url: str, settings: dict[str, Any]) -> None:
    """Returns if this process may use fsspec's `url`, which is called `text`. Raises ConfigurationError.

    A deployment's run may use one store at a time: in a chain of locations, and with a block's setting `protocol`,
    fsspec reads the host's own files (`s3://bucket/x::file:///etc/passwd`).
    """
    if not is_deployment_run():
        return
    scheme = url.partition("://")[0].lower()
    if scheme not in STORE_SCHEMES or "::" in url or "protocol" in settings:
        raise ConfigurationError(
            f"runs of deployments do not use {text}: give a location in a store, such as s3://bucket/dir, or a path "
            f"below {ALLOWED_PATHS} of the worker's environment"
        )


def check_repository(url: str) -> None:
    """Returns if this process may clone the repository. Raises ConfigurationError.

    A deployment's run may clone what is on a network, and what is below `RLM_BATCH_ALLOWED_PATHS`.
    """
    if not is_deployment_run() or REMOTE_REPOSITORY.match(url):
        return
    if url.startswith("file://"):  # git leaves the host out, and decodes the rest
        url = unquote("/" + url.removeprefix("file://").partition("/")[2])
    path = os.path.expanduser(url)
    if not os.path.isabs(path):  # or the name of one of git's helpers, as in ext::
        raise ConfigurationError(
            f"runs of deployments do not clone {url}: give an address such as https://host/repository, or an absolute "
            f"path below {ALLOWED_PATHS} of the worker's environment"
        )
    check_path(Path(path))
