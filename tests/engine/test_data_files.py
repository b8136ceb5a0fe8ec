"""Shards and Megatron files: round trips, samples at fixed strides, corrupt files rejected."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.engine.data import shards
from meshwright.engine.data.megatron_files import HEADER, MAGIC, MegatronWriter, megatron_prefix, open_megatron
from meshwright.engine.data.shards import Manifest, ShardWriter, StreamCorpus, open_shards, split_spans, write_manifest
from meshwright.errors import InputError

VOCAB = 100
documents_of = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9), min_size=1, max_size=12)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_shards(folder: Path, documents: list[list[int]], shard_tokens: int, pieces: int = 3) -> Path:
    """Write a shard folder in pieces that do not end at document boundaries."""
    folder.mkdir()
    writer = ShardWriter(folder, "uint16", shard_tokens)
    tokens = np.array([token for document in documents for token in document], dtype=np.int64)
    ends = np.cumsum([len(document) for document in documents])
    borders = [len(tokens) * i // pieces for i in range(pieces + 1)]
    for i, (start, end) in enumerate(pairwise(borders)):
        inside = ends[(ends > start) & (ends <= end)] if i else ends[ends <= end]
        writer.add(tokens[start:end], inside - start)
    writer.close()
    manifest = Manifest(
        dtype="uint16",
        tokens=len(tokens),
        documents=len(documents),
        max_token=writer.max_token,
        eos=None,
        tokenizer="none",
        tokenizer_sha256="",
        vocab=VOCAB,
        sources=[],
        shards=writer.shards,
    )
    write_manifest(folder, manifest)
    return folder


def write_megatron(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    """Write a pair of files with one sequence per document."""
    with MegatronWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
    return prefix


def check_stream(stream: shards.Stream, documents: list[list[int]], seq: int) -> None:
    """Compare the samples of a stream with a plain loop over the documents."""
    tokens = [token for document in documents for token in document]
    owner = [i for i, document in enumerate(documents) for _ in document]
    if len(tokens) < seq + 1:
        with pytest.raises(InputError, match="fewer than one sample"):
            StreamCorpus(stream, seq, vocab=VOCAB)
        return
    plain, packed = StreamCorpus(stream, seq, vocab=VOCAB), StreamCorpus(stream, seq, vocab=VOCAB, packing=True)
    assert len(plain) == (len(tokens) - 1) // seq
    for i in range(len(plain)):
        span = slice(i * seq, i * seq + seq)
        assert plain.sample(i).tokens.tolist() == tokens[span.start : span.stop + 1]
        assert plain.sample(i).loss_mask.all()
        assert plain.sample(i).documents is None
        sample = packed.sample(i)
        assert sample.documents is not None
        same = [owner[p] == owner[p + 1] for p in range(span.start, span.stop)]
        assert sample.loss_mask.tolist() == same
        assert (np.diff(sample.documents) > 0).tolist() == [not one for one in same[:-1]]


@given(documents=documents_of, shard_tokens=st.integers(1, 40), seq=st.integers(1, 10), pieces=st.integers(1, 5))
@quick
def test_shards_round_trip(
    tmp_path_factory: Any, documents: list[list[int]], shard_tokens: int, seq: int, pieces: int
) -> None:
    documents = [document or [7] for document in documents]
    folder = write_shards(tmp_path_factory.mktemp("data") / "out", documents, shard_tokens, pieces)
    stream, manifest = open_shards(folder)
    assert shards.verify(folder) == []
    assert sum(shard.documents for shard in manifest.shards) == len(documents)
    assert all(shard.tokens >= shard_tokens for shard in manifest.shards[:-1])
    check_stream(stream, documents, seq)


@given(documents=documents_of, seq=st.integers(1, 10), dtype=st.sampled_from(["uint8", "int32", "uint16", "int64"]))
@quick
def test_megatron_files_round_trip(tmp_path_factory: Any, documents: list[list[int]], seq: int, dtype: str) -> None:
    folder = tmp_path_factory.mktemp("data")
    file = open_megatron(write_megatron(folder / "a.v1", documents, dtype))
    assert [[int(t) for sequence in document for t in sequence] for document in file.documents()] == documents
    full = [document for document in documents if document]
    if full:
        check_stream(file.stream(), full, seq)
    with MegatronWriter(folder / "b", dtype) as writer:
        for document in file.documents():
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    for ending in (".bin", ".idx"):
        assert (folder / f"b{ending}").read_bytes() == (folder / f"a.v1{ending}").read_bytes()


def test_index_bytes_match_megatron(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3], [4]], "int32")
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 12) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4i", 1, 2, 3, 4)
    assert {megatron_prefix(tmp_path / name) for name in ("a.bin", "a.idx", "a")} == {tmp_path / "a"}
    assert megatron_prefix(tmp_path / "b") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_failed_writer_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not fit"), MegatronWriter(tmp_path / "a", "uint8") as writer:
        writer.add([256])
    assert not list(tmp_path.iterdir())


def index(lengths: list[int], offsets: list[int], document_list: list[int], **changes: Any) -> bytes:
    """Return the bytes of an index."""
    head = {
        "magic": MAGIC,
        "version": 1,
        "code": 8,
        "sequences": len(lengths),
        "borders": len(document_list),
        **changes,
    }
    body = (
        np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.array(document_list, "<i8").tobytes()
    )
    return HEADER.pack(*head.values()) + body


def test_scattered_sequences_are_read_in_index_order(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(index([3, 2, 4], [12, 0, 4], [0, 2, 3]))
    file = open_megatron(tmp_path / "a")
    assert not file.contiguous
    check_stream(file.stream(), [[6, 7, 8, 0, 1], [2, 3, 4, 5]], 3)


HOSTILE = {
    "wrong magic": index([3], [0], [0, 1], magic=b"MMIDIDY\x00\x00"),
    "another version": index([3], [0], [0, 1], version=2),
    "unknown dtype code": index([3], [0], [0, 1], code=6),
    "truncated": index([3], [0], [0, 1])[:-1],
    "too long": index([3], [0], [0, 1]) + b"\x00\x00",
    "shorter than a header": MAGIC,
    "empty": b"",
    "more sequences than bytes": index([3], [0], [0, 1], sequences=2**63),
    "more documents than bytes": index([3], [0], [0, 1], borders=2**64 - 1),
    "beyond the end": index([3], [2**40], [0, 1]),
    "one token beyond the end": index([3], [16], [0, 1]),
    "negative offset": index([3], [-2], [0, 1]),
    "unaligned offset": index([3], [1], [0, 1]),
    "longer than the file": index([2**31 - 1], [0], [0, 1]),
    "negative length": index([-1], [0], [0, 1]),
    "documents out of order": index([1, 1], [0, 2], [0, 2, 1, 2]),
    "documents beyond the sequences": index([3], [0], [0, 2]),
    "negative document": index([3], [0], [-1, 1]),
    "no documents": index([3], [0], []),
    "modes": index([3], [0], [0, 1]) + b"\x00",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_indices_are_rejected(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    (tmp_path / "a.idx").write_bytes(HOSTILE[case])
    with pytest.raises(InputError, match=r"a\.idx"):
        open_megatron(tmp_path / "a")


@given(data=st.binary(max_size=120), flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3))
@quick
def test_no_bytes_crash_the_reader(tmp_path_factory: Any, data: bytes, flips: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_megatron(folder / "a", [[1, 2, 3], [4], [5, 6]])
    raw = bytearray((folder / "a.idx").read_bytes())
    for span, value in flips:
        raw[span % len(raw)] = value
    for content in (bytes(raw), data, MAGIC + data):
        (folder / "a.idx").write_bytes(content)
        try:
            file = open_megatron(folder / "a")
        except InputError:
            continue
        stream = file.stream()
        if len(stream) > 1:
            StreamCorpus(stream, 1, vocab=1 << 20, packing=True).sample(0)


def test_truncated_token_file_is_rejected(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2, 3]])
    with (tmp_path / "a.bin").open("r+b") as file:
        file.truncate(4)
    with pytest.raises(InputError, match="outside"):
        open_megatron(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match="missing"):
        open_megatron(tmp_path / "a")


CHANGES: dict[str, dict[str, Any]] = {
    "another format": {"format": "others"},
    "another version": {"version": 2},
    "unknown dtype": {"dtype": "float32"},
    "too many tokens": {"tokens": 10**12},
    "not a number": {"tokens": "many"},
}


@pytest.mark.parametrize("case", CHANGES)
def test_inconsistent_manifest_is_rejected(tmp_path: Path, case: str) -> None:
    folder = write_shards(tmp_path / "out", [[1, 2, 3], [4, 5]], 100)
    path = folder / shards.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **CHANGES[case]}))
    with pytest.raises(InputError, match="corrupt"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["../00000", "/etc/passwd", "00000/../00000", ""])
def test_shard_name_cannot_escape_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_shards(tmp_path / "out", [[1, 2, 3], [4, 5]], 100)
    path = folder / shards.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["name"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="invalid shard name"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["00000.tokens", "00000.ends"])
def test_truncated_and_changed_shards_are_detected(tmp_path: Path, name: str) -> None:
    folder = write_shards(tmp_path / "out", [[1, 2, 3], [4, 5]], 100)
    path = folder / name
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    assert shards.verify(folder) == [name]
    path.write_bytes(raw[:-1])
    with pytest.raises(InputError, match=f"{name} has"):
        open_shards(folder)
    path.unlink()
    with pytest.raises(InputError, match="missing"):
        open_shards(folder)


def test_tokens_outside_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    stream = open_megatron(write_megatron(tmp_path / "a", [[1, 2, 3, 99, 4]])).stream()
    corpus = StreamCorpus(stream, 2, vocab=99)
    assert corpus.sample(0).tokens.tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="token 99"):
        corpus.sample(1)


@given(documents=documents_of, part=st.floats(0, 0.99), shard_tokens=st.integers(1, 30))
@quick
def test_held_out_span_starts_at_a_document_boundary(
    tmp_path_factory: Any, documents: list[list[int]], part: float, shard_tokens: int
) -> None:
    documents = [document or [7] for document in documents]
    stream, _ = open_shards(write_shards(tmp_path_factory.mktemp("data") / "out", documents, shard_tokens))
    (start, boundary), (after, end) = split_spans(stream, part)
    ends = [0, *np.cumsum([len(document) for document in documents]).tolist()]
    assert (start, boundary, end) == (0, after, len(stream))
    share = int(len(stream) * (1 - part))
    # A first document that is longer than the training share is split inside.
    assert boundary == (max(e for e in ends if e <= share or part == 0) or share)
