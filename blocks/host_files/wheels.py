"""Requirements that are installed on this machine: wheels of the index alone, for which no code of theirs runs."""

import re


def check_wheel_requirements(requirements: list[str]) -> None:
    """Returns if each is a name of a package on the index, with versions, extras or a marker. Raises ValueError."""
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
            name = re.split("[@:]", text)[0].strip()  # what follows may have a password in it
            raise ValueError(
                f"{name!r} names a place, and building what is there would run its code on this machine: local "
                "sandboxes take wheels from the index, by names such as numpy or pandas>=2; for modules of your own "
                "there is python_path (a directory of them), or repo_url"
            )
