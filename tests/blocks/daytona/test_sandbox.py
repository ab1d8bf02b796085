"""Volumes, large values, repositories and packages in Daytona sandboxes."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, DaytonaInterpreter, DaytonaSandbox

from ...standins.wheels import write_wheel

pytestmark = pytest.mark.anyio

# -- volumes


async def test_sandboxes_that_start_together_create_and_mount_one_volume(standin: Any) -> None:
    async with DaytonaSandbox().interpreter() as interpreter:
        assert not (await interpreter.execute("import os; SUBMIT(os.path.exists('/home/daytona/memory'))")).output
        assert standin.state()["sandboxes"][0]["volumes"] == []

    async def write(name: str) -> None:
        async with DaytonaSandbox(volume_name="new").interpreter() as interpreter:
            code = "import os; os.makedirs(f'/home/daytona/memory/{name}'); SUBMIT()"
            await interpreter.execute(code, {"name": name})

    await asyncio.gather(write("a"), write("b"), write("c"))
    assert [volume["name"] for volume in standin.state()["volumes"]] == ["new"]
    async with DaytonaSandbox(volume_name="new", volume_mount_path="/tmp/elsewhere").interpreter() as interpreter:
        result = await interpreter.execute("import os; SUBMIT(sorted(os.listdir('/tmp/elsewhere')))")
    assert result.output == ["a", "b", "c"]


# -- files


def test_large_values_travel_as_files_that_are_deleted_afterwards(standin: Any) -> None:
    with DaytonaInterpreter(tools={"twice": lambda text: text * 2}) as interpreter:
        result = interpreter.execute("SUBMIT(text=text, n=len(twice('y' * 2_000_000)))", {"text": "é" * 400_000})
        assert result.text == "é" * 400_000
        assert result.n == 4_000_000
        left = interpreter.execute("import os; SUBMIT([list(os.scandir(x)) for x in os.scandir('/tmp')])").output
        assert left == [[]]
        counts = standin.state()["counts"]
        assert counts["POST /toolbox/*/files/bulk-upload"] == 2  # the variable and the tool's answer
        assert counts["POST /toolbox/*/files/bulk-download"] == 2  # the tool's argument and the result
        # The call that removes an uploaded or downloaded file may fail.
        standin.set(fault_rate=1.0, fault_where="DELETE .*/files", faults=["lost"], fault_times=1)
        assert interpreter.execute("SUBMIT(text='t' * 900_000)").text == "t" * 900_000
    assert standin.state()["faults"] == {"lost": 1}


# -- packages


@pytest.mark.requires("pip")
async def test_packages_are_installed_before_the_first_execution_or_pips_error_is_shown(standin: Any) -> None:
    provider = DaytonaSandbox(volume_name="wheels")
    await (await provider.open(provider.labels(""))).remove()
    (volume,) = standin.state()["volumes"]
    wheel = write_wheel(Path(volume["folder"]), "tiny_of_the_tests")
    package = f"tiny-of-the-tests @ file:///home/daytona/memory/{wheel.name}"
    async with DaytonaSandbox(volume_name="wheels", packages=[package]).interpreter() as interpreter:
        assert (
            await interpreter.execute("from tiny_of_the_tests import NAME; SUBMIT(NAME)")
        ).output == "tiny_of_the_tests"
    provider = DaytonaSandbox(packages=["/nowhere/tiny-1.0-py3-none-any.whl"])
    words = r"pip could not install /nowhere/tiny-1.0-py3-none-any.whl .*\n.*nowhere"
    with pytest.raises(ConfigurationError, match=words):
        await provider.open(provider.labels(""))


@pytest.mark.full
def test_only_a_daytona_sandbox_loads_the_sdk_and_calls_no_other_server(standin: Any) -> None:
    code = """if True:
        import sys
        addresses = set()
        sys.addaudithook(lambda event, args: addresses.add(str(args[1])) if event == "socket.connect" else None)
        from rlm_batch import DaytonaInterpreter, DaytonaSandbox, LocalInterpreter, batch
        DaytonaSandbox(), DaytonaInterpreter()
        with LocalInterpreter(isolation="none") as interpreter:
            interpreter.execute("SUBMIT(1)")
        assert "daytona" not in sys.modules
        with DaytonaInterpreter(volume_name="v") as interpreter:
            assert interpreter.execute("SUBMIT(1)").output == 1
        assert addresses and all("127.0.0.1" in address for address in addresses), addresses
    """
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **standin.environment}, timeout=100, check=True)
