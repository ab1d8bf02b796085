"""The advice after failures: a missing module and a misspelled variable. It appears once, and each remedy works."""

import re
import shlex

import pytest

from rlm_batch import CodeError, LocalInterpreter


def find_advice(text: str, pattern: str) -> str:
    """Return the one line that matches the pattern. Similar failures share this line."""
    (line,) = [line for line in text.splitlines() if re.search(pattern, line)]
    return line


def test_alike_failures_share_one_traceback_and_one_advice_for_a_sibling_module(run, tmp_path):
    (tmp_path / "helpers.py").write_text("FACTOR = 3\n")
    (tmp_path / "use.py").write_text("import helpers\nSUBMIT(y=x * helpers.FACTOR)")
    (tmp_path / "in.csv").write_text("x\n" + "".join(f"{number}\n" for number in range(12)))
    failed = run("batch", "use.py", "--inputs", "in.csv")
    assert "12 executions in local sandboxes (" in failed.stderr
    assert (
        "12 executions (0, x=0; 1, x=1; 2, x=2; 3, x=3; 4, x=4 and 7 more): ModuleNotFoundError (line 1)"
        in failed.stderr
    )
    assert failed.stderr.count("    import helpers") == 1
    advice = find_advice(failed.stderr, "The module helpers is in")
    assert advice == f"The module helpers is in {tmp_path}: add this folder to --python-path"
    done = run("batch", "use.py", "--inputs", "in.csv", "--python-path", tmp_path)
    assert done.returncode == 0, done.stderr

    command = find_advice(failed.stderr, "All of one execution: ").partition("rlm-batch ")[2]
    shown = run(*shlex.split(command))
    assert "execution 0 failed" in shown.stdout
    assert "x = 0" in shown.stdout
    assert "No module named 'helpers'" in shown.stdout


@pytest.mark.parametrize(
    ("module", "distribution"),
    [
        ("sklearn", "scikit-learn"),
        ("cv2", "opencv-python"),
        ("bs4", "beautifulsoup4"),
        ("pandas", "pandas"),
        ("google.protobuf", "protobuf"),
    ],
)
def test_a_missing_module_names_its_distribution(run, tmp_path, module, distribution):
    (tmp_path / "use.py").write_text(f"raise ModuleNotFoundError(\"No module named '{module}'\")")
    failed = run("batch", "use.py")
    assert f"The sandbox has no module {module}: add {distribution}" in failed.stderr


def test_errors_of_interpreters_have_the_advice_too():
    with LocalInterpreter() as interpreter:
        with pytest.raises(CodeError) as missing:
            interpreter.execute("import cv2")
        with pytest.raises(CodeError) as misspelled:
            interpreter.execute("learning_rte", {"learning_rate": 1})
    assert str(missing.value).endswith("or your own module's folder to `python_path`")
    assert str(misspelled.value).endswith("did you mean learning_rate?")


def test_failures_name_the_files_and_say_that_their_texts_differ(run, tmp_path):
    (tmp_path / "wrong.py").write_text("x = (")
    (tmp_path / "right.py").write_text("SUBMIT(y=1)")
    failed = run("batch", "right.py", "wrong.py")
    assert "1 execution (1, wrong.py): CodeSyntaxError: the code is not valid Python (line 1): '('" in failed.stderr
    assert "<code>, line 1)" not in failed.stderr
    (tmp_path / "fail.py").write_text("raise ValueError(f'bad {name}')")
    (tmp_path / "in.csv").write_text("name\nmax\nmin\n")
    failed = run("batch", "fail.py", "--inputs", "in.csv")
    assert "2 executions (0, name=max; 1, name=min): ValueError (line 1): bad max (and similar)" in failed.stderr


def test_an_undefined_name_names_the_similar_variable_or_the_known_ones(run, tmp_path):
    (tmp_path / "use.py").write_text("SUBMIT(y=2 * learning_rte)")
    (tmp_path / "in.csv").write_text("learning_rate\n1\n")
    failed = run("batch", "use.py", "--inputs", "in.csv")
    assert "did you mean learning_rate?" in failed.stderr
    failed = run("sweep", "use.py", "--grid", "x=1")
    assert "learning_rte is not a variable of the execution (it has x): define it" in failed.stderr


@pytest.mark.parametrize(
    ("code", "options", "advice"),
    [
        ("while True: pass", ["--timeout", "1"], "give it more with --timeout, or less to do"),
        ("x = bytearray(10**10)", ["--memory-mib", "100"], "give the sandbox more with --memory-mib (it is 100)"),
    ],
)
def test_a_reached_limit_names_its_option(run, tmp_path, code, options, advice):
    (tmp_path / "use.py").write_text(code)
    assert advice in run("batch", "use.py", *options).stderr
