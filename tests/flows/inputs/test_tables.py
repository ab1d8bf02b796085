"""What code finds of the cells of CSV and Parquet files: one type for each column, found or given."""

import csv
import datetime
import io
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.flows.inputs import csv_blocks, reading_progress
from rlm_batch.flows.inputs.chunking import build_chunks
from rlm_batch.flows.inputs.readers import InputFile, read_points


@pytest.fixture(params=[csv_blocks.BLOCK_CHARACTERS, 16], ids=["one block", "many blocks"], autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_blocks, "BLOCK_CHARACTERS", request.param)
    monkeypatch.setattr(csv_blocks, "BLOCK_ROWS", max(2, request.param // 100))


def read(folder: Path, data: str | bytes, types: Any = None) -> list[Any]:
    file = folder / "in.csv"
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    opened = InputFile(str(file), types)
    values = list(opened)
    assert len(opened) == len(values)
    assert list(opened) == values or any(value != value for row in values for value in row.values())
    return values


def column(folder: Path, cells: list[str], types: Any = None) -> list[Any]:
    return [row["x"] for row in read(folder, "n,x\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)), types)]


CELLS: list[tuple[list[str], list[Any]]] = [
    (["1", "-2", "+3", " 4"], [1, -2, 3, 4]),
    (["1", "2.5", "1e3", ".5"], [1.0, 2.5, 1000.0, 0.5]),
    (["1", "01234", "7"], ["1", "01234", "7"]),
    (["1", "-01.5", "7"], ["1", "-01.5", "7"]),
    (["0", "0", "-0", "10"], [0, 0, 0, 10]),
    (["0.5", "0", "0.25"], [0.5, 0.0, 0.25]),
    (["1", "", "3"], [1, None, 3]),
    (["1.5", "NA", "null"], [1.5, None, None]),
    (["1", "1_000"], ["1", "1_000"]),
    (["1", "\u0661"], ["1", "\u0661"]),
    (["12345678901234567890123", "1"], [12345678901234567890123, 1]),
    (["true", "False", "", "TRUE"], [True, False, None, True]),
    (["true", "1"], ["true", "1"]),
    (["", "", ""], [None, None, None]),
    (["", "a", "NA"], ["", "a", "NA"]),
    (["1", "2", "three"], ["1", "2", "three"]),
    (["2024-01-01", "2024-02-01"], ["2024-01-01", "2024-02-01"]),
    (['"[64,64]"', '"[]"'], [[64, 64], []]),
    (['"[64,64]"', "7"], ["[64,64]", "7"]),
    (["None of these", "nothing"], ["None of these", "nothing"]),
]


def test_cells_of_a_column_have_the_one_type_that_all_of_them_fit(tmp_path: Path) -> None:
    for cells, values in CELLS:
        found = column(tmp_path, cells)
        assert found == values
        assert [type(value) for value in found] == [type(value) for value in values]


def test_nan_and_infinities_are_numbers_among_numbers(tmp_path: Path) -> None:
    found = column(tmp_path, ["1", "nan", "-inf", "2"])
    assert [found[0], found[2], found[3]] == [1.0, -math.inf, 2.0]
    assert math.isnan(found[1])


def test_a_type_that_was_given_is_the_columns(tmp_path: Path) -> None:
    assert column(tmp_path, ["1", "2"], {"x": "str"}) == ["1", "2"]
    assert column(tmp_path, ["007", "", "2"], {"x": "int"}) == [7, None, 2]
    assert column(tmp_path, ["1", "2"], {"x": "float"}) == [1.0, 2.0]
    assert column(tmp_path, ["1", "0"], {"x": "bool"}) == [True, False]
    assert column(tmp_path, ["1", "a", "[2]"], {"x": "json"}) == [1, "a", [2]]


def test_with_json_each_cell_is_read_by_itself_as_it_always_was(tmp_path: Path) -> None:
    assert column(tmp_path, ["1", "01", "2.0", "true", "True", "", "NaN", "null", "x"], "json") == [
        *(1, "01", 2.0, True, "True", "", "NaN", None, "x")
    ]


MISFITS: list[tuple[str | bytes, Any, list[str]]] = [
    ("n,x\n1,2\n3,a\n", {"x": "int"}, ["line 3", "column 'x'", "'a' is no int", "--types x=str"]),
    ("n,x\n1,2\n3,2.5\n", {"x": "int"}, ["line 3", "'2.5' is no int"]),
    ('n,x\n"1\n\n",2\n3,b\n', {"x": "float"}, ["line 5", "'b' is no float"]),
    ("n,x\n1,2\n3,4,5\n", None, ["line 3", "not as many cells as the header: n, x"]),
    ("n,x\n1,2\n3\n4,5,6\n", None, ["line 3"]),
    ("n,x\n1,2\n\n3,4\n5\n", None, ["line 5"]),
    (b"n,x\n1,a\n2,b\n3,\xe9t\xe9\n", None, ["line 4", "column 'x'", "is not UTF-8", "iconv"]),
    (b"n,\xe9\n1,a\n", None, ["line 1", "header", "is not UTF-8"]),
    ('n,x\n1,"2\n3,4\n', None, ["no CSV that can be read", "unexpected end of data"]),
    ("n,n\n1,2\n", None, ["'n' twice"]),
    ("n,x\n1,2\n", {"y": "int"}, ["'y'", "it has n, x"]),
]


def test_what_does_not_fit_is_refused_with_its_line_and_column(tmp_path: Path) -> None:
    for data, types, words in MISFITS:
        with pytest.raises(ConfigurationError) as raised:
            read(tmp_path, data, types)
        assert [word for word in words if word not in str(raised.value)] == []


def test_byte_order_marks_line_ends_blank_lines_and_quoted_lines_are_as_elsewhere(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        data = '\ufeffn,x\n1,a\n\n2,"b,\nc"\n3,d'.replace("\n", end).encode()
        assert read(tmp_path, data) == [{"n": 1, "x": "a"}, {"n": 2, "x": f"b,{end}c"}, {"n": 3, "x": "d"}]
        assert read(tmp_path, f"x{end}1{end}{end}2{end}".encode()) == [{"x": 1}, {"x": 2}]


def test_a_cell_may_be_long_and_what_is_almost_json_is_text(tmp_path: Path) -> None:
    data = f'x\n{"a" * 200_000}\n"[NaN, 1]"\n{"[" * 100_000}\n'
    assert read(tmp_path, data) == [{"x": "a" * 200_000}, {"x": "[NaN, 1]"}, {"x": "[" * 100_000}]


def test_cells_are_those_of_pythons_reader_whatever_their_lengths(tmp_path: Path) -> None:
    dice = random.Random(7)
    for _ in range(60):
        width = dice.randint(1, 4)
        alphabet = dice.choice(["ab", 'a,"\n', "aé\r\n", "a \n"])
        rows = [["".join(dice.choices(alphabet, k=dice.randint(1, 9))) for _ in range(width)] for _ in range(9)]
        text = io.StringIO(newline="")
        end = "\r\n" if "\r" in alphabet else dice.choice(["\n", "\r\n"])  # what it writes in quotes
        csv.writer(text, lineterminator=end).writerows([list("wxyz"[:width]), *rows])
        found = read(tmp_path, text.getvalue(), dict.fromkeys("wxyz"[:width], "str"))
        assert [list(row.values()) for row in found] == rows


def test_types_are_of_csv_alone_and_need_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(ConfigurationError, match="leave them out"):
        read_points(str(tmp_path / "in.jsonl"), {"x": "int"})
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_points([{"x": 1}], "json")


def test_chunks_from_csv_have_their_ids_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,data\n007,1\n008,2\n")
    assert list(build_chunks(str(file), None, None)) == [("007", 1), ("008", 2)]


def test_parquet_is_read_with_its_own_types_and_what_is_no_json_is_refused_by_name(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "in.parquet"
    columns = {"zip": ["01234", None], "n": [1, 2], "layers": [[64], []], "day": [datetime.date(2024, 1, 2), None]}
    parquet.write_table(arrow.table(columns), file)
    assert list(read_points(str(file))) == [
        {"zip": "01234", "n": 1, "layers": [64], "day": "2024-01-02"},
        {"zip": None, "n": 2, "layers": [], "day": None},
    ]
    parquet.write_table(arrow.table({"raw": [b"x"]}), file)
    with pytest.raises(ConfigurationError, match=r"column 'raw' of .* is binary"):
        read_points(str(file))
    file.write_bytes(b"PAR1 not")
    with pytest.raises(ConfigurationError, match="no Parquet that can be read"):
        read_points(str(file))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rlm-batch\[parquet\]'"):
        read_points(str(tmp_path / "in.parquet"))


def test_a_large_file_says_that_it_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_progress, "LARGE_BYTES", 100)
    monkeypatch.setattr(reading_progress, "INTERVAL_SECONDS", 0.0)
    file = tmp_path / "in.csv"
    file.write_text("x,y\n" + "1,2\n" * 100)
    lines: list[str] = []
    read_points(str(file), None, lines.append)
    assert lines[0] == f"reading {file}, 0 MB"
    assert lines[-1] == f"reading {file}: 100%"
