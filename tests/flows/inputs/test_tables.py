"""Files of inputs: one type for each column of CSV, inferred or declared, and errors of invalid files."""

import codecs
import csv
import datetime
import gzip
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError, batch
from rlm_batch.flows.inputs import tables
from rlm_batch.flows.inputs.readers import build_chunks, open_input_file, read_inputs
from rlm_batch.flows.plans.batch import BatchParameters
from rlm_batch.flows.reporting.export import write_csv
from rlm_batch.flows.reporting.ledger_reader import open_run_ledger

from ...infra.planning import plan_points


def read(folder: Path, data: str | bytes, types: Any = None) -> list[Any]:
    file = folder / "in.csv"
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    opened = open_input_file(str(file), types)
    values = list(opened)
    assert len(opened) == len(values)
    assert repr(list(opened)) == repr(values)
    return values


def read_column(folder: Path, cells: list[str], types: Any = None) -> list[Any]:
    return [row["x"] for row in read(folder, "n,x\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)), types)]


def pack(data: bytes) -> bytes:
    """Return the data compressed, with the same bytes at any time."""
    return gzip.compress(data, mtime=0)


CELLS: list[tuple[list[str], list[Any]]] = [
    (["1", "-2", " 4", "0", "-0"], [1, -2, 4, 0, 0]),
    (["1", "", " ", "3"], [1, None, None, 3]),
    (["999999999999999999", "-999999999999999999"], [10**18 - 1, 1 - 10**18]),
    (["1", "2.5", "1e3", ".5", "7.", "+.5"], [1.0, 2.5, 1000.0, 0.5, 7.0, 0.5]),
    (["1E5", "-1.5e-3", ""], [100000.0, -0.0015, None]),
    (["1.000000000000000056e-01", "0.30000000000000004", "5e-324"], [0.1, 0.30000000000000004, 5e-324]),
    (["1.7976931348623157e308", "0.0000000000000000000000", "-0.0"], [sys.float_info.max, 0.0, -0.0]),
    (["0e5", "-0.000e-400", "0.5"], [0.0, -0.0, 0.5]),
    (["9007199254740992", "0.5"], [9007199254740992.0, 0.5]),
    (["true", "False", "", "TRUE"], [True, False, None, True]),
    (["", "", ""], [None, None, None]),
]
# One cell that is not a number, or would change as a number, makes the column text.
TEXTS = [
    ["1", "01234"],
    ["1", "-01.5"],
    ["+14155550100", "14155550100"],
    ["0.5", "+2"],
    ["1000000000000000000", "1"],
    ["100000000000000000000", "0.5"],
    ["12e4567", "1234567"],
    ["1e-4567", "0.5"],
    ["9007199254740993", "0.5"],
    ["3.14159265358979323846", "2.5"],
    ["1E5", "abc"],
    ["1", "nan"],
    ["1", "NA"],
    ["1", "1_000"],
    ["1", "0x10"],
    ["1", "\u0661"],
    ["true", "1"],
    ["1.", "."],
    ['"[64,64]"', '"{}"'],
    ['"1,5"', '"2,5"'],
]


def test_a_column_has_the_one_type_that_fits_all_cells(tmp_path: Path) -> None:
    for cells, values in (*CELLS, *((cells, [cell.strip('"') or None for cell in cells]) for cells in TEXTS)):
        assert repr(read_column(tmp_path, cells)) == repr(values)


def test_the_last_cell_can_change_a_columns_type_in_a_streamed_file(tmp_path: Path) -> None:
    rows = "".join(f"{number},{'x' * 1000}\n" for number in range(9000))  # more than stays in memory
    first, *_, last = read(tmp_path, f"n,x\n{rows}many,y\n")
    assert (first["n"], last["n"]) == ("0", "many")


def test_a_requested_type_applies_to_the_column(tmp_path: Path) -> None:
    assert read_column(tmp_path, ["1", "", "01"], {"x": "str"}) == ["1", None, "01"]
    assert read_column(tmp_path, ["007", "", "NA", "+2", "1" * 30], {"x": "int"}) == [7, None, None, 2, int("1" * 30)]
    values = read_column(tmp_path, ["1", "9007199254740993", "inf", "nan"], {"x": "float"})
    assert values[:3] == [1.0, 9007199254740992.0, math.inf]
    assert math.isnan(values[3])
    assert read_column(tmp_path, ["1", "0", "True", ""], {"x": "bool"}) == [True, False, True, None]


def test_json_cells_are_parsed_like_command_line_words(tmp_path: Path) -> None:
    cells = ["1", "01", "2.0", "true", "True", "", "null", '"[1, ""a""]"', '"[1,"', '"""1"""', "x"]
    values = [1, "01", 2.0, True, True, None, None, [1, "a"], "[1,", "1", "x"]
    for types in ("json", {"x": "json"}):
        assert repr(read_column(tmp_path, cells, types)) == repr(values)


MISFITS: list[tuple[str | bytes, Any, list[str]]] = [
    ("n,x\n1,2\n3,a\n", {"x": "int"}, ["line 3", "column 'x'", "'a' is no int", "--types x=str"]),
    ("n,x\n1,2\n3,2.5\n", {"x": "int"}, ["line 3", "'2.5' is no int"]),
    ("n,x\n1,2\n3,1_000\n", {"x": "int"}, ["line 3", "'1_000' is no int"]),
    ("n,x\n1,2\n3,4,5\n", None, ["line 3", "has 3 cells, and the header has 2: n, x"]),
    ("n,x\n1,2\n\n3,4\n5\n", None, ["line 5"]),
    ("n,x\n1,nan\n3,12e4567\n", {"x": "float"}, ["line 3", "'12e4567' is no float"]),
    (b"n,x\n1,a\n2,b\n3,\xe9t\xe9\n", None, ["is not text in UTF-8", "Save it as UTF-8"]),
    ('n,x\n1,"2\n3,4\n', None, ["is not CSV", "unexpected end of data"]),
    ("n,n\n1,2\n", None, ["two columns 'n'"]),
    ('x\n1\n"{""a"": 1, ""a"": 2}"\n', "json", ["line 3", "column 'x'", "the key 'a' is twice"]),
    ("n,x\n1,2\n", {"y": "int"}, ["'y'", "has n, x"]),
]


def test_a_misfit_is_refused_with_its_line_and_column(tmp_path: Path) -> None:
    for data, types, words in MISFITS:
        with pytest.raises(ConfigurationError) as raised:
            read(tmp_path, data, types)
        assert [word for word in words if word not in str(raised.value)] == []


def test_byte_order_marks_line_ends_and_quoted_lines_are_supported(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        text = 'n,x\n1,a\n\n2,"b,\né"\n3,d'.replace("\n", end)
        for data in (text.encode(), text.encode("utf-8-sig"), text.encode("utf-16")):
            assert read(tmp_path, data) == [{"n": 1, "x": "a"}, {"n": 2, "x": f"b,{end}é"}, {"n": 3, "x": "d"}]
        assert read(tmp_path, f"x{end}1{end}{end}2{end}".encode()) == [{"x": 1}, {"x": 2}]
    assert read(tmp_path, 'n, x\n1, 2\n3, "4"\n') == [{"n": 1, "x": 2}, {"n": 3, "x": 4}]
    for encoding in ("utf-8-sig", "utf-16"):
        (tmp_path / "in.jsonl").write_text('{"x": "é"}\n', encoding=encoding)
        assert list(read_inputs(str(tmp_path / "in.jsonl"))) == [{"x": "é"}]


def test_an_export_to_csv_is_read_with_its_byte_order_mark(tmp_path: Path) -> None:
    results = batch.sync("SUBMIT(y=x)", inputs=[{"x": "été"}])
    for is_raw, mark in ((False, codecs.BOM_UTF8), (True, b"")):
        write_csv(open_run_ledger(results.results_path), tmp_path / "in.csv", raw=is_raw)
        assert (tmp_path / "in.csv").read_bytes().startswith(mark + b"index,")
        (row,) = open_input_file(str(tmp_path / "in.csv"))
        assert (row["index"], row["y"]) == (0, "été")


def test_files_written_by_python_and_pandas_are_read_correctly(tmp_path: Path) -> None:
    rows = [{"a": 'x,"\n', "n": 1, "f": 0.1, "b": True}, {"a": "é;\t", "n": -7, "f": 1e-12, "b": False}]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert repr(list(open_input_file(str(tmp_path / "in.csv")))) == repr(rows)
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False)
    assert repr(list(open_input_file(str(tmp_path / "in.csv")))) == repr(rows)


def test_trailing_empty_rows_are_ignored_and_inner_ones_are_executions(tmp_path: Path) -> None:
    rows = read(tmp_path, 'x,y\n1,2\n,\n3,4\n,\n" ",""\n')
    assert [(row["x"], row["y"]) for row in rows] == [(1, 2), (None, None), (3, 4)]
    (tmp_path / "in.csv").write_text("x,y\n,\n")
    with pytest.raises(ConfigurationError, match="has no rows: give at least one row"):
        read_inputs(str(tmp_path / "in.csv"))


LIKELY_CAUSES: list[tuple[str, bytes, str]] = [
    ("in.csv", b",x\n0,1\n", "column 1 has no name: name it, or save a DataFrame without index"),
    ("in.csv", b"Unnamed: 0,x\n0,1\n", "column 1 has no name"),
    ("in.csv", b"0.1,32\n0.2,64\n", "'0.1' has a name that Python code cannot use: rename it"),
    ("in.csv", b"SUBMIT\n1\n", "'SUBMIT' has the name of a function"),
    ("in.jsonl", b'{"x": 1}\n{"VOLUME": 1}\n', "line 2 of .*'VOLUME' has the name of a function"),
    ("in.json", b'[{"x": 1},\n\n {"VOLUME": 1}]', "item 2 of .*'VOLUME' has the name of a function"),
    ("in.jsonl", b'{"x": 1}\n{"x": 1e400}\n', "line 2 of .*1e400 is more than a number can be"),
    ("in.xlsx", b"PK\x03\x04", "is not JSON lines .*: convert or rename it"),
    ("in.csv", "x,y\n1,été\n".encode("latin-1"), "is not text in UTF-8 .* Save it as UTF-8"),
    ("in.csv.gz", pack(b"x\n1\n" * 99)[:-9], "is damaged, or not compressed as .gz says: .*ended before"),
    ("in.csv.gz", b"x\n1\n", "is damaged, or not compressed as .gz says: Not a gzipped file"),
    ("in.jsonl", b'[{"x": 1}]', r"is a list, and must be an object \(one array is a file NAME.json\)"),
    ("in.json", b'[{"x": 1},\n 5]', "item 2 of .* is an int, and must be an object"),
    ("in.json", b'[{"x": 1}\n {"x": 2}]', "in.json is not JSON: Expecting ',' delimiter: line 2 column 2"),
    ("in.json", b'[{"x": 1}] 2', "in.json is not JSON: Extra data"),
    ("in.jsonl", b'{"x": 1}\n{"x": 1, "x": 2}\n', "line 2 of .* is not JSON: the key 'x' is twice"),
    ("in.json", b"[]", "has no rows: give at least one row"),
    ("in.csv", codecs.BOM_UTF8 + b"x;y\n1;2\n", "has ';' between its cells: save it with commas"),
]


def test_an_unreadable_file_is_refused_with_its_likely_cause(tmp_path: Path) -> None:
    for name, data, words in LIKELY_CAUSES:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigurationError, match=words) as raised:
            read_inputs(str(tmp_path / name))
        assert "\n" not in str(raised.value)


READABLE: list[tuple[str, bytes]] = [
    ("in.json", b'[{"x": 1}, {"x": 2}]'),
    ("in.json", b'[\n  {"x": 1},\n  {\n "x": 2}\n]\n'),
    ("in.json", b'\xef\xbb\xbf [{"x": 1},{"x": 2}] \n\n'),
    ("in.json", b'{"x": 1}\n{"x": 2}\n'),
    ("in.json.gz", pack(b'[{"x": 1}, {"x": 2}]')),
    ("in.jsonl.gz", pack(b'{"x": 1}\n{"x": 2}\n')),
    ("in.CSV.GZ", pack(b"x\n1\n2\n")),
    ("in.csv.gz", pack(b"x\n1\n") + pack(b"2\n")),  # as `cat` joins files
]


@pytest.mark.parametrize(("name", "data"), READABLE)
def test_json_arrays_and_compressed_files_are_read(tmp_path: Path, name: str, data: bytes) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    values = read_inputs(str(file))
    assert (len(values), list(values), list(values)) == (2, [{"x": 1}, {"x": 2}], [{"x": 1}, {"x": 2}])


def test_a_file_of_zstandard_is_read_or_its_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    file = tmp_path / "in.csv.zst"
    file.write_bytes(zstd.compress(b"x\n1\n2\n"))
    assert list(read_inputs(str(file), {"x": "str"})) == [{"x": "1"}, {"x": "2"}]
    damaged = tmp_path / "damaged.jsonl.zst"
    damaged.write_bytes(zstd.compress(b'{"x": 1}\n')[:-2])
    with pytest.raises(ConfigurationError, match=r"is damaged, or not compressed as \.zst says"):
        read_inputs(str(damaged))
    for name in tables.ZSTD_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[zstd\]'"):
        read_inputs(str(file))


def test_an_array_of_data_has_an_item_for_each_chunk_item(tmp_path: Path) -> None:
    for text, items in (("[1, [2], null]", [1, [2], None]), ("[1]\n[2]\n", [[1], [2]]), ("[\n1,\n2]", [1, 2])):
        (tmp_path / "in.json").write_text(text)
        assert list(build_chunks(None, str(tmp_path / "in.json"), 9)) == [{"chunk_id": "0", "data": items}]


def test_inputs_that_no_file_explains_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    missing = "it does not exist, and a text is taken as a path"
    cases: list[tuple[Any, Any, str]] = [
        ([{"x": 1}, {"0": 1}], None, r"item 2 of inputs: the variable '0' has a name .*: rename it"),
        ("x=1,2", None, missing),
        (str(tmp_path / "data.txt"), None, missing),
        (str(tmp_path / "in.jsonl"), {"x": "int"}, "there is none: leave it out"),
        ([{"x": 1}], "json", "there is none: leave it out"),
    ]
    for inputs, types, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            read_inputs(inputs, types)


def test_chunks_from_csv_keep_their_ids_as_written(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,data\n1E5,1\n2E5,2\n")
    assert list(build_chunks(str(file), None, None)) == [{"chunk_id": "1E5", "data": 1}, {"chunk_id": "2E5", "data": 2}]


def test_parquet_keeps_its_types_and_values_beyond_json_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "in.parquet"
    columns = {"zip": ["01234", None], "n": [1, 2], "layers": [[64], []], "day": [datetime.date(2024, 1, 2), None]}
    parquet.write_table(arrow.table(columns), file)
    assert list(read_inputs(str(file))) == [
        {"zip": "01234", "n": 1, "layers": [64], "day": "2024-01-02"},
        {"zip": None, "n": 2, "layers": [], "day": None},
    ]
    large = arrow.table({"x": [os.urandom(2000).hex() for _ in range(4000)]})  # more than stays in memory
    parquet.write_table(large, file)
    assert [row["x"] for row in read_inputs(str(file))] == large["x"].to_pylist()
    parquet.write_table(arrow.table({"raw": [b"x"]}), file)
    with pytest.raises(ConfigurationError, match=r"column 'raw' of .* has the type bytes"):
        read_inputs(str(file))
    file.write_bytes(b"PAR1 not")
    with pytest.raises(ConfigurationError, match="is not valid Parquet"):
        read_inputs(str(file))


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, columns in (
        ("year=2025/city=a%20b/0", {"x": [1]}),
        ("year=2026/city=__HIVE_DEFAULT_PARTITION__/0", {"x": [2, 3]}),
    ):
        file = tmp_path / "hive" / f"{name}.parquet"
        file.parent.mkdir(parents=True)
        parquet.write_table(arrow.table(columns), file)
    (tmp_path / "hive" / "_SUCCESS").touch()
    assert list(read_inputs(str(tmp_path / "hive"))) == [
        {"x": 1, "year": 2025, "city": "a b"},
        {"x": 2, "year": 2026, "city": None},
        {"x": 3, "year": 2026, "city": None},
    ]
    plain = tmp_path / "plain.parquet"
    plain.mkdir()
    parquet.write_table(arrow.table({"x": [1]}), plain / "a.parquet")
    parquet.write_table(arrow.table({"x": [0.5], "y": ["s"]}), plain / "b.parquet")
    assert list(read_inputs(str(plain))) == [{"x": 1.0, "y": None}, {"x": 0.5, "y": "s"}]
    parquet.write_table(arrow.table({"x": ["s"]}), plain / "c.parquet")
    with pytest.raises(ConfigurationError, match=r"do not fit together: .*double vs string"):
        read_inputs(str(plain))
    parquet.write_table(arrow.table({"x": [2**60 + 1]}), plain / "c.parquet")  # a float loses its last digit
    with pytest.raises(ConfigurationError, match="do not fit together"):
        read_inputs(str(plain))
    (plain / "c.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(ConfigurationError, match=r"plain\.parquet is not valid Parquet"):
        read_inputs(str(plain))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"is a folder without Parquet files: name a file, or '.*empty/\*'"):
        read_inputs(str(tmp_path / "empty"))


def test_a_partition_with_leading_zeros_is_text(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for folder in ("zip=01234/n=-0", "zip=90210/n=12"):
        (tmp_path / folder).mkdir(parents=True)
        parquet.write_table(arrow.table({"x": [1]}), tmp_path / folder / "0.parquet")
    assert list(read_inputs(str(tmp_path))) == [{"x": 1, "zip": "01234", "n": 0}, {"x": 1, "zip": "90210", "n": 12}]


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstd = pytest.importorskip("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    monkeypatch.setattr(tables, "UNPACKED_BYTES", 8 * 1024 * 1024)
    data = b"x\n" + b"1\n" * 5_000_000
    (tmp_path / "folder").mkdir()
    for file in ("in.parquet", "folder/in.parquet"):
        parquet.write_table(arrow.table({"x": [[1] * 2_000_000]}), tmp_path / file)
    for name, content in {
        "in.csv.gz": pack(data), "in.csv.zst": zstd.compress(data), "in.jsonl.zst": zstd.compress(b" \n" * 5_000_000),
        "in.json.zst": zstd.compress(b"[" + b" " * 10_000_000 + b"]"), "in.parquet": None, "folder": None,
    }.items():  # fmt: skip
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"unpacks to more than \d+ MiB, over 100 times its size"):
            read_inputs(str(tmp_path / name))


def test_a_text_that_many_rows_of_parquet_share_does_not_fill_the_memory(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * 1500), arrow.array(["x" * 2**20]))
    parquet.write_table(arrow.table({"x": texts, "n": range(1500)}), tmp_path / "in.parquet")
    program = """
import sys
from pathlib import Path
from rlm_batch.flows.inputs.readers import read_inputs
total = sum(row["n"] for row in read_inputs(sys.argv[1]))
print(total, int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "in.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    total, mib = map(int, done.stdout.split())
    assert total == sum(range(1500))
    assert mib < 700  # 3 GiB if 1,500 rows are in memory


def test_parquet_without_pyarrow_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[parquet\]'"):
        read_inputs(str(tmp_path / "in.parquet"))


def test_a_pipe_is_read_once_for_check_and_run(tmp_path: Path) -> None:
    lines, cells = tmp_path / "in.jsonl", tmp_path / "in.csv"
    for pipe, text in ((lines, '{"x": 1}\n{"x": 2}\n'), (cells, "x\n1\n2\nthree\n")):
        os.mkfifo(pipe)
        threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
    plan = BatchParameters.parse({"code": "SUBMIT(y=x)", "inputs": str(lines)}).make_plan()
    for _ in range(2):  # Prefect may retry the flow run.
        assert [variables for _, variables in plan.items] == [{"x": 1}, {"x": 2}]
    # A column of numbers whose last cell is text.
    assert plan_points(str(cells)) == [{"x": "1"}, {"x": "2"}, {"x": "three"}]


def test_a_changed_file_is_read_again_and_refused_by_earlier_readers(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"id": n, "data": n}) + "\n" for n in range(5)))
    held, whole, cut = (
        read_inputs(str(file)), build_chunks(str(file), None, None), build_chunks(None, str(file), 2)
    )  # fmt: skip
    assert (len(held), len(list(whole)), len(list(cut))) == (5, 5, 3)
    with file.open("a") as more:
        more.write('{"id": 5, "data": 5}\n')
    assert len(read_inputs(str(file))) == 6
    with pytest.raises(ConfigurationError, match="changed after it was checked: start the run again"):
        list(held)
