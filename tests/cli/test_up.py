"""What `rlm-batch up` and `rlm-batch deploy` refuse, in one sentence."""

import pytest

from rlm_batch.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--database", "mysql://me:not-told@there/prefect"], "postgresql://USER:PASSWORD@HOST/NAME"),
        (["up", "--database", "not-told"], "postgresql://USER:PASSWORD@HOST/NAME"),
        (["up", "--auth", "not-told"], "NAME:PASSWORD"),
        (["up", "--auth", ":not-told"], "NAME:PASSWORD"),
        (["up", "--auth", "somebody:"], "NAME:PASSWORD"),
        (["up", "--auth", "somebody:not-told-\u00e9"], "in ASCII"),
        (["up", "--auth", ""], "NAME:PASSWORD"),
        (["up", "--port", "0"], "there is no port 0"),
        (["up", "--port", "70000"], "from 1 to 65535"),
        (["up", "--port", "here"], "--port"),
        (["up", "there"], "there"),
        (["deploy", "--work-pool", " "], "--work-pool is empty"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_status_2(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    all_said = capfd.readouterr()
    (error,) = [line for line in all_said.err.splitlines() if line.startswith("rlm-batch: ")]
    assert said in error
    assert "Traceback" not in all_said.err
    if arguments[0] == "up" and "not-told" in arguments[-1]:
        assert "not-told" not in all_said.err + all_said.out
