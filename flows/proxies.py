"""Proxy settings of the environment: requests to this machine use no proxy, and unusable values are refused.

Prefect's clients and web sockets, model clients and SDKs all read HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in
upper or lower case.
"""

import os
import re
from collections.abc import MutableMapping

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def exclude_loopback(environment: MutableMapping[str, str]) -> None:
    """Change proxy settings so that requests to this machine use no proxy. Other requests are not affected.

    Two spellings that httpx refuses are corrected: `socks://`, which desktops set, becomes `socks5://`, and an IPv6
    address in NO_PROXY loses brackets, port and prefix length.

    Args:
        environment: The environment of this process or of a new process. It stays unchanged if it sets no proxy.
    """
    proxies = [name for name, value in environment.items() if value and name.lower() in PROXIES]
    if not proxies:
        return
    for name in proxies:
        environment[name] = re.sub("^socks://", "socks5://", environment[name])
    # Some programs prefer no_proxy and others NO_PROXY, so each of the two that is set gets the addresses.
    variables = [name for name in environment if name.lower() == "no_proxy"] or ["no_proxy"]
    for variable in variables:
        hosts = re.split(r"[\s,]+", environment.get(variable, "").strip())
        if hosts == ["*"]:  # No host uses a proxy.
            continue
        hosts = [_simplify_ipv6(host) for host in hosts if host]
        hosts += [host for host in LOOPBACK if host not in hosts]
        environment[variable] = ",".join(hosts)


def _simplify_ipv6(host: str) -> str:
    """Return an IPv6 address such as `[::1]:80` without brackets, port and prefix length, and other hosts unchanged."""
    is_ipv6 = host.count(":") > 1 and "://" not in host
    return re.split("[]/]", host.lstrip("["))[0] if is_ipv6 else host


def check_proxies() -> None:
    """Let this process's requests to this machine use no proxy, and check the proxy settings.

    Raises:
        ConfigurationError: A proxy variable has a value that HTTP clients refuse.
    """
    import httpx

    from ..sandbox.errors import ConfigurationError

    exclude_loopback(os.environ)
    try:
        httpx.Client(verify=False).close()
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigurationError(
            f"a proxy variable of the environment is wrong ({error}): set HTTP_PROXY, HTTPS_PROXY and ALL_PROXY to "
            "http://HOST:PORT or socks5://HOST:PORT and NO_PROXY to HOST,HOST in ASCII, or unset them"
        ) from None
