"""Wrong usage of a command: one sentence and exit status 2, before anything starts."""

import shlex

import pytest

CASES = [
    ("batch", "requires an argument (see rlm-batch batch "),
    ("nosuch", "(see rlm-batch --help)"),
    ("batch slow.py slow.py --inputs odd.jsonl", "--inputs needs one piece of code, and there is a list"),
    ("sweep p.csv.gz", "p.csv.gz is a file of data, and not of Python code: pass data with an option such as --inputs"),
    ("batch --inputs a.csv b.csv slow.py", "b.csv is a file of data, and not of Python code"),
    ("batch slow.py --inputs columns.csv odd.jsonl", "odd.jsonl"),
    ("runs nosuch", "nosuch"),
    ("server foo", "foo"),
    ("batch slow.py --inputs slow.py", "convert or rename it"),
    ("batch slow.py --inputs 'nosuch/*.csv'", "no file matches {}/nosuch/*.csv"),
    ("sweep slow.py --points '*.csv'", "*.csv is a pattern, which only --inputs of batch takes"),
    ("batch slow.py --inputs odd.jsonl", "line 2 of {}/odd.jsonl: the variable '2x' has a name"),
    ("batch slow.py --inputs columns.csv --types zip", "give a name and a value, as in NAME=VALUE"),
    ("batch slow.py --inputs columns.csv --types zip=text", "should be 'int', 'float'"),
    ("batch latin.py", "latin.py is not UTF-8 text"),
    ("batch slow.py --memory-mib 3", "--memory-mib is '3': it should be greater than or equal to 64"),
    ("batch slow.py --cpu 1", "the provider local has no setting --cpu: it has volume_name, "),
    ("batch slow.py --python-path nowhere", "there is no 'nowhere' on this machine"),
    ("batch slow.py --mounts /data", "--mounts /data: give a name and a value"),
    ("batch slow.py --mounts /a=slow.py --mounts /a=slow.py", "--mounts sets /a twice"),
    ("batch slow.py --models ''", "--models '': give a name and a value"),
    ("batch slow.py --prepare nosuch.py", "No such file or directory: 'nosuch.py'"),
    ("sweep slow.py", "pass one of --grid, --points or --space"),
    ("sweep slow.py --grid x=", "give values with commas between, such as x=1,2,3"),
    ("sweep slow.py --grid x=1 --grid x=2", "twice"),
    ("sweep slow.py --grid 'x=[1'", "[1 is unclear: give values with commas"),
    ("sweep slow.py --points nosuch.csv", "No such file"),
    ("sweep slow.py --space x=a..1 --trials 3", "a..1 is unclear: give bounds as LOW..HIGH"),
    ("sweep slow.py --space slow.py --trials 3 --minimize y", "slow.py is not JSON"),
    ("sweep slow.py --space x=1..2 --trials 3 --minimize y --maximize z --stop-at 1", "--stop-at, --stop-after and"),
    ("sweep slow.py --grid x=1 --provider nosuch", "unknown provider 'nosuch'"),
    ("sweep slow.py --grid x=1 --isolation half", "--isolation"),
    ("sweep slow.py --grid x=1 --isolation none --provider local:none", "--isolation needs the provider local"),
    ("sweep slow.py --grid x=1 --results-path ''", "a path is empty"),
    ("chunks slow.py --data odd.jsonl --chunk-size 1 --volume-name a/b", "not the name of a volume"),
    ("chunks slow.py --data odd.jsonl --chunk-size 1 --reduce nosuch.py", "No such file or directory: 'nosuch.py'"),
    ("sequence slow.py --max-workers 2", "--max-workers"),
    ("rlm q", "--language-model"),
    ("sweep slow.py --trials", "--trials"),
    ("batch slow.py --timeot 3", "Did you mean --timeout? (see rlm-batch batch --help)"),
    ("volume ls", "NAME"),
    ("volume ls nosuch", "no volume 'nosuch'"),
    ("volume ls ../x", "not the name of a volume"),
    ("volume ls there ../x", "not a path below the directory"),
    ("volume get there nosuch", "nosuch could not be listed: No such file"),
    ("volume put there nosuch.txt", "No such file or directory: 'nosuch.txt'"),
    ("volume rm there .", "no path was given"),
    ("volume list --provider nosuch", "unknown provider"),
    ("reap --older-than 60", "--older-than is 60.0: it should be greater than or equal to 360"),
    ("up --database mysql://me:not-told@there/prefect", "postgresql://USER:PASSWORD@HOST/NAME"),
    ("up --auth somebody:", "NAME:PASSWORD"),
    ("up --auth 'somebody:not-told-\u00e9'", "in ASCII"),
    ("up --port 70000", "from 1 to 65535"),
]


@pytest.mark.parametrize(("words", "reason"), CASES)
def test_wrong_usage_is_refused_with_one_sentence(refused, tmp_path, volumes, words, reason):
    (tmp_path / "slow.py").write_text("SUBMIT(fine=1)")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "odd.jsonl").write_text('{"x": 1}\n{"2x": 2}\n')
    (tmp_path / "columns.csv").write_text("zip\n01234\n")
    (volumes / "there").mkdir()
    sentence = refused(*shlex.split(words))
    assert reason.format(tmp_path) in sentence
    assert "not-told" not in sentence
