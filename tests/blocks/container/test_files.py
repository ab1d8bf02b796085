"""Files of containers: mounts from the host, uploads and downloads, and packages in their images."""

import asyncio
import fcntl
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlm_batch import CodeError, ConfigurationError, ContainerSandbox, SandboxStartError, VolumeError
from rlm_batch.blocks.container.engine import find_engine
from rlm_batch.blocks.container.image import ensure_image, find_image
from rlm_batch.blocks.host_files.mounts import HostMount
from rlm_batch.blocks.subprocess_runner import MAX_OUTPUT_BYTES, run_command

from ...conftest import PLACE
from ...infra.git import commit_all
from ...standins.wheels import write_wheel
from .conftest import run_podman

pytestmark = [pytest.mark.anyio, pytest.mark.requires("podman")]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a module and a link, and set an empty cache for its clone."""
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "repository"
    path.mkdir()
    (path / "shape.py").write_text("AREA = 12\n")
    (path / "link").symlink_to("shape.py")
    commit_all(path)
    return path


async def test_code_runs_in_a_clone_that_it_may_write(container: ContainerSandbox, repository: Path) -> None:
    provider = container.with_options({"repo_url": str(repository)})
    async with provider.interpreter() as interpreter:
        code = "import os, shape\nopen('own', 'w').write('x')\nSUBMIT(area=shape.AREA, there=sorted(os.listdir()))"
        result = await interpreter.execute(code)
    assert result.area == 12
    assert {".git", "link", "own", "shape.py"} <= {*result.there}
    assert not (repository / "own").exists()


@pytest.mark.full
async def test_a_clone_too_large_for_the_disk_says_so(container: ContainerSandbox, repository: Path) -> None:
    (repository / "large").write_bytes(bytes(4 << 20))
    commit_all(repository)
    provider = container.with_options({"repo_url": str(repository), "disk_mib": 2})
    with pytest.raises(SandboxStartError, match=r"could not be unpacked: .*No space left"):
        await provider.interpreter().start()


@pytest.mark.full
async def test_mounted_data_is_read_only_and_replaced_data_is_refused(
    container: ContainerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, secret = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, secret):
        folder.mkdir()
        (folder / "rows.csv").write_text(folder.name)
        for path in (tmp_path, folder, folder / "rows.csv"):
            path.chmod(0o777)
    with_data = container.with_files(mounts={"/data": data})
    code = """
try:
    open("/data/rows.csv", "a").write("x")
except OSError as error:
    SUBMIT(error=error.strerror, text=open("/data/rows.csv").read())
"""
    async with with_data.interpreter() as interpreter:
        assert (await interpreter.execute(code)).outputs == {"error": "Read-only file system", "text": "data"}
        # SELinux would refuse files without a container's label.
        assert "label=disable" in await asyncio.to_thread(run_podman, "inspect", interpreter.sandbox.id)
    for place in ("/data,x", '/"data'):
        with pytest.raises(ConfigurationError, match="an engine cannot mount it"):
            await container.with_files(mounts={place: data}).open({})
    check = HostMount.check_source

    def exchange_after(mount: HostMount) -> None:
        check(mount)
        data.rename(data.with_name("was"))
        data.symlink_to(secret)

    monkeypatch.setattr(HostMount, "check_source", exchange_after)
    with pytest.raises(SandboxStartError, match="exchanged for something else"):
        await with_data.interpreter().start()


async def test_paths_that_cannot_be_read_or_written_are_errors(container: ContainerSandbox) -> None:
    async with container.interpreter() as interpreter:
        await interpreter.execute("import os; os.mkfifo('pipe'); os.symlink('/dev/zero', 'endless')")
        for path in ("endless", "pipe"):
            with pytest.raises(VolumeError, match="is not a readable file"):
                await interpreter.sandbox.download(path)
        with pytest.raises(VolumeError, match="could not be read"):
            await interpreter.sandbox.download("nothing")
        for path in ("/usr/file", "/proc/1/file"):
            with pytest.raises(VolumeError, match="could not be written"):
                await interpreter.upload(path, b"")


async def test_a_reader_never_sees_half_of_an_upload_to_the_volume(
    container: ContainerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path))
    provider = container.with_options({"volume_name": "v", "volume_mount_path": "/data"})
    async with provider.interpreter() as interpreter:
        await interpreter.upload("/data/a", b"first")
        with (tmp_path / "v/a").open("rb") as reader:
            await interpreter.upload("/data/a", b"second")
            assert reader.read() == b"first"
        assert await interpreter.sandbox.download("/data/a") == b"second"


async def test_a_path_that_the_engine_cannot_mount_is_refused(container: ContainerSandbox, tmp_path: Path) -> None:
    for path in ("/a,b", '/a"b', "/a\nb", "/a\0b"):
        provider = container.with_options({"volume_name": "v", "volume_mount_path": path})
        with pytest.raises(ConfigurationError, match="has a comma"):
            await provider.open({})
        if "\0" not in path:
            provider = ContainerSandbox(engine="podman", volume_name="v", volume_root=str(tmp_path) + path)
            with pytest.raises(ConfigurationError, match="an engine cannot mount"):
                await provider.open({})
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
async def test_an_images_volumes_may_overlap_our_mounts(
    container: ContainerSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path))
    image = f"localhost/with-volumes:{tmp_path.name.lower()}"
    (tmp_path / "Containerfile").write_text(f'FROM {container.image}\nVOLUME ["/tmp", "/data", "/own/"]\n')
    await asyncio.to_thread(run_podman, "build", "--quiet", "--pull=never", "--tag", image, str(tmp_path))
    try:
        options = {"image": image, "volume_name": "v", "volume_mount_path": "/data"}
        async with container.with_options(options).interpreter() as interpreter:
            await interpreter.execute("open('/data/a', 'w').write('x'); open('/tmp/a', 'w').write('x')")
            with pytest.raises(CodeError, match="Read-only"):
                await interpreter.execute("open('/own/a', 'w')")
        assert (tmp_path / "v/a").read_text() == "x"
    finally:
        await asyncio.to_thread(run_podman, "rmi", "--force", image)


async def test_the_end_of_a_programs_long_output_is_kept() -> None:
    code = "import os, sys; [os.write(1, bytes(1 << 20)) for _ in range(40)]; print('end')"
    done = await run_command(sys.executable, "-c", code, timeout=60)
    assert done.stdout.endswith("\0end\n")
    assert len(done.stdout) == MAX_OUTPUT_BYTES


# ------------------------------------------------------------------------------------------------------------- packages


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve an index with one wheel, and point pip's environment variable to it.

    One test builds at a time: removing an image also ends builds that use its unnamed layers.
    """
    folder = tmp_path / "index" / "a-shape"
    folder.mkdir(parents=True)
    name = write_wheel(folder, "a_shape").name
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with (PLACE / "builds.lock").open("w") as lock, ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:not-for-layers@127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@asynccontextmanager
async def check_built_once(provider: ContainerSandbox) -> AsyncIterator[str]:
    """Check that the second sandbox takes the image of the first. Yield the image's name, and remove it afterwards."""
    engine = await find_engine("podman")
    name, identity = await ensure_image(provider, engine), ""
    try:
        identity = await find_image(engine, name)
        yield name
        assert await ensure_image(provider, engine) == name
        assert await find_image(engine, name) == identity
    finally:
        await asyncio.to_thread(run_podman, "rmi", "--force", name)


@pytest.mark.full
@pytest.mark.usefixtures("index")
async def test_packages_are_built_into_an_image_once_without_a_password(container: ContainerSandbox) -> None:
    # The random version bound makes the image unique to this test, even if a killed test has left an image.
    provider = container.with_options({"packages": [f"a-shape>=1,<{random.randrange(2, 1 << 30)}"]})
    async with check_built_once(provider) as built, provider.interpreter() as interpreter:
        code = (
            "import a_shape, glob; SUBMIT(a_shape.NAME + str([open(path).read() for path in glob.glob('/etc/pip*')]))"
        )
        text = (await interpreter.execute(code)).output
        assert "a_shape" in text
        records = await asyncio.to_thread(run_podman, "image", "inspect", built)
        records += await asyncio.to_thread(run_podman, "history", "--no-trunc", built)
        assert "not-for-layers" not in records + text
    with pytest.raises(ConfigurationError, match=r"could not be installed into .*from wheels alone"):
        await container.with_options({"packages": ["there-is-no-such-package"]}).open({})


@pytest.mark.full
@pytest.mark.usefixtures("index")
async def test_an_image_whose_python_is_managed_by_its_distribution_takes_packages(container: ContainerSandbox) -> None:
    path = "import sysconfig; print(sysconfig.get_path('stdlib') + '/EXTERNALLY-MANAGED')"
    # Debian's package of Python has this file.
    setup = f'echo "[externally-managed]" > "$(python3 -c "{path}")"  # {random.randrange(1 << 30)}'
    provider = container.with_options({"setup": setup, "packages": ["a-shape"]})
    async with check_built_once(provider), provider.interpreter() as interpreter:
        assert (await interpreter.execute("import a_shape; SUBMIT(name=a_shape.NAME)")).name == "a_shape"


@pytest.mark.full
@pytest.mark.usefixtures("index")
async def test_setup_is_built_into_an_image_once_and_its_failure_says_why(container: ContainerSandbox) -> None:
    # The test's image has no programs but the shell and Python.
    setup = f"text='{random.randrange(1 << 30)} $HOME \\'\nprintf %s \"$text\" > /made"
    provider = container.with_options({"setup": setup})
    async with check_built_once(provider), provider.interpreter() as interpreter:
        text = (await interpreter.execute("SUBMIT(text=open('/made').read())")).text
        assert text.split()[1:] == ["$HOME", "\\"]
    with pytest.raises(ConfigurationError, match=r"setup and the packages could not be installed .*the reason"):
        await container.with_options({"setup": "echo the reason >&2\nfalse"}).open({})
