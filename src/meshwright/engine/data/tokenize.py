"""Tokenizes text into shards (`meshwright tokenize`)."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.display import plural
from meshwright.engine.data import shards
from meshwright.engine.data.cache import cache_folder, cache_lock
from meshwright.engine.data.corpus_reader import (
    DESCRIPTIONS,
    SUFFIXES,
    BadLines,
    blocks,
    encode_blocks,
    find_text_files,
    split_in,
)
from meshwright.engine.data.files import longest_suffix
from meshwright.engine.data.megatron_files import write_stream
from meshwright.engine.data.missing_column import columns_meant, is_missing_column
from meshwright.engine.data.tokenizers import eos_fix
from meshwright.engine.faults import RunError
from meshwright.engine.fsync import atomic_folder, require_empty
from meshwright.engine.metrics.jsonl import log
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.recipes.types import Documents

SHARD_TOKENS = 1 << 28  # 0.5 GiB as uint16, 1 GiB as uint32
PARALLEL_BYTES = 1 << 23  # less text is encoded faster than worker processes start
MAX_SKIPPED_SHOWN = 20  # skipped lines listed in the result


class TokenizeResult(msgspec.Struct, frozen=True):
    """Summary of a tokenization."""

    folder: str
    documents: int
    tokens: int
    shards: int
    dtype: str
    text_bytes: int  # of the input files on disk
    seconds: float
    skipped: int  # lines that could not be parsed
    skipped_lines: list[str]  # the first of them, as "file:line: reason"
    empty: int  # documents without text, left out


class SerializedTokenizer(NamedTuple):
    """A tokenizer in a form that can be sent to worker processes."""

    json: str
    eos: int | None
    vocab: int  # highest token id + 1
    name: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()


def tokenize(
    inputs: Sequence[str],
    tokenizer_folder: str,
    out: str,
    *,
    text_column: str = "text",
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    bad_lines: BadLines = "refuse",
    append_eos: bool = True,
    format: Literal["shards", "megatron"] = "shards",
    documents: Documents = "auto",
) -> TokenizeResult:
    """Tokenize files and folders of text into a shard folder, which is renamed into place once complete.

    With format megatron, `out` is the prefix of a pair of .bin and .idx files instead.

    JSON lines and Parquet have one document per row, in `text_column`; `documents` says where documents of a plain text
    file end (see data.documents). The result does not depend on the number of worker processes (default: one per core).
    """
    files = find_text_files(inputs)
    tokenizer = load_serialized(tokenizer_folder, append_eos)
    folder = Path(out).expanduser()
    require_empty(folder)
    workers = (os.cpu_count() or 1) if workers is None else workers
    if format == "shards":
        return _tokenize_files(files, tokenizer, folder, text_column, workers, shard_tokens, bad_lines, documents)
    for ending in (".bin", ".idx"):
        require_empty(Path(f"{folder}{ending}"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        result = _tokenize_files(
            files, tokenizer, Path(scratch) / "shards", text_column, workers, shard_tokens, bad_lines, documents
        )
        stream, manifest = shards.open_shards(Path(result.folder))
        write_stream(stream, folder, "uint16" if manifest.dtype == "uint16" else "int32")  # Megatron has no uint32
    return msgspec.structs.replace(result, folder=str(folder), shards=1)


def _tokenize_files(
    files: list[Path],
    tokenizer: SerializedTokenizer,
    folder: Path,
    text_column: str,
    workers: int,
    shard_tokens: int,
    bad_lines: BadLines,
    documents: Documents,
) -> TokenizeResult:
    started, size = time.monotonic(), sum(path.stat().st_size for path in files)
    try:
        with atomic_folder(folder) as partial, _progress(size) as progress:
            encoded_blocks = encode_blocks(
                blocks(files, text_column, documents),
                (tokenizer.json, tokenizer.eos, text_column),
                _useful_workers(workers, size),
            )
            written = _write(encoded_blocks, files, tokenizer, partial, shard_tokens, bad_lines, progress)
    except OSError as error:  # unreadable inputs raise InputError earlier
        raise RunError(
            f"the shards cannot be written: {error}",
            field="out",
            value=str(folder),
            fix=("choose a writable folder with free space (for training: export MESHWRIGHT_CACHE=FOLDER)",),
        ) from None
    return TokenizeResult(
        folder=str(folder),
        documents=written.manifest.documents,
        tokens=written.manifest.tokens,
        shards=len(written.manifest.shards),
        dtype=written.manifest.dtype,
        text_bytes=size,
        seconds=time.monotonic() - started,
        skipped=sum(source.skipped for source in written.manifest.sources),
        skipped_lines=written.skipped,
        empty=sum(source.empty for source in written.manifest.sources),
    )


def tokenize_cached(path: Path, tokenizer: Any, text_column: str, documents: Documents = "auto") -> shards.Stream:
    """Return the tokens of a text file or folder; the first process of a node tokenizes and caches them."""
    files = find_text_files([str(path)])
    loaded = serialize_tokenizer(tokenizer, str(tokenizer.name_or_path))
    states = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    parts = [shards.FORMAT, shards.VERSION, states, loaded.sha256, loaded.eos, text_column, documents]
    key = hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
    folder = cache_folder() / "shards" / key
    if not shards.is_shard_folder(folder):
        with cache_lock(folder):
            if not shards.is_shard_folder(folder):
                log(f"tokenizing {path} into {folder}")
                # In threads of this process: a training rank does not start processes.
                _tokenize_files(files, loaded, folder, text_column, 1, SHARD_TOKENS, "refuse", documents)
    stream, manifest = shards.open_shards(folder)
    if any(longest_suffix(file, SUFFIXES).startswith(".txt") for file in files):
        note(f"{path}: {plural(manifest.documents, 'document')} ({described(files, documents)}; data.documents)")
    return stream


def described(files: Sequence[Path], documents: Documents) -> str:
    """Describe where the documents of text files end."""
    found = {split_in(file, documents) for file in files if longest_suffix(file, SUFFIXES).startswith(".txt")}
    return " and ".join(sorted(DESCRIPTIONS[one] for one in found))


def load_serialized(folder: str, append_eos: bool = True) -> SerializedTokenizer:
    """Load and serialize the tokenizer of a folder or of the local Hugging Face cache."""
    from meshwright.engine.data.tokenizers import FIELD, load_tokenizer

    try:
        return serialize_tokenizer(load_tokenizer(folder), folder, append_eos)
    except InputError as error:
        if error.field != FIELD:
            raise
        fix = [
            one.replace(f"{FIELD}=", "--tokenizer ") for one in error.fix
        ]  # the field of a training is an option here
        raise InputError(error.reason, "--tokenizer", folder, fix) from None


def serialize_tokenizer(tokenizer: Any, folder: str, append_eos: bool = True) -> SerializedTokenizer:
    """Serialize a loaded tokenizer for worker processes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            "the folder has no fast tokenizer (tokenizer.json)",
            field="tokenizer",
            value=folder,
            fix=("use a folder with tokenizer.json",),
        )
    eos = tokenizer.eos_token_id if append_eos else None
    if append_eos and eos is None:
        raise InputError(
            "the tokenizer has no eos_token to end documents with",
            field="tokenizer",
            value=folder,
            fix=(eos_fix(folder),),
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    return SerializedTokenizer(backend.to_str(), eos, max(vocab.values(), default=0) + 1, Path(folder).name)


class _Written(NamedTuple):
    manifest: shards.Manifest
    skipped: list[str]


def _write(
    encoded_blocks: Iterator[Any],
    files: list[Path],
    tokenizer: SerializedTokenizer,
    folder: Path,
    shard_tokens: int,
    bad_lines: BadLines,
    progress: Any,
) -> _Written:
    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writer = shards.ShardWriter(folder, dtype, shard_tokens)
    counts = [{"documents": 0, "skipped": 0, "empty": 0} for _ in files]
    skipped: list[str] = []
    try:
        for block, tokens in encoded_blocks:
            for line, reason in tokens.bad:
                if bad_lines == "refuse":
                    raise BadLineError(files[block.file], line, reason)
                skipped += [f"{files[block.file]}:{line}: {reason}"] if len(skipped) < MAX_SKIPPED_SHOWN else []
            writer.add(tokens.tokens, tokens.ends)
            for name, count_ in (
                ("documents", len(tokens.ends)),
                ("skipped", len(tokens.bad)),
                ("empty", tokens.empty),
            ):
                counts[block.file][name] += count_
            progress(block.file, files, block.read, len(tokens.tokens))
        writer.close()
    except BrokenProcessPool:
        raise RunError("a tokenizer worker process died, possibly out of memory", fix=("--workers 1",)) from None
    finally:
        writer.abandon()
        encoded_blocks.close()  # type: ignore[attr-defined]  # closing the generator ends its processes
    manifest = shards.Manifest(
        dtype=dtype,
        tokens=sum(shard.tokens for shard in writer.shards),
        documents=sum(count["documents"] for count in counts),
        max_token=writer.max_token,
        eos=tokenizer.eos,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab=tokenizer.vocab,
        sources=[
            shards.SourceFile(str(path), path.stat().st_size, **count)
            for path, count in zip(files, counts, strict=True)
        ],
        shards=writer.shards,
    )
    if not manifest.tokens:
        raise InputError("the files contain no text", field="inputs", value=", ".join(map(str, files)))
    shards.write_manifest(folder, manifest)
    return _Written(manifest, skipped)


class BadLineError(InputError):
    """A line that is no document."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        missing = is_missing_column(reason)
        column = [f"--column {one}" for one in columns_meant(reason)] if missing else []
        fix = [*column, "correct the line", "--skip-bad-lines (they are counted and listed)"]
        if missing and line == 1:  # so have the others, probably
            chats = f"train with --goal sft --dataset {shlex.quote(str(path))}, if its rows are conversations"
            fix = [*(column or ["--column COLUMN"]), chats]
        super().__init__(f"{path}:{line}: {reason}", fix=fix)


def _useful_workers(workers: int, size: int) -> int:
    return 1 if size < PARALLEL_BYTES else workers


@contextmanager
def _progress(size: int) -> Iterator[Any]:
    """Yield a progress callback; show a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=size, tokens=0)
        tokens = 0
        before = [0, 0]  # files done, their bytes

        def update(file: int, files: list[Path], read: int, count_: int) -> None:
            nonlocal tokens
            tokens += count_
            while before[0] < file:
                before[1] += files[before[0]].stat().st_size
                before[0] += 1
            bar.update(task, completed=before[1] + read, tokens=tokens)

        yield update
