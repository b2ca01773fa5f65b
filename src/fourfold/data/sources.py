"""Where the text comes from: the standard library, text files, JSONL, Parquet, and folders of them."""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import UserError, nearest

PYTHON_STDLIB = "python-stdlib"
"""Name of the default corpus: the source code of the standard library of the running interpreter."""

LONGEST_DOCUMENT_BYTES = 2**26
"""A text file longer than this is read as several documents, cut at line ends."""

BINARY_CHECK_BYTES = 8192
"""A file with a zero byte among its first bytes is binary (the rule of git)."""

FIELDS_SHOWN = 20
"""Of a record without the text field, this many of its fields are named."""

SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")
"""Folders that are passed over: compiled and installed Python."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, with what tells whether it has changed."""

    path: Path
    size_bytes: int
    modified_nanoseconds: int
    found: bool = False
    """Whether it was found in a folder, instead of named by the user: then it may be binary."""
    lenient: bool = False
    """Whether it may be no UTF-8 text."""


@dataclass(frozen=True)
class Source:
    """A corpus: files in a fixed order, each of which holds documents.

    `name` is what the user asked for. `field` is the JSONL field or Parquet column with the text.
    """

    name: str
    files: tuple[SourceFile, ...]
    field: str

    @property
    def total_bytes(self) -> int:
        """Size of all files on disk in bytes."""
        return sum(file.size_bytes for file in self.files)

    def documents(self) -> Iterator[tuple[str, int]]:
        """Yield each document with the number of bytes of the source read so far.

        Documents without text (empty, or null in JSONL and Parquet) are passed over. Raises UserError, with
        the file and the line or row, for a file that cannot be read.
        """
        read_bytes = 0
        for file in self.files:
            reader = _reader(file.path)
            try:
                for text, position_bytes in reader(file, self.field):
                    if text:
                        yield text, read_bytes + position_bytes
            except _NotTextError as error:
                if not file.lenient:
                    raise UserError(f"{file.path} is not UTF-8 text: {error}") from None
            read_bytes += file.size_bytes


class _NotTextError(Exception):
    """Bytes that are not UTF-8; the message says where in the file."""


def find_source(source: str | Path | Sequence[str | Path], *, field: str = "text") -> Source:
    """Return the files of a corpus without reading them.

    `source` is `python-stdlib`, a file, a folder (read recursively), or several of these. Files named
    `.jsonl`, `.ndjson` (also with `.gz`) and `.parquet` are records with the text in `field`; any other file
    is one document of UTF-8 text. A folder that holds records stands for these alone, otherwise for its text
    files. In folders, hidden and binary files and `SKIPPED_FOLDERS` are passed over, and in the standard
    library files that are not UTF-8. Raises UserError with all paths that are missing, unreadable or empty.
    """
    paths = [source] if isinstance(source, str | Path) else list(source)
    if not paths:
        raise UserError("the corpus is an empty list: give python-stdlib, a file or a folder")
    found: list[SourceFile] = []
    problems: list[str] = []
    for path in paths:
        try:
            with _reading(Path(path)):
                standard_library = path == PYTHON_STDLIB
                found.extend(_standard_library() if standard_library else _files_of(Path(path).expanduser()))
        except UserError as error:
            problems.extend(error.messages)
    if problems:
        raise UserError(*problems)
    return Source(", ".join(str(path) for path in paths), tuple(found), field)


def _standard_library() -> list[SourceFile]:
    """Return the .py files of the standard library in order, without installed packages."""
    paths = [path for path in _walk(Path(sysconfig.get_path("stdlib"))) if path.suffix == ".py"]
    if not paths:
        raise UserError("this Python has no standard library source on disk: give text files of your own")
    return [_source_file(path, lenient=True) for path in paths]


def _files_of(path: Path) -> list[SourceFile]:
    """Return the files that one path of the user stands for."""
    if not path.exists():
        hint = nearest(path.name, [PYTHON_STDLIB, *_names_in(path.parent)])
        raise UserError(f"no such file or folder: {path}.{hint}")
    if not path.is_dir():
        return [_source_file(path)]
    paths = _walk(path)
    records = [inside for inside in paths if _reader(inside) is not _read_text]
    files = [_source_file(inside, found=True) for inside in records or paths]
    if not files:
        raise UserError(f"the folder {path} holds no text, JSONL or Parquet files")
    return files


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder, or none where it cannot be listed."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _walk(folder: Path) -> list[Path]:
    """Return the visible files below a folder, sorted by path, without compiled and installed Python."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        paths.extend(Path(parent, name) for name in names if not name.startswith("."))
    return sorted(path for path in paths if path.is_file())


def _source_file(path: Path, *, found: bool = False, lenient: bool = False) -> SourceFile:
    """Return the file with its size and time of change."""
    status = path.stat()
    return SourceFile(path, status.st_size, status.st_mtime_ns, found, lenient)


Reader = Callable[[SourceFile, str], Iterator[tuple[str, int]]]
"""Yields (text, bytes of the file read so far)."""


def _reader(path: Path) -> Reader:
    """Return how a file of this name is read."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        return _read_jsonl
    return _read_parquet if path.name.lower().endswith(".parquet") else _read_text


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the operating system and gzip say about a file into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot read {path}: {reason}") from error


def _decode(raw: bytes, first_line: int) -> str:
    """Return UTF-8 bytes as text; `first_line` is the number of their first line in the file."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise _NotTextError(f"line {line} holds the byte 0x{raw[error.start]:02x}") from None


def _read_text(file: SourceFile, field: str) -> Iterator[tuple[str, int]]:
    """Yield a text file as one document, or as several where it is very long."""
    with _reading(file.path), open(file.path, "rb") as stream:
        if file.found and b"\0" in stream.read(BINARY_CHECK_BYTES):
            return
        stream.seek(0)
        first_line = 1
        while raw := stream.read(LONGEST_DOCUMENT_BYTES):
            raw += stream.readline()
            text = _decode(raw, first_line)
            first_line += raw.count(b"\n")
            yield text.removeprefix("\ufeff"), stream.tell()


def _read_jsonl(file: SourceFile, field: str) -> Iterator[tuple[str, int]]:
    """Yield the text field of each line; blank lines are passed over."""
    with _reading(file.path), open(file.path, "rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if file.path.suffix.lower() == ".gz" else raw
        for number, line in enumerate(lines, start=1):
            text = _decode(line, number).removeprefix("\ufeff")
            if not text.isspace():
                yield _text_field(text, field, f"{file.path} line {number}"), raw.tell()


def _text_field(line: str, field: str, place: str) -> str:
    """Return the text field of one JSON line, empty where it is null."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f'{place} is not a JSON object: a line must look like {{"{field}": "..."}}')
    if field not in record:
        raise UserError(_missing_field(place, field, list(record)))
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{place}: the field '{field}' is not a string but {json.dumps(text)[:40]}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: the field '{field}' is not valid Unicode: {error.reason}") from None
    return text


def _missing_field(place: str, field: str, fields: list[str]) -> str:
    """Return the message for a record without the text field."""
    there = ", ".join(fields[:FIELDS_SHOWN]) or "none"
    if len(fields) > FIELDS_SHOWN:
        there += f" and {len(fields) - FIELDS_SHOWN} more"
    return f"{place} has no field '{field}', the text; its fields: {there}.{nearest(field, fields)}"


def _read_parquet(file: SourceFile, field: str) -> Iterator[tuple[str, int]]:
    """Yield the text column of a Parquet file, read in batches of rows."""
    import pyarrow  # here, since the other sources do not need it and it is slow to import
    import pyarrow.parquet

    try:
        with _reading(file.path), pyarrow.parquet.ParquetFile(file.path) as table:
            columns = table.schema_arrow
            if field not in columns.names:
                raise UserError(_missing_field(str(file.path), field, columns.names))
            if not _is_text(pyarrow, columns.field(field).type):
                kind = columns.field(field).type
                raise UserError(f"{file.path}: the column '{field}' holds {kind}, not strings")
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                try:
                    texts = batch.column(0).to_pylist()
                except UnicodeDecodeError:
                    raise _NotTextError(
                        f"column '{field}', rows {row} to {row + batch.num_rows - 1}"
                    ) from None
                row += batch.num_rows
                position_bytes = file.size_bytes * row // table.metadata.num_rows
                yield from ((text or "", position_bytes) for text in texts)
    except pyarrow.ArrowException as error:
        raise UserError(f"{file.path} is not a readable Parquet file: {error}") from error


def _is_text(pyarrow: Any, kind: Any) -> bool:
    """Return whether a column of this Arrow type holds strings."""
    types = pyarrow.types
    value = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
