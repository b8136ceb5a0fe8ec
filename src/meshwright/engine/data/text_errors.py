"""Finds the lines of text that a pretraining refuses, all in one pass, without a tokenizer and without torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from meshwright.engine.data.corpus_reader import NO_COLUMN, SUFFIXES, Block, blocks, documents_in, find_text_files
from meshwright.engine.data.files import FIELD, longest_suffix
from meshwright.engine.data.megatron_files import megatron_prefix
from meshwright.engine.data.row_errors import SHOWN_ERRORS, without_rows
from meshwright.engine.data.shards import is_shard_folder
from meshwright.errors import InputError, some
from meshwright.recipes.types import Data

READ_BYTES = 32 << 20  # of a dataset's text that are read for an answer that should be instant


def is_text_to_tokenize(path: Path) -> bool:
    """Return whether a dataset is text files, not tokens."""
    if megatron_prefix(path) is not None or is_shard_folder(path):
        return False
    return path.is_dir() or (path.is_file() and bool(longest_suffix(path, SUFFIXES)))


def bad_lines(path: Path, data: Data) -> list[str]:
    """Return the location and reason of every line of a dataset's first texts that is not a document."""
    files, found, read = find_text_files([str(path)]), list[str](), 0
    column = text_column(data)
    for block in blocks(files, column, data.documents):
        bad: list[tuple[int, str]] = []
        for _ in documents_in(block, column, bad):
            pass
        found += [f"{files[block.file]}:{line}: {reason}" for line, reason in bad]
        read += _size(block)
        if read >= READ_BYTES:
            break
    return found


def bad_lines_error(lines: Sequence[str], path: Path, data: Data, field: str = FIELD) -> InputError:
    """Return the error of lines that are not documents, with what leaves them out or reads them."""
    if f": {NO_COLUMN}" in lines[0]:
        fix: tuple[str, ...] = ("data.columns.text=COLUMN", "--goal sft or --goal peft, if its rows are conversations")
    else:  # in a folder, the file without them would be read too
        fix = without_rows(lines) if path.is_file() else ()
    reason = some(lines, 1 + SHOWN_ERRORS, "; ")
    return InputError(reason, field=field, value=str(path), fix=(*fix, _skipping(path, data)))


def text_column(data: Data) -> str:
    """Return the column of the documents in files of rows."""
    return data.columns.get("text", "text")


def _skipping(path: Path, data: Data) -> str:
    words = ["meshwright", "tokenize", str(path), "--tokenizer", data.tokenizer or "FOLDER", "--out", "TOKENS"]
    column = ["--column", text_column(data)] if "text" in data.columns else []
    return shlex.join([*words, *column, "--skip-bad-lines"])


def _size(block: Block) -> int:
    if isinstance(block.data, bytes):
        return len(block.data)
    return sum(len(one) for one in block.data if isinstance(one, str))
