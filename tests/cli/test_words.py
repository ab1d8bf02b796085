"""Values in `--grid` and `--space`: their conversion from text, and errors that name the allowed forms."""

import codecs
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.cli.argument_parsing import parse_grid, parse_space
from rlm_batch.cli.parameter_options import READERS

from .conftest import Run

VALUES: dict[str, list[Any]] = {
    "True,False": [True, False],
    "true,FALSE": [True, False],
    "None,null": [None, None],
    "1,-2,0,12345678901234567890": [1, -2, 0, 12345678901234567890],
    ".1,+.5,1.,1e-4,1E5,-1.5e-3": [0.1, 0.5, 1.0, 0.0001, 100000.0, -0.0015],
    "+1,1_000,-1_0.5,+14155550100": [1, 1000, -10.5, 14155550100],
    "1_a,_1": ["1_a", "_1"],
    "1, 0.5 ,sqrt,None": [1, 0.5, "sqrt", None],
    "NaN,nan": [math.nan, math.nan],
    "inf,-Infinity": [math.inf, -math.inf],
    '"a,b","c"': ["a,b", "c"],
    '"1","true",""': ["1", "true", ""],
    '{"a":1,"b":[2,3]},null': [{"a": 1, "b": [2, 3]}, None],
    "[64],[64,64]": [[64], [64, 64]],
    "[[64],[64,64]]": [[64], [64, 64]],
    "[1,2]": [1, 2],
    "adam,2024-01-01,1.2.3,10%,a b,../x,no": ["adam", "2024-01-01", "1.2.3", "10%", "a b", "../x", "no"],
    "16:9,4:3": ["16:9", "4:3"],
    "f(x),prompt (a)": ["f(x)", "prompt (a)"],
    "caf\u00e9,it's,a=b": ["caf\u00e9", "it's", "a=b"],
}


def test_a_sweep_uses_the_parsed_types_of_its_words(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(seen=[repr(x), repr(flag)], loss=0 if flag else 1)")
    values = 'x=None,.1,nan,"a,b",[1]'
    words = ["--grid", values, "--grid", "flag=False,True", "--minimize", "loss", "--json", "--isolation", "none"]
    done = run("sweep", "code.py", *words)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    shown = [repr(value) for value in (None, 0.1, math.nan, "a,b", [1])]
    assert [line["outputs"]["seen"] for line in lines] == [[x, flag] for x in shown for flag in ("False", "True")]
    assert [line.get("best", False) for line in lines].index(True) == 1


def test_each_column_of_a_file_has_the_requested_type(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(seen=[x, y, z])")
    (tmp_path / "in.csv").write_text("x,y,z\n1,2,3\n")
    for words in (["x=float", "--types", "y=str"], ["x=float, y=str"]):
        done = run("batch", "code.py", "--inputs", "in.csv", "--types", *words, "--json", "--isolation", "none")
        assert json.loads(done.stdout)["outputs"]["seen"] == [1.0, "2", 3]
    assert "twice" in run("batch", "code.py", "--inputs", "in.csv", "--types", "x=int,x=str").stderr


@pytest.mark.parametrize("word", VALUES)
def test_each_word_between_commas_is_a_separate_value(word: str) -> None:
    expected = repr(VALUES[word])
    assert repr(parse_grid([f"x={word}"])["x"]) == expected
    assert repr(parse_space([f"x={word}"])["x"]) == expected


UNCLEAR = [
    "1,2,", "1,,2", ",", "'a','b'", "[a, b]", "[True,None,.5]", "[1,2", "(64,64)", "1,(2,3)", "{'a': True}", '{"a":1',
    '"a', "\u201ca\u201d", '"a"b', "uniform:0..1,2", "np.array([1,2]),3", "prompt (a, [b,c]),d", "range(1,5)", "1..5,7",
    "a..1", "log:1e-5", "log1e-4..1e-1",
]  # fmt: skip
UNCLEAR_IN_GRIDS = ["1e-4..1e-1", "log:1e-5..0.1", "32..512:32", "..5"]


@pytest.mark.parametrize(
    ("option", "word"),
    [*(("--grid", word) for word in (*UNCLEAR, *UNCLEAR_IN_GRIDS)), *(("--space", word) for word in UNCLEAR)],
)
def test_an_unclear_word_is_refused_with_the_allowed_forms(option: str, word: str) -> None:
    parse = parse_grid if option == "--grid" else parse_space
    with pytest.raises(ConfigurationError) as raised:
        parse([f"x={word}"])
    message = str(raised.value)
    assert message.startswith(f"{option} x={word}: ")
    assert "such as x=1,2,3" in message
    assert "\n" not in message
    (as_text,) = parse(shlex.split(message.rpartition("; a text is ")[2]))["x"]
    assert isinstance(as_text, str)


def test_a_space_has_bounds_and_may_be_a_file_with_any_bom(tmp_path: Path) -> None:
    assert parse_space(["lr=log:1e-5...1", "n=1..9:2", 'd={"low": 1, "high": 3}']) == {
        "lr": {"low": 1e-5, "high": 0.1, "log": True},
        "n": {"low": 1, "high": 9, "step": 2},
        "d": {"low": 1, "high": 3},
    }
    file = tmp_path / "space.json"
    text = '{"opt": ["\u00e9"]}'
    for data in (text.encode(), codecs.BOM_UTF8 + text.encode(), text.encode("utf-16")):
        file.write_bytes(data)
        assert parse_space([str(file)]) == {"opt": ["\u00e9"]}
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="is not text in UTF-8"):
        parse_space([str(file)])


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "space.json"
    file.write_text('{"lr": {"low": 1, "high": 2},\n "lr": [1]}')
    for parse, words in (
        (parse_space, [str(file)]),
        (parse_space, ['lr={"low": 1, "high": 2, "low": 0}']),
        (parse_grid, ['x={"a": 1, "a": 2}']),
        (parse_grid, ['x=1,[{"a": 1, "a": 2}]']),
    ):
        with pytest.raises(ConfigurationError, match=r"the key '\w+' is twice in one object"):
            parse(words)
    for name, words in (("mounts", ["/a=b", "/a=c"]), ("tools", ["a=m:f", "a=m:g"]), ("models", ["a=m", "b=n", "a"])):
        with pytest.raises(ConfigurationError, match=f"--{name} sets /?a twice: leave one out"):
            READERS[name].read(words)
