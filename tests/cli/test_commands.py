"""What a person sees in the terminal, and the exit status that a script sees."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.settings import PREFECT_HOME, temporary_settings

from rlm_batch.cli.run_flow import describe_start

from .conftest import ROOT

LEARNING_RATE = str(ROOT / "examples" / "learning_rate.py")


def test_a_sweep_prints_its_trials_the_best_one_and_the_ledgers_path(run):
    done = run("sweep", LEARNING_RATE, "--grid", "lr=0.001,0.01", "--grid", "batch_size=32,64", "--minimize", "loss")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["lr", "batch_size", "loss"]
    assert lines[4] == ["3", "0.01", "64", "1.6024", "best"]
    assert [line[-1] for line in lines[1:4]] == ["23.8735", "13.5775", "3.09425"]
    (path,) = re.findall(r"^Results: (.+)$", done.stdout, re.MULTILINE)
    parts = [json.loads(line) for part in _parts(path) for line in part.read_text().splitlines()]
    assert sorted(line["index"] for line in parts) == [0, 1, 2, 3]
    assert "4 of 4 done" in done.stderr
    assert "Finished in state" not in done.stderr + done.stdout


def test_a_run_that_makes_prefects_database_says_how_long_that_takes_and_the_next_one_does_not(tmp_path, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings({PREFECT_HOME: tmp_path}):
        assert describe_start() == "starting Prefect (half a minute the first time)"
        (tmp_path / "prefect.db").touch()
        assert describe_start() == "starting Prefect"


def test_a_batch_of_files_prints_a_row_for_each(run, tmp_path):
    (tmp_path / "one.py").write_text("SUBMIT(total=1)")
    (tmp_path / "two.py").write_text("SUBMIT(greeting='hello')")
    (tmp_path / "three.py").write_text("print('done')")
    done = run("batch", "one.py", "two.py", "three.py", "--max-workers", "2", "--timeout", "20")
    assert done.returncode == 0, done.stderr
    assert ["0", "one.py", "1"] in [line.split() for line in done.stdout.splitlines()]
    assert ["1", "two.py", "hello"] in [line.split() for line in done.stdout.splitlines()]
    assert "the code of 1 never called SUBMIT" in done.stderr


def test_what_the_only_execution_prints_is_seen_as_it_comes(run, tmp_path):
    (tmp_path / "one.py").write_text(
        "import sys\nprint('step 1\\x1b[31m')\nprint('oh', file=sys.stderr)\nprint('end', end='')"
    )
    done = run("batch", "one.py")
    lines = done.stderr.splitlines()
    assert set(lines) >= {"step 1\\x1b[31m", "oh", "end"}
    assert lines.index("end") < next(number for number, line in enumerate(lines) if "1 of 1 done" in line)


@pytest.mark.full
def test_of_many_executions_the_last_line_of_each_is_in_the_table_and_all_of_them_below_it(run, tmp_path):
    (tmp_path / "code.py").write_text("print('first', x)\nprint('last', x)\nSUBMIT(y=x)")
    (tmp_path / "inputs.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    done = run("batch", "code.py", "--inputs", "inputs.jsonl", "--show-output")
    assert done.returncode == 0, done.stderr
    table, *outputs = done.stdout.split("\n\n")
    assert [line.split() for line in table.splitlines()] == [
        ["x", "y", "printed", "last"],
        ["0", "1", "1", "last", "1"],
        ["1", "2", "2", "last", "2"],
    ]
    assert outputs[0] == "0:\nfirst 1\nlast 1"
    assert outputs[1].startswith("1:\nfirst 2\nlast 2\nResults: ")


def test_json_has_whole_values_a_line_for_each_execution_and_nothing_else(run, tmp_path):
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
    assert done.stderr.splitlines()[-1].startswith("Results: ")


def test_settings_of_the_provider_are_options(run, tmp_path):
    code = "import resource\nSUBMIT(mib=resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, volume=VOLUME)"
    (tmp_path / "code.py").write_text(code)
    done = run("batch", "code.py", "--memory-mib", "300", "--disk-mib", "none", "--volume-name", "none", "--json")
    assert json.loads(done.stdout)["outputs"] == {"mib": 300, "volume": None}, done.stderr
    for options, message in (
        (["--memory-mib", "3"], "memory_mib: Input should be greater than or equal to 64"),
        (["--cpu", "1"], "the provider local has no option 'cpu': did you mean cpus?"),
    ):
        done = run("batch", "code.py", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_a_run_that_fails_early_says_what_failed_and_what_was_not_run(run, tmp_path):
    (tmp_path / "code.py").write_text("raise ValueError(x)")
    (tmp_path / "inputs.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(40)))
    done = run("batch", "code.py", "--inputs", "inputs.jsonl", "--max-failures", "0.1", "--max-workers", "1")
    assert done.returncode == 1
    assert "40 of 40 done" in done.stderr
    assert "0 succeeded, 4 failed, 36 not run" in done.stderr
    assert "4 of 40 failed:" in done.stderr
    assert (
        "36 more, the first number 4: not run: 4 of 40 executions have failed, and max_failures is 0.1" in done.stderr
    )


@pytest.mark.full
def test_code_that_prepares_is_a_file_of_its_own(run, tmp_path):
    (tmp_path / "setup.py").write_text("print('loading')\nbase = 40")
    (tmp_path / "code.py").write_text("SUBMIT(y=base + 2)")
    done = run("batch", "code.py", "--prepare", "setup.py", "--prepare-seed", "1", "--prepare-timeout", "9")
    assert done.returncode == 0, done.stderr
    assert ["0", "code.py", "42"] in [line.split() for line in done.stdout.splitlines()]
    (tmp_path / "setup.py").write_text("import nowhere_at_all")
    done = run("batch", "code.py", "--prepare", "setup.py")
    assert done.returncode == 2
    assert "rlm-batch: prepare raised ModuleNotFoundError (line 1): No module named" in done.stderr


@pytest.mark.full
def test_code_imports_modules_of_directories_that_are_named(run, tmp_path):
    for name in ("src", "lib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}.py").write_text("VALUE = 20\n")
    (tmp_path / "code.py").write_text("import of_lib, of_src\nSUBMIT(y=of_lib.VALUE + of_src.VALUE)")
    done = run("batch", "code.py", "--python-path", "src", "--python-path", "lib")
    assert done.returncode == 0, done.stderr
    assert ["0", "code.py", "40"] in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python-path", "nowhere"], "python_path: there is no nowhere on this machine"),
        (["--mounts", "/data"], "--mounts /data: it is the path at which code reads it and a path of this machine"),
        (["--mounts", "/data=code.py", "--mounts", "/data/x=code.py"], "/data/x and /data are in one another"),
        (["--prepare", "missing.py"], "the file missing.py cannot be read: No such file or directory"),
        (["--prepare-seed", "1"], "prepare_seed goes with prepare"),
        (["--prepare", "/dev/null"], "prepare is empty"),
        (["--prepare", "code.py", "--prepare-timeout", "0"], "prepare_timeout: Input should be greater than 0"),
    ],
)
def test_what_code_cannot_have_is_refused_before_anything_starts(run, tmp_path, options, said):
    (tmp_path / "code.py").write_text("SUBMIT()")
    done = run("batch", "code.py", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "starting Prefect" not in done.stderr


@pytest.mark.full
def test_code_from_standard_input_over_a_file_of_inputs(run_alone, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": 2}\n{"x": 5}\n')
    done = run_alone("batch", "/dev/stdin", "--inputs", "in.jsonl", input="SUBMIT(y=x * x)")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:3]] == ["4", "25"]


@pytest.mark.parametrize("option", [pytest.param("--points", marks=pytest.mark.full), "--inputs"])
def test_a_file_of_inputs_is_read_once_so_that_it_may_be_a_pipe(run, tmp_path, option):
    os.mkfifo(tmp_path / "in.jsonl")
    threading.Thread(target=(tmp_path / "in.jsonl").write_text, args=['{"x": 2}\n{"x": 5}\n'], daemon=True).start()
    (tmp_path / "square.py").write_text("SUBMIT(y=x * x)")
    done = run("sweep" if option == "--points" else "batch", "square.py", option, "in.jsonl")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:3]] == ["4", "25"]


def test_failures_exit_with_1_and_are_shown_with_what_the_code_wrote(run, tmp_path):
    (tmp_path / "fail.py").write_text("import sys; print('about to fail', file=sys.stderr); SUBMIT(y=1 / x)")
    done = run("sweep", "fail.py", "--grid", "x=0,1,2", "--maximize", "y")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout
    assert "best" in done.stdout
    assert "1 of 3 failed" in done.stderr
    assert "about to fail" in done.stderr
    assert "Traceback" in done.stderr  # the code's own
    assert "rlm_batch" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "slow.py"], "the space is missing"),
        (["sweep", "slow.py", "--grid", "x="], "no values"),
        (["sweep", "slow.py", "--grid", "x"], "lr=0.001,0.01"),
        (["sweep", "slow.py", "--grid", "x=1", "--grid", "x=2"], "twice"),
        (["sweep", "slow.py", "--grid", "x=[1"], "JSON"),
        (["sweep", "slow.py", "--points", "points.jsonl"], "no variable 'y'"),
        (["sweep", "slow.py", "--points", "nosuch.csv"], "No such file"),
        (["sweep", "nosuch.py", "--grid", "x=1"], "nosuch.py cannot be read"),
        (["sweep", "slow.py", "--grid", "x=1", "--provider", "nosuch"], "unknown provider 'nosuch'"),
        (["sweep", "slow.py", "--grid", "x=1", "--max-workers", "0"], "max_workers"),
        (["sweep", "slow.py", "--grid", "x=1", "--max-workers", "many"], "--max-workers"),
        (["sweep", "slow.py", "--grid", "x=1", "--timeout", "0"], "timeout"),
        (["sweep", "slow.py", "--grid", "x=1", "--minimize", "nosuch"], "they submitted fine"),
        (["sweep", "slow.py", "--space", "x=2..1", "--trials", "3", "--minimize", "y"], "low 2 above high 1"),
        (["sweep", "slow.py", "--space", "x=a..1", "--trials", "3", "--minimize", "y"], "'a' is no number"),
        (["sweep", "slow.py", "--space", "x=log:1e-5,1", "--trials", "3", "--minimize", "y"], "bounds are LOW..HIGH"),
        (["sweep", "slow.py", "--space", "x=1..", "--trials", "3", "--minimize", "y"], "bounds are LOW..HIGH"),
        (["sweep", "slow.py", "--space", "x=log:0..1", "--trials", "3", "--minimize", "y"], "more than 0"),
        (["sweep", "slow.py", "--space", "x=0..1", "--minimize", "y"], "trials="),
        (["sweep", "slow.py", "--space", "nosuch.json", "--trials", "3", "--minimize", "y"], "cannot be read"),
        (
            ["sweep", "slow.py", "--space", "x=0..1", "--trials", "3", "--sampler", "best", "--minimize", "y"],
            "no sampler",
        ),
        (["sweep", "slow.py", "--grid", "x=1", "--trials", "3", "--minimize", "y"], "trials goes with a space"),
        (["sweep", "slow.py", "--grid", "x=1", "--isolation", "half"], "--isolation"),
        (
            ["sweep", "slow.py", "--grid", "x=1", "--isolation", "none", "--provider", "local:none"],
            "--isolation is for",
        ),
        (["sweep", "slow.py", "--grid", "x=1", "--no-such-option"], "--no-such-option"),
        (["sweep", "slow.py", "--grid", "x=1", "--results-path", ""], "a path was given that is empty"),
        (["batch", "slow.py", "points.jsonl", "--inputs", "points.jsonl"], "one FILE"),
        (["batch", "slow.py", "--inputs", "deep.jsonl"], "line 1 of"),
        (["batch", "slow.py", "--inputs", "twice.csv"], "has 'x' twice"),
        (["batch", "slow.py", "--inputs", "semicolons.csv"], "semicolons.csv: the variable 'x;y' is no name"),
        (["sweep", "slow.py", "--points", "semicolons.csv"], "semicolons.csv: the variable 'x;y' is no name"),
        (["batch", "slow.py", "--inputs", "odd.jsonl"], "line 2 of {}/odd.jsonl: the variable '2x' is no name"),
        (["batch"], "FILE"),
        (["nosuch"], "nosuch"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_status_2(refused, tmp_path, arguments, said):
    (tmp_path / "slow.py").write_text("SUBMIT(fine=1)")
    (tmp_path / "points.jsonl").write_text('{"x": 1, "y": 2}\n{"x": 2}\n')
    (tmp_path / "deep.jsonl").write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}")
    (tmp_path / "twice.csv").write_text("x,x\n1,2\n")
    (tmp_path / "semicolons.csv").write_text("x;y\n1;2\n")
    (tmp_path / "odd.jsonl").write_text('{"x": 1}\n{"2x": 2}\n')
    assert said.format(tmp_path) in refused(*arguments)


def test_a_tool_is_found_in_a_module_of_the_working_directory(run_alone, tmp_path):
    (tmp_path / "words.py").write_text("def join(a, b): return a + b\n")
    (tmp_path / "code.py").write_text("SUBMIT(both=join('a', 'b'))")
    done = run_alone("batch", "code.py", "--tools", "join=words:join", "--json")
    assert json.loads(done.stdout)["outputs"] == {"both": "ab"}, done.stderr


def test_a_file_of_code_that_is_not_there_is_said_before_prefect_is_imported():
    program = (
        "import sys\n"
        "from rlm_batch.cli.main import main\n"
        "for words in sys.stdin:\n"
        "    try: main(words.split())\n"
        "    except SystemExit as end: assert end.code == 2\n"
        "assert 'prefect' not in sys.modules\n"
    )
    commands = ["batch", "sweep", "chunks", "sequence"]
    words = "".join(f"{command} nosuch.py\n" for command in commands)
    done = subprocess.run([sys.executable, "-c", program], input=words, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["rlm-batch: the file nosuch.py cannot be read: No such file or directory"] * 4


def test_what_code_submits_or_writes_gives_a_terminal_no_commands(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": "\\u001b]0;title\\u0007"}\n{"x": "\\ud800"}\n{"x": ""}\n')
    (tmp_path / "say.py").write_text(
        "import sys\nif x == '':\n    print('\\x1b[2J\\u202eturned', file=sys.stderr)\n"
        "    raise ValueError('\\x1b[31m\\u2067')\nSUBMIT(y='one\\ntwo\\u202e')"
    )
    done = run("batch", "say.py", "--inputs", "in.jsonl")
    assert done.returncode == 1, done.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in done.stderr  # of ours
    assert not {"\x1b", "\u202e", "\u2067"} & set(done.stdout + done.stderr)
    assert r"\x1b]0;title\x07" in done.stdout
    assert r"one\ntwo\u202e" in done.stdout
    assert r"\ud800" in done.stdout
    assert r"ValueError: \x1b[31m\u2067" in done.stderr
    assert r"  | \x1b[2J\u202eturned" in done.stderr
    assert "2 of 3 failed" in done.stderr


@pytest.mark.full
def test_code_of_any_length_and_beginning_is_code(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": 2}\n')
    (tmp_path / "long.py").write_text("#" * 600_000 + "\nSUBMIT(y=x * x)")
    (tmp_path / "at.py").write_text("@staticmethod\ndef square(x): return x * x\nSUBMIT(y=square(x))")
    for name in ("long.py", "at.py"):
        done = run("batch", name, "--inputs", "in.jsonl")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1].split() == ["0", "2", "4"]
    done = run("sweep", "long.py", "--grid", "x=1,3")
    assert [line.split() for line in done.stdout.splitlines()[1:3]] == [["0", "1", "1"], ["1", "3", "9"]]
    (tmp_path / "chunk.py").write_text("#" * 600_000 + "\nSUBMIT(n=len(data))")
    (tmp_path / "reduce.py").write_text("#" * 600_000 + "\nSUBMIT(n=sum(fields['n'] for fields in results.values()))")
    done = run("chunks", "chunk.py", "--data", "in.jsonl", "--chunk-size", "1", "--reduce", "reduce.py")
    assert "Reduction: n=1" in done.stdout


@pytest.mark.full
def test_isolation_none_is_there_where_a_person_insists_and_says_so(run, tmp_path):
    (tmp_path / "look.py").write_text("SUBMIT(x=x)")
    done = run("sweep", "look.py", "--grid", "x=1", "--isolation", "none")
    assert done.returncode == 0
    assert "isolation: none (the code can do what you can)" in done.stderr


@pytest.mark.full
def test_resume_takes_results_of_earlier_runs(run, tmp_path):
    (tmp_path / "random.py").write_text("import os; SUBMIT(r=os.urandom(8).hex())")
    first = run("sweep", "random.py", "--grid", "x=1,2")
    again = run("sweep", "random.py", "--grid", "x=1,2,3", "--resume")
    assert first.stdout.splitlines()[1:3] == again.stdout.splitlines()[1:3]
    assert "2 from earlier runs" in again.stderr


def test_doctor_says_what_this_machine_can_use(run):
    done = run("doctor")
    assert done.returncode in (0, 2)
    assert re.search(r"local, bubblewrap\s+(ok|no)", done.stdout)
    assert re.search(r"local, landlock\s+(ok|no)", done.stdout)
    assert re.search(r"modal\s+no\s+no token: run `modal token new`", done.stdout)
    assert re.search(r"results\s+ok", done.stdout)
    assert re.search(r"volumes\s+ok", done.stdout)
    assert re.search(r"Prefect\s+ok\s+the server at \S+ answers", done.stdout)
    as_json = run("doctor", "--json")
    checks = [json.loads(line) for line in as_json.stdout.splitlines()]
    assert as_json.returncode == done.returncode
    assert {"check": "modal", "works": False} in [
        {name: check[name] for name in ("check", "works")} for check in checks
    ]
    assert len(checks) == len(done.stdout.splitlines())


def test_a_server_that_does_not_answer_is_one_sentence(run_alone, tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("SUBMIT(x=1)")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    done = run_alone("batch", "a.py")
    assert done.returncode == 2
    assert "the Prefect server at http://127.0.0.1:9/api does not answer" in done.stderr
    assert "Traceback" not in done.stderr


class _Failing(BaseHTTPRequestHandler):
    """Is well by its own account, and fails whatever else it is asked."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/health") else 500)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.mark.full
def test_a_server_that_fails_is_one_sentence(run_alone, tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("SUBMIT(x=1)")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Failing) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{failing.server_port}/api")
        done = run_alone("batch", "a.py")
        failing.shutdown()
    assert done.returncode == 2
    assert "the Prefect server failed or went away while the flow ran" in done.stderr
    assert "Traceback" not in done.stderr


def _parts(path):
    return Path(path).glob("part-*.jsonl")


@pytest.mark.full
def test_a_search_prints_its_trials_and_how_it_went_and_can_be_reported_and_gone_on_with(run, tmp_path):
    (tmp_path / "train.py").write_text("for step in range(9):\n    report(x + 1 / (step + 1), step)\nSUBMIT(loss=x)")
    words = ["sweep", "train.py", "--space", "x=0.0..1.0", "--space", "opt=a,b", "--sampler", "random", "--seed", "1"]
    words += ["--pruner", "asha", "--minimize", "loss", "--max-workers", "1", "--results-path", "job"]
    first = run(*words, "--trials", "12")
    assert first.returncode == 0, first.stderr
    rows = [line.split() for line in first.stdout.splitlines()[1:13]]
    pruned = sum(row[-1] == "pruned" for row in rows)
    assert 0 < pruned < 11
    assert f"12 succeeded, {pruned} of them pruned, 0 failed" in first.stderr
    assert "never called SUBMIT" not in first.stderr
    more = run(*words, "--trials", "14", "--json")
    lines = [json.loads(line) for line in more.stdout.splitlines()]
    assert [line["index"] for line in lines] == list(range(14))
    assert "12 from earlier runs" in more.stderr
    assert sum(line["meta"].get("pruned", False) for line in lines) >= pruned
    report = run("report", "job", "--html", "report.html")
    assert "of them pruned" in report.stderr
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") >= 3
    assert "loss as it was reported" in page


@pytest.mark.full
def test_several_objectives_on_the_command_line_have_a_front(run, tmp_path):
    (tmp_path / "model.py").write_text("SUBMIT(error=1 / units, size=units, fit=-units)")
    (tmp_path / "space.json").write_text('[{"units": {"low": 1, "high": 9}}, {"units": [16, 32]}]')
    words = [
        "sweep",
        "model.py",
        "--space",
        "space.json",
        "--trials",
        "6",
        "--sampler",
        "random",
        "--minimize",
        "error",
    ]
    done = run(*words, "--minimize", "size", "--maximize", "fit")
    assert done.returncode == 0, done.stderr
    assert "Pareto" in done.stdout
    assert "6 of 6 done" in done.stderr
