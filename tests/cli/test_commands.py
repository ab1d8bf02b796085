"""Output in the terminal, and the exit status for scripts."""

import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ..infra.programs import run_program
from .conftest import COMMAND, ROOT, environment

LEARNING_RATE = str(ROOT / "examples" / "learning_rate.py")
pytestmark = pytest.mark.usefixtures("server", "no_process_left")


def split_rows(text):
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def run_pipe(command, folder):
    """Run a pipe of commands in a folder, and print the exit status of the first one."""
    words = ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"]
    return run_program(words, cwd=folder, env=environment(folder), timeout=500)


def test_a_sweep_prints_its_trials_and_can_be_reported_and_resumed(run):
    words = ["sweep", LEARNING_RATE, "--grid", "lr=0.001,0.01", "--grid", "batch_size=32,64", "--minimize", "loss"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    rows = split_rows(done.stdout)
    assert rows[0] == ["lr", "batch_size", "loss"]
    assert rows[4] == ["3", "0.01", "64", "1.6024", "best"]
    assert [row[-1] for row in rows[1:4]] == ["23.8735", "13.5775", "3.09425"]
    assert "4 of 4 trials succeeded; it took" in done.stderr
    (path,) = re.findall(r"^Results of \S+: (.+)$", done.stdout, re.MULTILINE)
    report = run("report", path)
    assert report.returncode == 0, report.stderr
    assert "Best loss: 1.6024 in trial 3 with lr=0.01, batch_size=64" in report.stderr
    assert "4 from earlier runs" in run(*words, "--resume").stderr


def test_a_batch_prints_a_row_for_each_file(run, tmp_path):
    (tmp_path / "one.py").write_text("SUBMIT(total=1)")
    (tmp_path / "two.py").write_text("SUBMIT(greeting='hello')")
    (tmp_path / "three.py").write_text("print('done')")
    done = run("batch", "one.py", "two.py", "three.py", "--max-workers", "2")
    assert done.returncode == 0, done.stderr
    assert ["0", "one.py", "1"] in split_rows(done.stdout)
    assert ["1", "two.py", "hello"] in split_rows(done.stdout)
    assert "1 execution did not call SUBMIT, so it has no fields" in done.stderr


def test_a_code_file_is_read_in_its_declared_encoding(run, tmp_path):
    (tmp_path / "mark.py").write_bytes(b"\xef\xbb\xbfSUBMIT(x='\xc3\xa9', y=word)\r\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nSUBMIT(x='\xe9', y=word)\n")
    (tmp_path / "windows.py").write_bytes(b"#!python\n# vim: set fileencoding=cp1252 :\nSUBMIT(x='\x80', y=word)\n")
    (tmp_path / "first.py").write_bytes(b"# coding: latin-1\nword = '\xe8'\n")
    done = run("batch", "mark.py", "latin.py", "windows.py", "--prepare", "first.py", "--json")
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line)["outputs"] for line in done.stdout.splitlines()]
    assert outputs == [{"x": letter, "y": "è"} for letter in "éé€"]


def test_options_reach_the_code_and_its_output_is_streamed(run, tmp_path):
    for name in ("src", "lib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}.py").write_text("VALUE = 20\n")
    (tmp_path / "setup.py").write_text("base = 2")
    (tmp_path / "code.py").write_text(
        "import of_lib, of_src, resource, sys\n"
        "print('step 1\\x1b[31m')\nprint('oh', file=sys.stderr)\nprint('end', end='')\n"
        "mib = resource.getrlimit(resource.RLIMIT_AS)[0] >> 20\n"
        "SUBMIT(y=of_lib.VALUE + of_src.VALUE + base, mib=mib, volume=VOLUME)"
    )
    settings = ["--memory-mib", "300", "--disk-mib", "none", "--volume-name", "none", "--python-path", "src"]
    settings += ["--python-path", "lib", "--prepare", "setup.py", "--prepare-seed", "1", "--prepare-timeout", "60"]
    done = run("batch", "code.py", *settings, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"] == {"y": 42, "mib": 300, "volume": None}
    lines = done.stderr.splitlines()
    assert set(lines) >= {"step 1\\x1b[31m", "oh", "end"}
    assert lines.index("end") < next(
        n for n, line in enumerate(lines) if line.startswith("1 of 1 executions succeeded")
    )


def test_a_check_file_judges_and_its_failure_names_the_check(run, tmp_path):
    (tmp_path / "in.csv").write_text("x\n2\n3\n0\n")
    (tmp_path / "code.py").write_text("SUBMIT(y=x + x, passed=True)")
    (tmp_path / "check.py").write_text("SUBMIT(passed=submitted['y'] / x == x)")
    done = run("batch", "code.py", "--inputs", "in.csv", "--check", "check.py")
    assert done.returncode == 1
    assert split_rows(done.stdout.partition("\n\n")[0])[:3] == [
        ["x", "passed"],
        ["0", "2", "True"],
        ["1", "3", "False"],
    ]
    assert "CheckError: the check raised ZeroDivisionError (line 1)" in done.stdout + done.stderr
    (ledger,) = [path for path in (tmp_path / "results").iterdir() if path.name != "inputs"]
    shown = run("report", ledger, "--execution", "1").stdout
    assert "passed = false" in shown
    assert "The check judged:\n  y = 6\n  passed = true\n" in shown
    (tmp_path / "other.py").write_text("SUBMIT(passed=submitted['y'] == 2 * x)")
    done = run("check", ledger, "other.py", "--results-path", "judged")
    assert done.returncode == 0, done.stderr
    assert [row[2] for row in split_rows(done.stdout.partition("\n\n")[0])[1:4]] == ["True"] * 3
    assert "3 of 3 executions passed" in done.stderr
    assert f"Judged run: {ledger}" in run("report", "judged").stderr


def test_inputs_may_be_a_pipe_and_output_is_shown_below_the_table(run, tmp_path):
    os.mkfifo(tmp_path / "in.jsonl")
    threading.Thread(target=(tmp_path / "in.jsonl").write_text, args=['{"x": 1}\n{"x": 2}\n'], daemon=True).start()
    (tmp_path / "code.py").write_text("print('first', x)\nprint('last', x)\nSUBMIT(y=x)")
    done = run("batch", "code.py", "--inputs", "in.jsonl", "--show-output", "--isolation", "none")
    assert done.returncode == 0, done.stderr
    table, *outputs = done.stdout.split("\n\n")
    assert split_rows(table) == [
        ["x", "y", "printed", "last"],
        ["0", "1", "1", "last", "1"],
        ["1", "2", "2", "last", "2"],
    ]
    assert outputs[0] == "0:\nfirst 1\nlast 1"
    assert outputs[1].startswith("1:\nfirst 2\nlast 2\nResults of ")
    assert "without isolation: the code can do everything that you can" in done.stderr


def test_json_output_is_one_line_of_whole_values_per_execution(run, tmp_path):
    (tmp_path / "code.py").write_text("print('seen')\nassert x < 3\nSUBMIT(long='y' * 500, loss=x * float('nan'))")
    done = run("sweep", "code.py", "--grid", "x=1,2,3", "--minimize", "loss", "--json")
    assert done.returncode == 1
    lines = [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]
    assert [(line["index"], line["status"]) for line in lines] == [(0, "succeeded"), (1, "succeeded"), (2, "failed")]
    assert [line.get("best", False) for line in lines] == [True, False, False]
    assert lines[0]["outputs"] == {"long": "y" * 500, "loss": None}
    assert lines[0]["nonfinite"] == {"/loss": "nan"}
    assert lines[2]["error"]["type"] == "AssertionError"
    assert {line["meta"]["stdout"] for line in lines} == {"seen\n"}
    assert done.stderr.splitlines()[-1].startswith("Results of ")


def test_names_in_the_codes_own_texts_stay(run, tmp_path):
    (tmp_path / "own.py").write_text("print('`timeout` ends')\nraise ValueError('`timeout` is short')")
    done = run("batch", "own.py", "--results-path", "own")
    shown = run("report", "own", "--execution", "0")
    assert "ValueError (line 2): `timeout` is short" in done.stdout
    assert done.stderr.count("`timeout`") == 4, done.stderr  # twice the output, the error, and the line of the code
    assert "`timeout` is short" in shown.stdout
    assert "--timeout" not in done.stdout + done.stderr + shown.stdout


def test_failures_show_the_codes_output_escaped_for_the_terminal(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": "\\u001b]0;title\\u0007"}\n{"x": "\\ud800"}\n{"x": ""}\n{"x": "4"}\n')
    (tmp_path / "say.py").write_text(
        "import sys\nif x == '':\n    print('\\x1b[2J\\u202eturned', file=sys.stderr)\n"
        "    raise ValueError('\\x1b[31m\\u2067')\nSUBMIT(y='one\\ntwo\\u202e')"
    )
    done = run("batch", "say.py", "--inputs", "in.jsonl", "--max-workers", "1", "--max-failures", "2")
    assert done.returncode == 1, done.stderr
    assert not {"\x1b", "\u202e", "\u2067"} & set(done.stdout + done.stderr)
    assert r"\x1b]0;title\x07" in done.stdout
    assert r"one\ntwo\u202e" in done.stdout
    assert r"\ud800" in done.stdout
    assert "2 of 4 failed:" in done.stderr
    assert r"ValueError (line 4): \x1b[31m\u2067" in done.stderr
    assert r"  | \x1b[2J\u202eturned" in done.stderr
    assert "1 of 4 executions succeeded, 2 failed, 1 not run" in done.stderr
    assert (
        "1 did not run, the first is number 3: not run: 2 of 4 executions failed, and --max-failures is 2"
        in done.stderr
    )
    assert "rlm_batch" not in done.stderr, "a traceback of ours"


def test_code_from_stdin_uses_local_tools_and_tolerates_a_closed_reader(tmp_path):
    (tmp_path / "words.py").write_text("def join(a, b): return (a + b) * 90_000\n")
    (tmp_path / "in.jsonl").write_text('{"x": 2}\n' * 4)
    (tmp_path / "code.py").write_text("SUBMIT(both=join('a', 'b'))")
    command = f"{COMMAND} batch /dev/stdin --inputs in.jsonl --tools join=words:join --json <code.py"
    done = run_pipe(f"{command} | head -c 12", tmp_path)
    assert done.stdout == '{"index": 0,141\n', done.stderr
    assert "4 of 4 executions succeeded" in done.stderr
    assert "rlm-batch:" not in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_lists_the_features_of_this_machine(run):
    done = run("doctor")
    assert done.returncode in (0, 2)
    assert re.search(r"local, bubblewrap\s+(ok|no)", done.stdout)
    assert re.search(r"local, landlock\s+(ok|no)", done.stdout)
    assert re.search(r"modal\s+no\s+no token: run `modal token new`", done.stdout)
    assert re.search(r"results\s+ok", done.stdout)
    assert re.search(r"volumes\s+ok", done.stdout)
    assert re.search(r"Prefect\s+ok\s+the server at \S+ answers", done.stdout)
    checks = [json.loads(line) for line in run("doctor", "--json").stdout.splitlines()]
    assert [check["works"] for check in checks if check["check"] == "modal"] == [False]
    assert len(checks) == len(done.stdout.splitlines())


@pytest.mark.parametrize("words", ["--help", "volume --help", "report --help"])
def test_a_reader_of_both_streams_that_closes_them_ends_the_command_with_141(words, tmp_path):
    done = run_pipe(f"{COMMAND} {words} 2>&1 | true", tmp_path)
    assert (done.stdout, done.stderr) == ("141\n", "")


class _Failing(BaseHTTPRequestHandler):
    """A server that tells its version and fails every other request."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/version") else 500)
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b'"3.9.1"')

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.full
def test_a_failing_server_is_a_one_sentence_error(run_alone, tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("SUBMIT(x=1)")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{failing.server_port}/api")
        done = run_alone("batch", "a.py")
        failing.shutdown()
    assert done.returncode == 2
    assert "the Prefect server failed during the run" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_search_takes_a_sampler_and_start_points_from_the_working_directory(run_alone, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from optuna.samplers import RandomSampler\n"
        "class Halves(RandomSampler):\n"
        "    def sample_independent(self, study, trial, name, distribution):\n"
        "        return distribution.high / 2\n"
    )
    (tmp_path / "start.csv").write_text("x,y\n1.0,6.0\n3.0,5.0\n")
    (tmp_path / "train.py").write_text("SUBMIT(loss=x + y)")
    words = [
        "sweep",
        "train.py",
        "--space",
        "x=0.0..4.0",
        "--space",
        "y=0.0..8.0",
        "--trials",
        "3",
        "--minimize",
        "loss",
    ]
    done = run_alone(*words, "--sampler", "mine:Halves", "--start", "start.csv", "--json")
    assert done.returncode == 0, done.stderr
    points = [json.loads(line)["meta"]["variables"] for line in done.stdout.splitlines()]
    assert points == [{"x": 1.0, "y": 6.0}, {"x": 3.0, "y": 5.0}, {"x": 2.0, "y": 4.0}]
    wrong = run_alone(*words, "--sampler", "mine:Thirds")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr
    assert "the sampler mine:Thirds cannot be imported" in wrong.stderr


def test_a_search_prints_trials_and_pruned_count_and_can_be_resumed(run, tmp_path):
    (tmp_path / "train.py").write_text("for step in range(9):\n    report(x + 1 / (step + 1), step)\nSUBMIT(loss=x)")
    words = ["sweep", "train.py", "--space", "x=0.0..1.0", "--space", "opt=a,b", "--sampler", "random", "--seed", "1"]
    words += ["--pruner", "asha", "--minimize", "loss", "--max-workers", "1", "--results-path", "job"]
    first = run(*words, "--trials", "12")
    assert first.returncode == 0, first.stderr
    pruned = sum(row[-1] == "pruned" for row in split_rows(first.stdout)[1:13])
    assert 0 < pruned < 11
    assert f"12 of 12 trials succeeded, {pruned} of them pruned; it took" in first.stderr
    assert "did not call SUBMIT" not in first.stderr
    more = run(*words, "--trials", "13", "--json")
    lines = [json.loads(line) for line in more.stdout.splitlines()]
    assert [line["index"] for line in lines] == list(range(13))
    assert "12 from earlier runs" in more.stderr
    assert sum(line["meta"].get("pruned", False) for line in lines) >= pruned
    assert "of them pruned" in run("report", "job", "--html", "report.html").stderr
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") >= 3
    assert "loss as it was reported" in page
