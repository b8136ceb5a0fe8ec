"""Finds the lines of text that a pretraining refuses, all in one pass, without a tokenizer and without torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.engine.data.corpus_reader import SUFFIXES, Block, blocks, documents_in, find_text_files
from meshwright.engine.data.files import FIELD, longest_suffix
from meshwright.engine.data.megatron_files import megatron_prefix
from meshwright.engine.data.missing_column import MissingColumnError, columns_meant, is_missing_column
from meshwright.engine.data.row_errors import SHOWN_ERRORS, without_rows
from meshwright.engine.data.shards import is_shard_folder
from meshwright.errors import InputError, some
from meshwright.recipes.types import Data

_LINE = re.compile(r":(\d+): has no")
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
    for block in _blocks(files, column, data, found):
        bad: list[tuple[int, str]] = []
        for _ in documents_in(block, column, bad):
            pass
        found += [f"{files[block.file]}:{line}: {reason}" for line, reason in bad]
        read += _size(block)
        if read >= READ_BYTES:
            break
    return found


def _blocks(files: Sequence[Path], column: str, data: Data, found: list[str]) -> Iterator[Block]:
    """Yield the blocks up to a table without the column, which is added to what is wrong."""
    try:
        yield from blocks(files, column, data.documents)
    except MissingColumnError as error:
        found.append(error.reason)


def bad_lines_error(lines: Sequence[str], path: Path, data: Data, field: str = FIELD) -> InputError:
    """Return the error of lines that are not documents, with what leaves them out or reads them."""
    if is_missing_column(lines[0]):
        return InputError(_listed(lines), field, str(path), _with_column(lines[0], path, data, field))
    fix = without_rows(lines) if path.is_file() else ()  # in a folder, the file without them would be read too
    return InputError(_listed(lines), field, str(path), (*fix, _tokenizing(path, data, text_column(data))))


def _listed(lines: Sequence[str]) -> str:
    return some(lines, 1 + SHOWN_ERRORS, "; ")


def _with_column(line: str, path: Path, data: Data, field: str) -> tuple[str, ...]:
    """Return what reads rows whose texts are in another column: data.columns is that of the training data, too."""
    columns = columns_meant(line) or ("COLUMN",)
    column = columns[0]
    if field != FIELD:
        return (f"{_tokenizing(path, data, column, skips=False)}, then {field}=TOKENS",)
    number = _LINE.search(line)
    skips = number is not None and number[1] != "1"  # a table and the first row have it for all
    read = _tokenizing(path, data, text_column(data) if skips else column, skips)
    set_column = [f"data.columns.text={one}" for one in columns]
    return *set_column, "--goal sft or --goal peft, if its rows are conversations", read


def text_column(data: Data) -> str:
    """Return the column of the documents in files of rows."""
    return data.columns.get("text", "text")


def _tokenizing(path: Path, data: Data, column: str, skips: bool = True) -> str:
    words = ["meshwright", "tokenize", str(path), "--tokenizer", data.tokenizer or "FOLDER", "--out", "TOKENS"]
    named = ["--column", column] if column != "text" else []
    return shlex.join([*words, *named, *(["--skip-bad-lines"] if skips else [])])


def _size(block: Block) -> int:
    if isinstance(block.data, bytes):
        return len(block.data)
    return sum(len(one) for one in block.data if isinstance(one, str))
