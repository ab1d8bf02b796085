"""Settings in a Prefect profile count like those in the environment."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import (
    PREFECT_SERVER_ANALYTICS_ENABLED,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE,
    temporary_settings,
)

from rlm_batch import LanguageModel
from rlm_batch.blocks.language_model.model_access import resolve_language_model
from rlm_batch.flows.server.process import ServerProcess, build_environment

from .infra.prefect_database import make_prefect_home
from .infra.programs import COMMAND, run_program


def test_a_saved_model_is_loaded_from_the_server_of_a_profile(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL")
    LanguageModel(model="openai/of-a-profile").save("of-a-profile", overwrite=True)
    assert asyncio.run(resolve_language_model("rlm-language-model/of-a-profile")).model == "openai/of-a-profile"


def test_a_server_that_we_start_gets_the_settings_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    home = Path("/nowhere")
    assert build_environment(home)[names[1]] == "200"
    settings: dict[Any, Any] = {
        PREFECT_SERVER_ANALYTICS_ENABLED: True,
        PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE: 7,
    }
    with temporary_settings(settings):
        assert [build_environment(home)[name] for name in names] == ["True", "7"]


@pytest.mark.full
@pytest.mark.usefixtures("no_process_left")
def test_a_command_uses_the_server_and_the_password_of_the_active_profile(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("SUBMIT(x=1)")
    home = tmp_path / "client"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(home), "RLM_BATCH_RESULTS": str(tmp_path / "results")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_program([COMMAND, *words], env=environment, cwd=tmp_path)

    with ServerProcess.start(make_prefect_home(tmp_path / "server"), auth="me:secret") as server:
        profile = f'active = "work"\n[profiles.work]\nPREFECT_API_URL = "{server.url}"\n'
        (home / "profiles.toml").write_text(profile)
        refused = run("batch", "one.py", "--provider", "local:none")
        assert "set PREFECT_API_AUTH_STRING" in refused.stderr
        (home / "profiles.toml").write_text(f'{profile}PREFECT_API_AUTH_STRING = "me:secret"\n')
        done = run("batch", "one.py", "--provider", "local:none", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["outputs"] == {"x": 1}
        deployed = run("deploy")
        assert deployed.returncode == 0, deployed.stderr
        assert "rlm-batch/local" in deployed.stdout
    assert not (home / "prefect.db").exists()
