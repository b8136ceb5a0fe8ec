"""Text in, shards of tokens out: what `meshwright tokenize` does."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.engine.data import shards
from meshwright.engine.data.cache import cache_folder, making
from meshwright.engine.data.corpus_reader import BadLines, blocks, encoded, found_files
from meshwright.engine.data.megatron_files import write_stream
from meshwright.engine.faults import RunError
from meshwright.engine.fsync import sync_folder
from meshwright.engine.metrics.jsonl import log
from meshwright.errors import InputError

SHARD_TOKENS = 1 << 28  # half a GiB or one GiB
SMALL = 1 << 23  # bytes of text that are encoded sooner than processes start
NAMED = 20  # skipped lines that are named in the report


class Tokenised(msgspec.Struct, frozen=True):
    """What was made of some text."""

    folder: str
    documents: int
    tokens: int
    shards: int
    dtype: str
    text_bytes: int  # of the files, as they lie on disk
    seconds: float
    skipped: int  # lines that are no documents
    skipped_lines: list[str]  # the first of them, as file:line: reason
    empty: int  # documents without text, which were left out


class Loaded(NamedTuple):
    """A tokenizer as worker processes take it."""

    json: str
    eos: int | None
    vocab: int  # one more than its highest token
    name: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()


def tokenise(
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
) -> Tokenised:
    """Turns files and folders of text into a folder of shards, which appears when it is whole.

    With format megatron `out` is the prefix of a pair of .bin and .idx files instead.

    JSON lines and Parquet hold a document per row, in `text_column`; a plain text file is one document. The result does
    not depend on the number of workers (processes; by default one for each core).
    """
    files = found_files(inputs)
    tokenizer = load(tokenizer_folder, append_eos)
    folder = _refuse_existing(Path(out).expanduser())
    workers = (os.cpu_count() or 1) if workers is None else workers
    if format == "shards":
        return _tokenise(files, tokenizer, folder, text_column, workers, shard_tokens, bad_lines)
    for ending in (".bin", ".idx"):
        _refuse_existing(Path(f"{folder}{ending}"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        made = _tokenise(files, tokenizer, Path(scratch) / "shards", text_column, workers, shard_tokens, bad_lines)
        stream, manifest = shards.open_shards(Path(made.folder))
        write_stream(stream, folder, "uint16" if manifest.dtype == "uint16" else "int32")  # Megatron has no uint32
    return msgspec.structs.replace(made, folder=str(folder), shards=1)


def _tokenise(
    files: list[Path],
    tokenizer: Loaded,
    folder: Path,
    text_column: str,
    workers: int,
    shard_tokens: int,
    bad_lines: BadLines,
) -> Tokenised:
    begun, size = time.monotonic(), sum(path.stat().st_size for path in files)
    try:
        with _appearing(folder) as partial, _progress(size) as progress:
            given = encoded(
                blocks(files, text_column), (tokenizer.json, tokenizer.eos, text_column), _useful(workers, size)
            )
            told = _write(given, files, tokenizer, partial, shard_tokens, bad_lines, progress)
    except OSError as error:  # what cannot be read is told by its own error before
        raise RunError(
            f"the shards cannot be written: {error}",
            field="out",
            value=str(folder),
            fix=("a folder with space that can be written to (of a training: export MESHWRIGHT_CACHE=FOLDER)",),
        ) from None
    return Tokenised(
        folder=str(folder),
        documents=told.manifest.documents,
        tokens=told.manifest.tokens,
        shards=len(told.manifest.shards),
        dtype=told.manifest.dtype,
        text_bytes=size,
        seconds=time.monotonic() - begun,
        skipped=sum(source.skipped for source in told.manifest.sources),
        skipped_lines=told.skipped,
        empty=sum(source.empty for source in told.manifest.sources),
    )


def tokenised_once(path: Path, tokenizer: Any, text_column: str) -> shards.Stream:
    """The tokens of a file or folder of text, made by the first process of a machine that asks and then kept."""
    files = found_files([str(path)])
    loaded = settled(tokenizer, str(tokenizer.name_or_path))
    states = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    parts = [shards.FORMAT, shards.VERSION, states, loaded.sha256, loaded.eos, text_column]
    key = hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()
    folder = cache_folder() / "shards" / key
    if not shards.is_shards(folder):
        with making(folder):
            if not shards.is_shards(folder):
                log(f"tokenising {path} into {folder}")
                # In threads of this process: a rank of a training does not start processes of its own.
                _tokenise(files, loaded, folder, text_column, 1, SHARD_TOKENS, "refuse")
    return shards.open_shards(folder)[0]


def load(folder: str, append_eos: bool = True) -> Loaded:
    """The tokenizer of a folder (or of the local Hugging Face cache), and the token that ends documents."""
    from meshwright.engine.data.tokenizers import load_tokenizer

    return settled(load_tokenizer(folder), folder, append_eos)


def settled(found: Any, folder: str, append_eos: bool = True) -> Loaded:
    """A loaded tokenizer in the form that processes can be given."""
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            "the folder has no fast tokenizer (tokenizer.json)",
            field="tokenizer",
            value=folder,
            fix=("a folder with tokenizer.json",),
        )
    eos = found.eos_token_id if append_eos else None
    if append_eos and eos is None:
        raise InputError(
            "the tokenizer names no token that ends a document",
            field="tokenizer",
            value=folder,
            fix=("eos_token in its tokenizer_config.json", "append_eos=False: documents follow each other unmarked"),
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    return Loaded(backend.to_str(), eos, max(vocab.values(), default=0) + 1, Path(folder).name)


class _Written(NamedTuple):
    manifest: shards.Manifest
    skipped: list[str]


def _write(
    given: Iterator[Any],
    files: list[Path],
    tokenizer: Loaded,
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
        for block, tokens in given:
            for line, reason in tokens.bad:
                if bad_lines == "refuse":
                    raise _bad_line(files[block.file], line, reason)
                skipped += [f"{files[block.file]}:{line}: {reason}"] if len(skipped) < NAMED else []
            writer.add(tokens.tokens, tokens.ends)
            for name, more in (("documents", len(tokens.ends)), ("skipped", len(tokens.bad)), ("empty", tokens.empty)):
                counts[block.file][name] += more
            progress(block.file, files, block.read, len(tokens.tokens))
        writer.close()
    except BrokenProcessPool:
        raise RunError(
            "a worker process died while it tokenised, perhaps for want of memory", fix=("--workers 1",)
        ) from None
    finally:
        writer.abandon()
        given.close()  # type: ignore[attr-defined]  # a generator: ends its processes
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
        raise InputError("the files hold no text", field="inputs", value=", ".join(map(str, files)))
    shards.write_manifest(folder, manifest)
    return _Written(manifest, skipped)


def _bad_line(path: Path, line: int, reason: str) -> InputError:
    return InputError(
        f"{path}:{line}: {reason}",
        fix=("correct the line", "--skip-bad-lines (they are counted and named)", "--column NAME"),
    )


def _useful(workers: int, size: int) -> int:
    return 1 if size < SMALL else workers


def _refuse_existing(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("there is something already", field="out", value=str(folder), fix=("another --out",))
    return folder


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes its name when everything is in it and is gone when that fails."""
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this number
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_folder(partial)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _progress(size: int) -> Iterator[Any]:
    """What is told after each block; a bar where somebody looks on."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("tokenising"),
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

        def tell(file: int, files: list[Path], read: int, more: int) -> None:
            nonlocal tokens
            tokens += more
            while before[0] < file:
                before[1] += files[before[0]].stat().st_size
                before[0] += 1
            bar.update(task, completed=before[1] + read, tokens=tokens)

        yield tell
