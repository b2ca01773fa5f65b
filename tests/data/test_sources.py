import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fourfold.data import PYTHON_STDLIB, find_source, sources
from fourfold.errors import UserError


def texts(source, **options) -> list[str]:
    return [text for text, _ in find_source(source, **options).documents()]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_standard_library_is_python_in_a_fixed_order() -> None:
    source = find_source(PYTHON_STDLIB)
    names = [str(file.path) for file in source.files]
    assert names == sorted(names) == [str(file.path) for file in find_source(PYTHON_STDLIB).files]
    assert any(name.endswith("argparse.py") for name in names)
    assert not any("site-packages" in name or not name.endswith(".py") for name in names)
    assert source.total_bytes > 5e6


def test_standard_library_passes_over_files_that_are_not_utf8(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("b = 1\n")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert texts(PYTHON_STDLIB) == texts((PYTHON_STDLIB,)) == ["a = 1\n"]
    assert texts([tmp_path / "a.py", PYTHON_STDLIB]) == ["a = 1\n"] * 2


def test_python_without_its_standard_library(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no standard library source on disk"):
        find_source(PYTHON_STDLIB)


def test_folder_is_read_recursively_in_order_without_binary_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("zwei ä\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.rst").write_text("three")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\0\0")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.txt").write_text("no")
    assert texts(tmp_path) == ["one", "zwei ä\n", "three"]


def test_folder_with_records_stands_for_these_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    write_jsonl(tmp_path / "b.jsonl", {"text": "from b"})
    pq.write_table(pa.table({"text": ["from a"]}), tmp_path / "a.parquet")
    assert texts(tmp_path) == ["from a", "from b"]


def test_list_keeps_its_order_and_progress_counts_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("aaa")
    (tmp_path / "b").write_text("bb")
    source = find_source([tmp_path / "b", str(tmp_path / "a")])
    assert list(source.documents()) == [("bb", 2), ("aaa", 5)]
    assert source.total_bytes == 5
    assert source.name == f"{tmp_path}/b, {tmp_path}/a"


def test_long_text_file_is_cut_at_line_ends(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT_BYTES", 10)
    (tmp_path / "a.txt").write_text("one line\ntwo ä lines\nthree\n")
    assert texts(tmp_path / "a.txt") == ["one line\ntwo ä lines\n", "three\n"]


def test_text_keeps_carriage_returns_and_loses_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb")
    assert texts(tmp_path / "a.txt") == ["a\r\nb"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_jsonl_passes_over_blank_lines_and_documents_without_text(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "zw\\u00f6lf\\n"}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    assert texts(path) == ["one", "zwölf\n"]
    assert list(find_source(path).documents())[-1][1] == path.stat().st_size


def test_records_with_another_field(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"content": "one", "text": "no"})
    pq.write_table(pa.table({"content": ["two", None, "three"], "id": [1, 2, 3]}), tmp_path / "b.parquet")
    assert texts([path, tmp_path / "b.parquet"], field="content") == ["one", "two", "three"]


def test_parquet_is_streamed_with_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    words = [f"text {number}" for number in range(3000)]
    pq.write_table(pa.table({"text": pa.array(words).dictionary_encode()}), path, row_group_size=1000)
    documents = list(find_source(path).documents())
    assert [text for text, _ in documents] == words
    size = path.stat().st_size
    assert documents[0][1] < documents[-1][1] == size


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": \n', r"a.jsonl line 2 is not valid JSON: Expecting value"),
        ("a.jsonl", b'{"text": "one"}\n["two"]\n', r"a.jsonl line 2 is not a JSON object"),
        (
            "a.jsonl",
            b'{"txt": "one", "id": 3}\n',
            r"line 1 has no field 'text', the text; its fields: txt, id. Did you mean 'txt'\?",
        ),
        ("a.jsonl", b'{"text": 7}\n', r"line 1: the field 'text' is not a string but 7"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: the field 'text' is not valid Unicode"),
        ("a.jsonl", b'\n{"text": "\xff"}\n', r"a.jsonl is not UTF-8 text: line 2 holds the byte 0xff"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", r"a.txt is not UTF-8 text: line 3 holds the byte 0xe9"),
        ("a.jsonl.gz", b"no gzip", r"cannot read .*a.jsonl.gz: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "one"}\n', mtime=0)[:-6],
            r"cannot read .*a.jsonl.gz: Compressed file",
        ),
        ("a.parquet", b"PAR1 no", r"a.parquet is not a readable Parquet file"),
        ("a.parquet", b"", r"a.parquet is not a readable Parquet file"),
    ],
)
def test_unusable_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts(path)


def test_damaged_parquet_page_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"text {number}" for number in range(1000)]}), path, use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet"):
        texts(path)


def test_a_record_of_many_fields_has_a_short_message(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({f"field{number}": 0 for number in range(1000)}))
    with pytest.raises(UserError, match=r"its fields: field0, .*, field19 and 980 more\.") as caught:
        texts(path)
    assert len(str(caught.value)) < 500


def test_parquet_column_that_is_absent_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"texts": ["one"], "id": [1]}), path)
    with pytest.raises(
        UserError, match=r"has no field 'text', the text; its fields: texts, id. Did you mean"
    ):
        texts(path)
    with pytest.raises(UserError, match=r"the column 'id' holds int64, not strings"):
        texts(path, field="id")


def test_parquet_strings_that_are_not_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"bad \xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a.parquet is not UTF-8 text: column 'text', rows 0 to 1"):
        texts(tmp_path / "a.parquet")


def test_missing_paths_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(UserError) as caught:
        find_source([tmp_path / "corpus.tx", tmp_path / "corpus.txt", tmp_path / "absent" / "zzz"])
    assert caught.value.messages == (
        f"no such file or folder: {tmp_path}/corpus.tx. Did you mean 'corpus.txt'?",
        f"no such file or folder: {tmp_path}/absent/zzz.",
    )
    with pytest.raises(UserError, match=r"Did you mean 'python-stdlib'\?"):
        find_source("python-stdlb")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no text, JSONL or Parquet files"):
        find_source(tmp_path)
    with pytest.raises(UserError, match="empty list"):
        find_source([])


def test_no_permission(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")

    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sources, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        texts(path)
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: Permission denied"):
        find_source(path)
