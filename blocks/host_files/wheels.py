"""Requirements to install on this machine: only wheels from the index, whose installation runs none of their code."""

import re


def check_wheel_requirements(requirements: list[str]) -> None:
    """Raise ValueError unless each requirement names a package on the index, with versions, extras or a marker."""
    if not requirements:
        return
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requirements:
        try:
            is_place = Requirement(text).url is not None
        except InvalidRequirement:
            is_place = re.search(r"://|[/\\@]|\.(whl|zip|tar)\b", text) is not None
            if not is_place:
                raise ValueError(
                    f"{text!r} is no requirement: give names such as numpy or pandas>=2, each by itself"
                ) from None
        if is_place:
            name = re.split("[@:]", text)[0].strip()  # The rest may contain a password.
            raise ValueError(
                f"{name!r} names a place, and building what is there would run its code on this machine: local "
                "sandboxes take wheels from the index, by names such as numpy or pandas>=2; for modules of your own "
                "there is python_path (a directory of them), or repo_url"
            )
