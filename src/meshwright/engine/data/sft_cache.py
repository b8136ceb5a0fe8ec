"""Conversations tokenised once, into arrays that every rank and every later run maps into memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.cache import cache_folder, making, unwritable
from meshwright.engine.data.conversations import conversation, detect_columns, fault
from meshwright.engine.data.files import FIELD, Row, Rows
from meshwright.engine.data.templates import Template, Tokens
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.engine.data.workers import in_turn, worker_pool
from meshwright.errors import InputError

FORMAT = 1  # raised when the same text gives other arrays
CHUNK = 256  # rows that are tokenised together
LARGE = 20_000  # rows from which several processes pay for their start


class Policy(msgspec.Struct, frozen=True):
    """How a row becomes a sample: what is learnt, and what happens to what is too long."""

    train_on: str
    truncation: str
    most: int  # tokens in a sample


class TokenizationStats(msgspec.Struct, frozen=True):
    """What became of the rows."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    learnt: int = 0
    longest: int = 0  # tokens, before anything was cut
    cut: int = 0  # rows that lost tokens
    too_long: int = 0  # rows dropped for their length
    unanswered: int = 0  # rows dropped because no learnt token was left
    faulty: int = 0  # rows dropped because there was nothing to learn in them
    fault: str = ""  # place and reason of the first of those
    columns: dict[str, str] = {}
    way: str = ""

    def lines(self) -> list[str]:
        """The same in words, for the user."""
        parts = ", ".join(f"{part} from {column}" for part, column in self.columns.items())
        dropped = self.too_long + self.unanswered + self.faulty
        said = [
            f"{self.kept} of {self.rows} conversations, {self.tokens} tokens, {self.learnt} of them learnt "
            f"({parts}; {self.way})"
        ]
        if self.cut:
            said.append(f"{self.cut} were cut (the longest has {self.longest} tokens)")
        if dropped:
            reasons = [
                f"{self.too_long} too long" * (self.too_long > 0),
                f"{self.unanswered} without a learnt token after cutting" * (self.unanswered > 0),
                f"{self.faulty} with nothing to learn, first {self.fault}" * (self.faulty > 0),
            ]
            said.append(f"{dropped} were dropped: {'; '.join(reason for reason in reasons if reason)}")
        return said


@dataclass(frozen=True)
class TokenizedConversations:
    """Tokenised conversations by index."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    offsets: NDArray[np.int64]  # [n + 1]
    hashes: NDArray[np.uint64]  # of the tokens: equal conversations have equal ones
    told: TokenizationStats

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each conversation."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> Tokens:
        """One conversation."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Tokens(self.ids[part], self.learnt[part])


def tokenised(
    rows: Rows, given: Mapping[str, str], tokenizer: Any, chat_template: str, policy: Policy, workers: int
) -> TokenizedConversations:
    """The rows as tokens; the first process of a machine that asks makes them, the others wait for it."""
    template = Template(tokenizer, chat_template, policy.train_on)  # type: ignore[arg-type]  # checked by the recipe
    folder = cache_folder() / "conversations" / _key(rows, given, template, policy)
    if not (folder / "told.json").is_file():
        with making(folder):
            if not (folder / "told.json").is_file():
                _make(folder, rows, given, template, chat_template, policy, workers)
    return _load(folder)


def _key(rows: Rows, given: Mapping[str, str], template: Template, policy: Policy) -> str:
    tokenizer = template.tokenizer
    parts = [FORMAT, rows.state(), dict(given), tokenizer.special_tokens_map, template.text, policy]
    digest = hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _make(
    folder: Path,
    rows: Rows,
    given: Mapping[str, str],
    template: Template,
    chat_template: str,
    policy: Policy,
    workers: int,
) -> None:
    first = next(iter(rows), None)
    if first is None:
        raise InputError("the data set has no rows", field=FIELD, value=rows.name)
    columns = detect_columns(first[1], given, rows.name)
    count = rows.count()
    name = template.tokenizer.name_or_path
    work = _Work(template, columns, policy)
    many = workers > 1 and (count or 0) >= LARGE and Path(name).is_dir()
    start = (name, chat_template, tuple(columns.items()), policy)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        processes = worker_pool(min(workers, os.cpu_count() or 1)) if many else nullcontext(None)
        with processes as pool, _progress(count) as advance:
            told = _write(unfinished, _answers(pool, work, start, _chunks(rows), workers), advance)
        if not told.kept:
            why = f"; {told.lines()[-1]}" if told.rows else ""
            raise InputError(f"nothing can be learnt from its {told.rows} rows{why}", field=FIELD, value=rows.name)
        told = msgspec.structs.replace(told, columns=columns, way=template.way)
        (unfinished / "told.json").write_bytes(msgspec.json.encode(told))
        unfinished.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


Chunk = list[tuple[str, Row]]


class Answer(msgspec.Struct, frozen=True):
    """What became of a chunk of rows."""

    samples: list[Tokens]
    told: TokenizationStats
    error: dict[str, Any] | None = None  # an InputError, which does not survive the way between processes as such


class _Work:
    """Turns rows into samples."""

    def __init__(self, template: Template, columns: Mapping[str, str], policy: Policy) -> None:
        self.template, self.columns, self.policy = template, columns, policy

    def __call__(self, chunk: Chunk) -> Answer:
        try:
            return self._samples(chunk)
        except InputError as error:
            return Answer([], TokenizationStats(), {**error.to_dict(), "fix": tuple(error.fix)})

    def _samples(self, chunk: Chunk) -> Answer:
        talks, places, faults = [], [], []
        for where, row in chunk:
            talk = conversation(row, self.columns, where)
            reason = fault(talk, self.policy.train_on)
            if reason:
                faults.append(f"{where}: {reason}")
            else:
                talks.append(talk)
                places.append(where)
        whole = self.template.tokens(talks, places) if talks else []
        fitted = [fit(one, self.policy, where) for one, where in zip(whole, places, strict=True)]
        kept = [one for one in fitted if one is not None and one.learnt.any()]
        told = TokenizationStats(
            rows=len(chunk),
            kept=len(kept),
            tokens=sum(len(one.ids) for one in kept),
            learnt=sum(int(one.learnt.sum()) for one in kept),
            longest=max((len(one.ids) for one in whole), default=0),
            cut=sum(
                one is not None and len(one.ids) < len(all_of.ids) for one, all_of in zip(fitted, whole, strict=True)
            ),
            too_long=sum(one is None for one in fitted),
            unanswered=sum(one is not None and not one.learnt.any() for one in fitted),
            faulty=len(faults),
            fault=faults[0] if faults else "",
        )
        return Answer(kept, told)


def fit(tokens: Tokens, policy: Policy, where: str) -> Tokens | None:
    """A conversation within the length of a sample, as the recipe wants it; None where it is dropped."""
    most = policy.most
    if len(tokens.ids) <= most:
        return tokens
    if policy.truncation == "drop":
        return None
    if policy.truncation == "refuse":
        raise too_long(where, len(tokens.ids), most)
    if policy.truncation == "end":
        return Tokens(tokens.ids[:most], tokens.learnt[:most])
    learnt = tokens.learnt[-most:].copy()
    learnt[0] = False  # nothing is left to predict it from
    return Tokens(tokens.ids[-most:], learnt)


def too_long(where: str, tokens: int, most: int) -> InputError:
    """The error for a conversation that is longer than a sample, where that is refused."""
    return InputError(
        f"{where}: the conversation has {tokens} tokens, a sample has room for {most}",
        field="data.truncation",
        value="refuse",
        fix=(f"data.seq_length={tokens - 1}", "data.truncation=end", "data.truncation=drop"),
    )


def _chunks(rows: Rows) -> Iterator[Chunk]:
    source = iter(rows)
    while chunk := list(islice(source, CHUNK)):
        yield chunk


Start = tuple[str, str, tuple[tuple[str, str], ...], Policy]


@lru_cache(maxsize=1)
def _worker(start: Start) -> _Work:
    """What a process of the pool works with, made from its first chunk on."""
    name, chat_template, columns, policy = start
    template = Template(load_tokenizer(name), chat_template, policy.train_on)  # type: ignore[arg-type]  # as above
    return _Work(template, dict(columns), policy)


def _one(start: Start, chunk: Chunk) -> Answer:
    return _worker(start)(chunk)


def _answers(
    pool: ProcessPoolExecutor | None, work: _Work, start: Start, chunks: Iterator[Chunk], workers: int
) -> Iterator[Answer]:
    if pool is None:
        return map(work, chunks)
    return (answer for _, answer in in_turn(pool, partial(_one, start), chunks, 3 * workers))


def _write(folder: Path, answers: Iterator[Answer], advance: Callable[[int], None]) -> TokenizationStats:
    told, lengths, hashes = TokenizationStats(), [0], []
    with (folder / "ids.bin").open("wb") as ids, (folder / "learnt.bin").open("wb") as learnt:
        for answer in answers:
            if answer.error is not None:
                raise _error(answer.error)
            for sample in answer.samples:
                ids.write(sample.ids.tobytes())
                learnt.write(sample.learnt.tobytes())
                lengths.append(len(sample.ids))
                hashes.append(int.from_bytes(hashlib.blake2b(sample.ids.tobytes(), digest_size=8).digest(), "little"))
            told = _sum(told, answer.told)
            advance(answer.told.rows)
    np.save(folder / "offsets.npy", np.cumsum(np.array(lengths, dtype=np.int64)), allow_pickle=False)
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64), allow_pickle=False)
    return told


def _error(told: dict[str, Any]) -> InputError:
    return InputError(told["message"], field=told["field"], value=told["value"], fix=told["fix"])


def _sum(a: TokenizationStats, b: TokenizationStats) -> TokenizationStats:
    counts = {
        name: getattr(a, name) + getattr(b, name)
        for name in ("rows", "kept", "tokens", "learnt", "cut", "too_long", "unanswered", "faulty")
    }
    return TokenizationStats(**counts, longest=max(a.longest, b.longest), fault=a.fault or b.fault)


def _load(folder: Path) -> TokenizedConversations:
    try:
        told = msgspec.json.decode((folder / "told.json").read_bytes(), type=TokenizationStats)
        offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        hashes = np.load(folder / "hashes.npy", mmap_mode="r", allow_pickle=False)
        ids = np.memmap(folder / "ids.bin", dtype=np.int32, mode="r")
        learnt = np.memmap(folder / "learnt.bin", dtype=np.bool_, mode="r")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise _torn(folder, str(error)) from None
    if not len(ids) == len(learnt) == int(offsets[-1]) == told.tokens or len(hashes) != told.kept:
        raise _torn(folder, "its files do not belong together")
    return TokenizedConversations(ids, learnt, offsets, hashes, told)


def _torn(folder: Path, reason: str) -> InputError:
    return InputError(
        f"the tokenised data cannot be read: {reason}", field="MESHWRIGHT_CACHE", value=folder, fix=(f"rm -r {folder}",)
    )


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty() or (total or LARGE) < CHUNK:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: Sequence[Any] = (TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda rows: bar.advance(task, rows)
