import errno
import importlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fourfold.data import ByteTokenizer, TokenFile, find_source, prepare
from fourfold.errors import UserError

prepare_module = importlib.import_module("fourfold.data.prepare")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_documents(folder: Path, count: int) -> Path:
    """Write documents that say their number; their order is that of the names."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"document {number}\n")
    return folder


def documents(file: TokenFile) -> list[str]:
    parts = np.split(file.tokens, file.document_starts[1:])
    assert all(part[-1] == file.end_of_text for part in parts)
    return [ByteTokenizer().decode(part) for part in parts]


def test_every_kth_document_is_held_out(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    prepared = prepare(source, "bytes", 0.1, cache=cache)
    assert documents(prepared.held_out) == ["document 9\n", "document 19\n"]
    assert documents(prepared.train) == [f"document {i}\n" for i in range(25) if i not in (9, 19)]
    assert prepared.train.source == f"{source} (training part)"
    assert prepared.held_out.source == f"{source} (held-out part)"


def test_few_documents_give_their_ends(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"line {number:03}\n" for number in range(100)))
    prepared = prepare(tmp_path / "corpus.txt", "bytes", 0.05, cache=cache)
    assert documents(prepared.held_out) == ["".join(f"line {number:03}\n" for number in range(95, 100))]
    assert documents(prepared.train) == ["".join(f"line {number:03}\n" for number in range(95))]


def test_text_without_line_ends_is_cut_too(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "corpus.txt").write_text("abcdefghij")
    prepared = prepare(tmp_path / "corpus.txt", "bytes", 0.3, cache=cache)
    assert (documents(prepared.train), documents(prepared.held_out)) == (["abcdefg"], ["hij"])


@pytest.mark.parametrize(("text", "message"), [("", "is empty: no document"), ("a", "holds too little text")])
def test_no_text_for_both_parts(tmp_path: Path, cache: Path, text: str, message: str) -> None:
    (tmp_path / "corpus.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "corpus.txt", "bytes", cache=cache)
    assert not list(cache.rglob("*.tokens")) + list(cache.rglob("*.partial"))


@pytest.mark.parametrize("held_out", [0, -0.1, 0.51, 1, float("nan")])
def test_fraction_out_of_range(tmp_path: Path, cache: Path, held_out: float) -> None:
    with pytest.raises(UserError, match=r"held_out=.* must be above 0 and at most 0.5"):
        prepare(tmp_path, "bytes", held_out, cache=cache)


def test_batches_do_not_change_the_result(tmp_path: Path, monkeypatch) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    whole = prepare(source, "bytes", 0.1, cache=tmp_path / "a")
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 30)
    parts = prepare(source, "bytes", 0.1, cache=tmp_path / "b")
    assert whole.train.path.read_bytes() == parts.train.path.read_bytes()
    assert whole.held_out.path.read_bytes() == parts.held_out.path.read_bytes()


def test_second_call_reads_the_cache(tmp_path: Path, cache: Path, monkeypatch) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    first = prepare(source, "bytes", cache=cache)
    monkeypatch.setattr(prepare_module, "_write", None)
    assert prepare(source, "bytes", cache=cache).train.path == first.train.path


def test_key_follows_all_that_the_files_depend_on(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    paths = {prepare(source, "bytes", 0.05, cache=cache).train.path}
    paths.add(prepare(source, "bytes", 0.1, cache=cache).train.path)
    paths.add(prepare(source, "bytes", 0.05, field="content", cache=cache).train.path)
    os.utime(source / "003.txt", ns=(1, 1))
    paths.add(prepare(source, "bytes", 0.05, cache=cache).train.path)
    (source / "004.txt").write_text("more text\n")
    prepared = prepare(source, "bytes", 0.05, cache=cache)
    assert "more text\n" in documents(prepared.train)
    assert len(paths | {prepared.train.path}) == 5


def test_damaged_cache_is_prepared_anew(tmp_path: Path, cache: Path, caplog) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    path = prepare(source, "bytes", cache=cache).train.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert prepare(source, "bytes", cache=cache).train.path.read_bytes() == whole
    assert "is damaged" in caplog.text


def test_cache_folder_of_the_environment(tmp_path: Path, cache: Path, monkeypatch) -> None:
    source = write_documents(tmp_path / "corpus", 3)
    monkeypatch.setenv("FOURFOLD_CACHE", str(cache))
    assert prepare(source, "bytes").train.path.is_relative_to(cache)
    monkeypatch.delenv("FOURFOLD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(source, "bytes").train.path.is_relative_to(tmp_path / "home" / ".cache" / "fourfold")


def test_progress_ends_at_the_whole(tmp_path: Path, cache: Path, monkeypatch) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 60)
    calls: list[tuple[int, int]] = []
    prepare(source, "bytes", cache=cache, progress=lambda *numbers: calls.append(numbers))
    total = find_source(source).total_bytes
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert len(calls) > 4
    assert calls == sorted(calls)


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    source = write_documents(tmp_path / "corpus", 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot keep token files in .*/file/cache: .*set FOURFOLD_CACHE"):
        prepare(source, "bytes", cache=tmp_path / "file" / "cache")


def test_full_disk(tmp_path: Path, cache: Path, monkeypatch) -> None:
    source = write_documents(tmp_path / "corpus", 3)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(importlib.import_module("fourfold.data.tokens").os, "fsync", refuse)
    with pytest.raises(
        UserError, match=r"in .*/cache: No space left on device: free some space, or set FOURFOLD"
    ):
        prepare(source, "bytes", cache=cache)
    assert not list(cache.rglob("*.tokens")) + list(cache.rglob("*.partial"))


class Slow(ByteTokenizer):
    """Bytes, a second for each batch."""

    def __init__(self):
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        time.sleep(1)
        return super().encode_batch(texts)


def test_second_caller_waits_and_sees_the_progress_of_the_first(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    slow = Slow()
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor() as threads:
        first = threads.submit(prepare, source, slow, cache=cache)
        while slow.calls == 0:
            time.sleep(0.01)
        second = threads.submit(prepare, source, slow, cache=cache, progress=lambda *call: seen.append(call))
    assert first.result().train.path == second.result().train.path
    assert slow.calls == 1
    assert seen[0] == (0, find_source(source).total_bytes)


PREPARE_FOR_EVER = """
import sys, time
from fourfold.data import ByteTokenizer, prepare

class Stuck(ByteTokenizer):
    def encode_batch(self, texts):
        print("started", flush=True)
        time.sleep(100)

prepare(sys.argv[1], Stuck(), cache=sys.argv[2])
"""


def test_stuck_process_is_named_and_a_killed_one_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch, caplog
) -> None:
    source = write_documents(tmp_path / "corpus", 25)
    command = [sys.executable, "-c", PREPARE_FOR_EVER, str(source), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        monkeypatch.setattr(prepare_module, "WAIT_SECONDS", 0.3)
        monkeypatch.setattr(prepare_module, "MESSAGE_SECONDS", 0.1)
        with pytest.raises(UserError, match=rf"waited 0.3 s for process {process.pid} on "):
            prepare(source, "bytes", cache=cache)
        process.kill()
    assert f"waiting for process {process.pid}" in caplog.text
    assert len(list(cache.rglob("*.partial"))) == 2
    prepared = prepare(source, "bytes", cache=cache)
    assert sorted(os.listdir(prepared.train.path.parent)) == ["held_out.tokens", "lock", "train.tokens"]


def test_lock_says_who_holds_it(tmp_path: Path, cache: Path) -> None:
    source = write_documents(tmp_path / "corpus", 3)
    prepared = prepare(source, "bytes", cache=cache)
    owner = json.loads((prepared.train.path.parent / "lock").read_text())
    assert (owner["pid"], owner["done_bytes"]) == (os.getpid(), owner["total_bytes"])


def test_standard_library(cache: Path) -> None:
    prepared = prepare("python-stdlib", "bytes", cache=cache)
    tokens = prepared.train.num_tokens + prepared.held_out.num_tokens
    assert tokens > 5e6
    assert 0.01 < prepared.held_out.num_tokens / tokens < 0.04
    assert "def " in ByteTokenizer().decode(prepared.held_out.tokens[:20000])
