"""A corpus becomes two token files, for training and held out, once for each source and tokenizer."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fourfold.data.sources import Source, find_source
from fourfold.data.tokenizers import Tokenizer, load_tokenizer
from fourfold.data.tokens import VERSION, TokenFile, TokenWriter
from fourfold.errors import UserError

Progress = Callable[[int, int], None]
"""Called with the bytes of the corpus tokenized so far, and all its bytes."""

BATCH_CHARACTERS = 2**22
"""Texts are tokenized together until they have this many characters ..."""
BATCH_DOCUMENTS = 4096
"""... or there are this many."""

POLL_SECONDS = 0.1
MESSAGE_SECONDS = 30.0
WAIT_SECONDS = 24 * 3600.0
"""How long a process waits for another one that prepares the same corpus."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The token files of a corpus."""

    train: TokenFile
    held_out: TokenFile


def prepare(
    source: str | Path | Sequence[str | Path],
    tokenizer: str | Path | Tokenizer,
    held_out: float = 0.02,
    *,
    field: str = "text",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenize a corpus, or find it in the cache, and return its token files.

    About the fraction `held_out` of the corpus is kept for evaluation: whole documents, every k-th one with
    k = 1/held_out, or the end of each document where there are fewer than k of them. `field` is the JSONL
    field or Parquet column with the text.

    The files lie in `cache`, else `$FOURFOLD_CACHE`, else `~/.cache/fourfold`, under a key of the paths,
    sizes and times of the source's files and of the arguments. Of several processes that need the same files
    one prepares them and the others wait; call it outside of any collective. Raises UserError for what is
    wrong with the source, the tokenizer, the fraction or the cache folder.
    """
    if not 0 < held_out <= 0.5:
        raise UserError(f"held_out={held_out} must be above 0 and at most 0.5, the fraction for evaluation")
    found = find_source(source, field=field)
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    root = Path(cache or os.environ.get("FOURFOLD_CACHE") or "~/.cache/fourfold").expanduser()
    folder = root / _key(found, loaded, held_out)
    report = progress or (lambda done_bytes, total_bytes: None)
    with _writable(root):
        if (prepared := _finished(folder)) is not None:
            return prepared
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock", report) as publish:
            # Another process may have finished it between the look above and now.
            if (prepared := _finished(folder)) is None:
                _write(found, loaded, held_out, folder, publish)
                prepared = _finished(folder)
    assert prepared is not None, f"no token files in {folder} after writing them"
    return prepared


def _key(source: Source, tokenizer: Tokenizer, held_out: float) -> str:
    """Return the name of a corpus in the cache: a hash of all that its token files depend on."""
    files = [(str(file.path.absolute()), file.size_bytes, file.modified_nanoseconds) for file in source.files]
    content = [VERSION, files, source.field, tokenizer.fingerprint, held_out]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _finished(folder: Path) -> Prepared | None:
    """Return the token files of a folder, or None where they are absent or unusable."""
    train, held_out = folder / "train.tokens", folder / "held_out.tokens"
    if not (train.exists() and held_out.exists()):
        return None
    try:
        return Prepared(TokenFile(train), TokenFile(held_out))
    except UserError as error:
        logger.warning("%s; preparing the corpus anew", error)
        return None


def _write(source: Source, tokenizer: Tokenizer, held_out: float, folder: Path, progress: Progress) -> None:
    """Tokenize a source into the two files of a folder."""
    for leftover in folder.glob("*.partial"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    total_bytes = source.total_bytes
    with ExitStack() as stack:
        train, kept = (
            stack.enter_context(
                TokenWriter(
                    folder / f"{name}.tokens",
                    vocab_size=tokenizer.vocab_size,
                    end_of_text=tokenizer.end_of_text,
                    source=f"{source.name} ({part})",
                )
            )
            for name, part in (("train", "training part"), ("held_out", "held-out part"))
        )
        progress(0, total_bytes)
        for batch in _batches(_split(source, held_out)):
            ids = tokenizer.encode_batch([text for text, _, _ in batch])
            parts: tuple[list, list] = ([], [])
            for document, (_, is_held_out, _) in zip(ids, batch, strict=True):
                parts[is_held_out].append(document)
            train.append(parts[False])
            kept.append(parts[True])
            progress(batch[-1][2], total_bytes)
        if train.num_tokens == 0 or kept.num_tokens == 0:
            raise UserError(
                f"the corpus {source.name} holds too little text to keep held_out={held_out} of it apart: "
                "give more text"
            )
        progress(total_bytes, total_bytes)


Piece = tuple[str, bool, int]
"""Text, whether it is held out, bytes of the source read so far."""


def _split(source: Source, held_out: float) -> Iterator[Piece]:
    """Yield the documents for training and held out, spread evenly over the source."""
    every = round(1 / held_out)
    count = sum(1 for _ in islice(source.documents(), every))
    if count == 0:
        raise UserError(f"the corpus {source.name} is empty: no document in it has any text")
    for index, (text, done_bytes) in enumerate(source.documents()):
        if count == every:
            yield text, index % every == every - 1, done_bytes
        else:
            cut = _cut(text, held_out)
            yield text[:cut], False, done_bytes
            yield text[cut:], True, done_bytes


def _cut(text: str, held_out: float) -> int:
    """Return where the held-out end of a text starts: after a line end if one is near."""
    cut = len(text) - max(1, round(len(text) * held_out))
    return text.rfind("\n", max(0, 2 * cut - len(text)), cut) + 1 or cut


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group pieces with text so that tokenizing many of them is one call."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        if not piece[0]:
            continue
        batch.append(piece)
        characters += len(piece[0])
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Turn errors of the file system into a UserError that names the cache folder and the way out."""
    try:
        yield
    except OSError as error:
        advice = "set FOURFOLD_CACHE to another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space, or set FOURFOLD_CACHE to a folder with room"
        raise UserError(f"cannot keep token files in {root}: {error.strerror}: {advice}") from error


# [Note: one process prepares]
# The lock is the kernel's (flock) on a file that says who holds it and how far it is. It goes when its
# process ends, however it ends, so it is never stale. Waiters look at the file, never at a collective: no
# process group can time out meanwhile.
@contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[Progress]:
    """Hold the lock of a folder; yield a progress callback that also tells the waiting processes.

    While another process holds it, `progress` is called with the numbers of that one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait_for_lock(descriptor, path, progress)
        owner = {"pid": os.getpid(), "host": socket.gethostname()}

        def publish(done_bytes: int, total_bytes: int) -> None:
            content = json.dumps(owner | {"done_bytes": done_bytes, "total_bytes": total_bytes})
            os.pwrite(descriptor, content.encode().ljust(256), 0)
            progress(done_bytes, total_bytes)

        yield publish
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path, progress: Progress) -> None:
    """Take the lock, waiting for as long as another process holds it."""
    start = last_message = time.monotonic()
    while not _try_lock(descriptor):
        owner = _read_owner(descriptor)
        now = time.monotonic()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, which prepares the same corpus"
        if now - start > WAIT_SECONDS:
            raise UserError(f"waited {WAIT_SECONDS:g} s for {who} ({path}): end it, or start again")
        if now - last_message > MESSAGE_SECONDS:
            logger.warning("waiting for %s", who)
            last_message = now
        if "total_bytes" in owner:
            progress(owner["done_bytes"], owner["total_bytes"])
        time.sleep(POLL_SECONDS)


def _try_lock(descriptor: int) -> bool:
    """Take the lock if no process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(descriptor: int) -> dict:
    """Return what the holder of the lock wrote about itself."""
    try:
        owner = json.loads(os.pread(descriptor, 256, 0))
    except ValueError:  # it has just been created
        return {}
    return owner if isinstance(owner, dict) else {}
