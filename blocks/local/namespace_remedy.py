"""Remedies for a machine on which bubblewrap cannot create namespaces, from the kernel's settings."""

import os
from pathlib import Path

FAILURES = ("bwrap:", "unshare", "namespace", "uid_map", "mount proc")  # words of errors about namespaces
CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
APPARMOR_REMEDY = (
    "load the AppArmor profile for bwrap (Ubuntu 24.04: sudo apt install apparmor-profiles, then sudo apparmor_parser "
    "-r /usr/share/apparmor/extra-profiles/bwrap-userns-restrict), or sudo sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)
SWITCHES = {  # kernel setting: value that forbids namespaces, whether it spares root, remedy
    "user/max_user_namespaces": ("0", False, "sudo sysctl -w user.max_user_namespaces=10000"),
    "kernel/unprivileged_userns_clone": ("0", True, "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", True, APPARMOR_REMEDY),
}


def find_namespace_remedy(failure: str, settings: Path = Path("/proc/sys")) -> str:
    """Return what would allow namespaces here after bubblewrap failed with this message; empty if unknown.

    Args:
        failure: The message. A message that is not about namespaces has no remedy.
        settings: The directory of the kernel's settings.
    """
    if not any(words in failure for words in FAILURES):
        return ""
    for name, (forbidding, is_for_ordinary_users, remedy) in SWITCHES.items():
        if is_for_ordinary_users and os.geteuid() == 0:
            continue
        try:
            value = (settings / name).read_text().strip()
        except OSError:
            continue  # This kernel has no such setting.
        if value == forbidding:
            return f"{name.replace('/', '.')} is {value} here, which forbids namespaces: {remedy}"
    if any(map(os.path.exists, CONTAINER_FILES)):
        return (
            "this is a container, whose filter of system calls may forbid namespaces: start it with --security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
    return "this process may make no user namespaces: ask the administrator, or take another level"
