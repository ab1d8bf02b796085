"""The limits on deployment runs: the worker's file decides what a run may do on the worker's host.

The person who starts a deployment run chooses its parameters. Parameters could make code run without a sandbox, or have
files read and written as the worker's user. Scripts and the command line have no such limits, because their user could
do the same without rlm-batch.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..sandbox.errors import ConfigurationError
from .storage.location import resolve_data_dir
from .worker_policy import WorkerPolicy, list_policy_files, read_policy

# OCI runtimes that a run may name. Podman would start any other name as a program on the PATH, as root if Podman is
# root.
OCI_RUNTIMES = {"crun", "kata", "kata-runtime", "krun", "nvidia", "runc", "runsc", "youki"}
# Prefect sets these for the process of a flow run. A worker sets both, `.serve()` only the second.
RUN_VARIABLES = ("PREFECT__FLOW_RUN_ID", "PREFECT__ENABLE_CANCELLATION_AND_CRASHED_HOOKS")
# Schemes of stores outside the worker's host. HTTP is not allowed: the person who starts a run could make the worker
# read addresses of the worker's network, and see the answers.
STORE_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "tos", "hf", "memory"}
STORE_SCHEMES |= {"sftp", "ssh", "ftp", "smb", "hdfs"}
# Stores whose clients send a token of the worker to the address of a block. Requests to S3 have only a signature.
TOKEN_SCHEMES = {"gs", "gcs", "hf", "az", "abfs", "abfss", "adl"}
ENDPOINT_SETTINGS = {"endpoint", "endpoint_url", "account_host"}
MAX_LINKS = 40  # links in one path; Linux follows no more
# Addresses that git reaches over a network: a URL, or `user@host:path`.
REMOTE_REPOSITORY = re.compile(r"(https?|ssh|git|git\+ssh|ssh\+git)://|[^/:]+:(?!:|//)")


def is_deployment_run() -> bool:
    """Return whether this process was started for a deployment run, or the current flow run belongs to a deployment."""
    if any(name in os.environ for name in RUN_VARIABLES):
        return True
    # A process that runs a flow has imported `prefect.context`. Tasks in Dask or Ray processes have this context too.
    context: Any = getattr(sys.modules.get("prefect.context"), "FlowRunContext", None)
    run = None if context is None else context.get()
    return run is not None and run.flow_run is not None and run.flow_run.deployment_id is not None


def _require(is_allowed: Callable[[WorkerPolicy], bool], refusal: str, remedy: str) -> None:
    """Raise ConfigurationError if this is a deployment run that the worker's file does not allow to do something."""
    if is_deployment_run() and not is_allowed(read_policy()):
        files = " or ".join(map(str, list_policy_files()))
        raise ConfigurationError(f"{refusal}: {remedy} in the worker's file ({files})")


def check_no_isolation() -> None:
    """Raise ConfigurationError if code may not run here without isolation."""
    _require(
        lambda policy: policy.allow_no_isolation,
        "this worker does not run code without isolation (local:none), which could do whatever the worker's user can",
        "use another provider, or set allow_no_isolation = true",
    )


def check_network(purpose: str) -> None:
    """Raise ConfigurationError if containers may not use this host's network. `purpose` is for the message."""
    _require(
        lambda policy: policy.allow_network,
        f"this worker gives containers no network ({purpose}), which would reach the worker's network",
        "do without, or set allow_network = true",
    )


def check_tool(path: str) -> None:
    """Raise ConfigurationError if code may not call the host's function with that import path."""
    _require(
        lambda policy: path in policy.allowed_tools,
        f"this worker does not let deployments call {path}",
        "add it to allowed_tools",
    )


def check_key_address(address: str, key: str) -> None:
    """Raise ConfigurationError if the worker's key may not go to an address that is not the provider's own."""
    _require(
        lambda policy: address.rstrip("/") in [allowed.rstrip("/") for allowed in policy.key_addresses],
        f"this worker does not send {key} to {address}",
        "save a block that has its own key, or add the address to key_addresses",
    )


def check_runtime(name: str) -> None:
    """Raise ConfigurationError if containers on this host may not use that OCI runtime."""
    if is_deployment_run() and name not in OCI_RUNTIMES:
        allowed = ", ".join(sorted(OCI_RUNTIMES))
        raise ConfigurationError(f"deployments may not choose the runtime {name!r}: use one of {allowed}")


def check_path(path: Path, below: Path | None = None) -> Path:
    """Return a path from a parameter if this process may use it, else raise ConfigurationError.

    A deployment run may use paths below `below` or the worker's `allowed_paths`. Its path is returned with links
    resolved. No process may use a link on a volume.
    """
    real = resolve_links(path) if is_deployment_run() else path

    def is_allowed(policy: WorkerPolicy) -> bool:
        roots = [*policy.allowed_paths, *([] if below is None else [str(below)])]
        return real is not None and any(real.is_relative_to(os.path.realpath(root)) for root in roots)

    _require(
        is_allowed,
        f"this worker does not let deployments use {path}",
        "add a directory above it, after links are followed, to allowed_paths",
    )
    assert real is not None
    link = find_link_on_volume(path)
    if link is not None:
        raise ConfigurationError(
            f"{link} is a link on a volume, which sandboxed code could have created: name the file that you mean"
        )
    return real


def find_link_on_volume(path: Path) -> Path | None:
    """Return the first link in a path that is below the directory of volumes, or None without such a link."""
    volumes = Path(os.path.realpath(resolve_data_dir("volumes", "RLM_BATCH_VOLUMES")))
    directory = Path("/")
    remaining = list(path.absolute().parts[1:])  # the names that are not walked yet
    links = 0
    while remaining and links < MAX_LINKS:
        name = remaining.pop(0)
        if name == "..":
            directory = directory.parent
            continue
        place = directory / name
        if not os.path.islink(place):
            directory = place
            continue
        if directory != volumes and directory.is_relative_to(volumes):
            return place
        links += 1
        target = Path(os.readlink(place))
        names = target.parts
        if target.is_absolute():
            directory = Path("/")
            names = names[1:]
        remaining = [*names, *remaining]
    return None


def check_writable_directory(path: Path) -> None:
    """Raise ConfigurationError if a deployment run may not let code write to the directory.

    The worker executes files in Python's directories, PREFECT_HOME and the user's home. Prefect unpickles results.
    """
    if not is_deployment_run():
        return
    from prefect.settings import PREFECT_HOME  # A deployment's run has imported Prefect.

    home = Path(os.path.expanduser("~"))
    results = resolve_data_dir("results", "RLM_BATCH_RESULTS")
    policies = [file.parent for file in list_policy_files()]
    own = [place for place in (sys.prefix, *sys.path, PREFECT_HOME.value(), results, *policies) if os.path.isabs(place)]
    real_own = [Path(os.path.realpath(place)) for place in own]
    overlaps_own = any(path.is_relative_to(place) or place.is_relative_to(path) for place in real_own)
    if overlaps_own or home.is_relative_to(path):
        raise ConfigurationError(
            f"deployments may not have a volume in {path}, which has the worker's own files: use another directory"
        )


def resolve_links(path: Path) -> Path | None:
    """Return the path with its links resolved, or None if that fails."""
    try:
        return Path(os.path.realpath(path))
    except (ValueError, OSError):  # a null character in it, or a link that was just replaced
        return None


def check_location(text: str, url: str, settings: dict[str, Any]) -> None:
    """Raise ConfigurationError if this process may not use fsspec's `url`. The message calls it `text`.

    A deployment run may use only a single store. In a chain of locations (`s3://bucket/x::file:///etc/passwd`) or with
    the block setting `protocol`, fsspec can read the host's own files. With `proxy_command`, sshfs starts a program.
    """
    scheme = url.partition("://")[0].lower()
    is_store = scheme in STORE_SCHEMES and "::" not in url and not {"protocol", "proxy_command"} & settings.keys()
    if is_deployment_run() and not is_store:
        raise ConfigurationError(
            f"deployments may not use {text}: use a store, such as s3://bucket/dir, or a path below the allowed_paths "
            "of the worker's file"
        )
    for name in ENDPOINT_SETTINGS & settings.keys() if scheme in TOKEN_SCHEMES else ():
        check_key_address(str(settings[name]), f"its credentials for {scheme}")


def check_repository(url: str) -> None:
    """Raise ConfigurationError unless the repository is on a network, or its path is allowed."""
    if not is_deployment_run() or REMOTE_REPOSITORY.match(url):
        return
    if url.startswith("file://"):  # Git ignores the host and decodes the rest.
        _, _, location = url.removeprefix("file://").partition("/")
        url = unquote(f"/{location}")
    path = os.path.expanduser(url)
    if not os.path.isabs(path):  # Other texts are relative paths, or names of git helpers, as in ext::
        raise ConfigurationError(
            f"deployments may not clone {url}: use an address such as https://host/repository, or an absolute path "
            "below the allowed_paths of the worker's file"
        )
    check_path(Path(path))
