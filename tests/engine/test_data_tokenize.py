"""Text to shards: round trips, bad lines reported, no partial output; and datasets by name."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.parity import recipe
from tests.engine.test_data_files import write_megatron

from meshwright.engine.data import corpus_reader, open_source, shards
from meshwright.engine.data import tokenize as module
from meshwright.engine.data.byte_level import write_byte_tokenizer
from meshwright.engine.data.megatron_files import open_megatron
from meshwright.engine.data.mock import Mock
from meshwright.engine.data.tokenize import tokenize
from meshwright.engine.faults import RunError
from meshwright.errors import InputError
from meshwright.recipes import types

TEXTS = ["one", "two: zwei €", "", "three\nlines", "四"]
VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def documents(folder: Path, tokenizer: str) -> list[str]:
    """Return the decoded texts of a shard folder; each must end with the EOS token."""
    from meshwright.engine.data.tokenizers import load_tokenizer

    decoder = load_tokenizer(tokenizer)
    stream, manifest = shards.open_shards(folder)
    ends = stream.ends(0, len(stream))
    assert len(ends) == manifest.documents
    found = [stream.read(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert all(tokens[-1] == manifest.eos for tokens in found)
    return [decoder.decode(tokens[:-1]) for tokens in found]


def jsonl(path: Path, rows: list[Any]) -> str:
    """Write JSON lines; strings are written verbatim."""
    raw = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def rows(given: list[str] = TEXTS) -> list[dict[str, str]]:
    """Return one row per text."""
    return [{"id": str(i), "text": text} for i, text in enumerate(given)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.jsonl.zst"])
def test_documents_round_trip(tmp_path: Path, tokenizer: str, name: str) -> None:
    path = tmp_path / name
    if path.suffix in (".parquet", ".zst"):
        pyarrow = pytest.importorskip("pyarrow")
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": TEXTS}), path)
        else:
            with pyarrow.output_stream(str(path), compression="zstd") as file:
                file.write(Path(jsonl(tmp_path / "plain", rows())).read_bytes())
    else:
        jsonl(path, rows())
    report = tokenize([str(path)], tokenizer, str(tmp_path / "out"))
    full = [text for text in TEXTS if text]
    assert documents(tmp_path / "out", tokenizer) == full
    assert (report.documents, report.empty, report.skipped, report.dtype) == (4, 1, 0, "uint16")
    assert report.tokens == sum(len(text.encode()) + 1 for text in full)
    assert shards.verify(tmp_path / "out") == []


def test_plain_texts_can_be_one_document_each(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_reader, "BLOCK_BYTES", 500)
    long = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\ufefffirst")
    (tmp_path / "texts" / "b.txt").write_text(long)
    (tmp_path / "texts" / "notes.pdf").write_text("not read")
    tokenize([str(tmp_path / "texts")], tokenizer, str(tmp_path / "out"), shard_tokens=100, documents="file")
    assert documents(tmp_path / "out", tokenizer) == ["first", long]
    assert shards.open_shards(tmp_path / "out")[1].max_token < VOCAB


def test_result_does_not_depend_on_workers(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows([f"document {i} " * (i % 7) for i in range(6000)]))
    monkeypatch.setattr(module, "PARALLEL_BYTES", 0)
    for workers, name in ((1, "one"), (2, "two")):
        tokenize([path], tokenizer, str(tmp_path / name), workers=workers, shard_tokens=50_000)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert len(names) > 5
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_megatron_files_contain_the_same_documents(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows())
    tokenize([path], tokenizer, str(tmp_path / "out"), shard_tokens=8)
    report = tokenize([path], tokenizer, str(tmp_path / "mega"), shard_tokens=8, format="megatron")
    ours, theirs = shards.open_shards(tmp_path / "out")[0], open_megatron(Path(report.folder)).stream()
    assert len(ours.segments) > 1
    assert (ours.read(0, len(ours)) == theirs.read(0, len(theirs))).all()
    assert (ours.ends(0, len(ours)) == theirs.ends(0, len(theirs))).all()
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "out", "mega.bin", "mega.idx"}
    with pytest.raises(InputError, match="already exists"):
        tokenize([path], tokenizer, str(tmp_path / "mega"), format="megatron")


BAD = {
    "invalid json": ("{", "not a JSON object"),
    "not an object": ("[1]", "not a JSON object"),
    "no text": ({"txet": "a"}, "did you mean 'txet'"),
    "a number": ({"text": 1}, "of type int"),
    "null": ({"text": None}, "is empty"),
    "unpaired surrogate": ('{"text": "\\ud800"}', ""),
    "deep": ('{"text": ' + "[" * 100_000, "not a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_reported(tmp_path: Path, tokenizer: str, case: str) -> None:
    line, reason = BAD[case]
    path = jsonl(tmp_path / "a.jsonl", [{"text": "good"}, "", line, {"text": "too"}])
    with pytest.raises(InputError) as error:
        tokenize([path], tokenizer, str(tmp_path / "out"))
    assert f"a.jsonl:3: {reason}"[:40] in str(error.value) or reason in str(error.value)
    assert "a.jsonl:3: " in str(error.value)
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]
    report = tokenize([path], tokenizer, str(tmp_path / "out"), bad_lines="skip")
    assert report.skipped == 1
    assert "a.jsonl:3: " in report.skipped_lines[0]
    assert documents(tmp_path / "out", tokenizer) == ["good", "too"]


def test_invalid_utf8_is_reported(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd\ntoo\n")
    with pytest.raises(InputError, match=r"a\.txt:2: not UTF-8"):
        tokenize([str(tmp_path / "a.txt")], tokenizer, str(tmp_path / "out"))
    tokenize([str(tmp_path / "a.txt")], tokenizer, str(tmp_path / "out"), bad_lines="skip")
    assert documents(tmp_path / "out", tokenizer) == ["good\ntoo"]


@pytest.mark.parametrize("block", [3, 7, 16, 1 << 20])
@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("one\ntwo\n\nthree\n\n\n\nfour\n", "auto", ["one\ntwo", "three", "four"]),
        ("one\r\n\r\ntwo\n \nthree", "auto", ["one", "two", "three"]),
        ("one\n\ntwo\fthree\f", "auto", ["one\n\ntwo", "three"]),
        ("one\n\ntwo\n<|endoftext|>\nthree\n<|endoftext|>\n", "separator", ["one\n\ntwo", "three"]),
        ("one\ntwo\n\nthree\n", "line", ["one", "two", "three"]),
        ("one\n\ntwo\n", "file", ["one\n\ntwo\n"]),
        ("no line break", "auto", ["no line break"]),
    ],
)
def test_a_text_file_is_split_into_documents(
    text: str, how: Any, expected: list[str], block: int, tmp_path: Path, tokenizer: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(corpus_reader, "BLOCK_BYTES", block)
    (tmp_path / "a.txt").write_bytes(text.encode())
    done = tokenize([str(tmp_path / "a.txt")], tokenizer, str(tmp_path / "out"), documents=how)
    assert documents(tmp_path / "out", tokenizer) == expected
    assert done.documents == len(expected)


def test_unreadable_inputs_are_rejected(tmp_path: Path, tokenizer: str) -> None:
    good = jsonl(tmp_path / "good.jsonl", rows())
    packed = Path(jsonl(tmp_path / "a.jsonl.gz", rows()))
    packed.write_bytes(packed.read_bytes()[:-9])
    out = str(tmp_path / "out")
    for inputs, match in (
        (["nowhere.jsonl"], "no such file"),
        ([str(tmp_path / "god.jsonl")], "no such file"),
        ([tokenizer + "/tokenizer.json"], "unsupported file type"),
        ([str(packed)], "cannot be read"),
        ([], "no input files"),
    ):
        with pytest.raises(InputError, match=match):
            tokenize(inputs, tokenizer, out)
    with pytest.raises(InputError, match="tokenizer"):
        tokenize([good], str(tmp_path), out)
    Path(out).mkdir()
    (Path(out) / "kept").touch()
    with pytest.raises(InputError, match="already exists"):
        tokenize([good], tokenizer, out)
    assert os.listdir(out) == ["kept"]


def test_unwritable_output_is_reported(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows())
    with pytest.raises(RunError, match="cannot be written"):
        tokenize([path], tokenizer, f"{path}/out")
    monkeypatch.setenv("MESHWRIGHT_CACHE", path)
    with pytest.raises(InputError, match="is not writable"):
        open_source(pretraining(path, tokenizer=tokenizer), VOCAB)


def pretraining(dataset: str, **changes: Any) -> types.Recipe:
    """Return a pretraining recipe for a dataset."""
    return recipe(types.Layout(), data=types.Data(dataset=dataset, seq_length=16, **changes))


def test_shards_text_and_megatron_files_open_by_their_path(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows(["some text of a few words"] * 20))
    tokenize([path], tokenizer, str(tmp_path / "shards"))
    stream, _ = shards.open_shards(tmp_path / "shards")
    write_megatron(tmp_path / "mega", [stream.read(0, len(stream)).tolist()])
    expected = open_source(pretraining(str(tmp_path / "shards")), VOCAB).samples(range(30))
    for name in ("mega", "mega.bin", "a.jsonl"):
        found = open_source(pretraining(str(tmp_path / name), tokenizer=tokenizer), VOCAB).samples(range(30))
        assert (found.tokens == expected.tokens).all()
    (cached,) = (p for p in (tmp_path / "cache" / "shards").iterdir() if p.is_dir())
    before = (cached / shards.MANIFEST).stat().st_mtime_ns
    open_source(pretraining(path, tokenizer=tokenizer), VOCAB)
    assert (cached / shards.MANIFEST).stat().st_mtime_ns == before


def test_held_out_samples_are_not_trained_on(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows([chr(97 + i) * 40 for i in range(20)]))
    tokenize([path], tokenizer, str(tmp_path / "shards"))
    given = pretraining(str(tmp_path / "shards"), validation_part=0.25)
    trained, held_out_tokens = (
        open_source(given, VOCAB, held_out).samples(range(200)).tokens for held_out in (False, True)
    )
    eos = shards.read_manifest(tmp_path / "shards").eos
    assert set(np.unique(trained)) & set(np.unique(held_out_tokens)) == {eos}
    with pytest.raises(InputError, match="no validation data"):
        open_source(
            msgspec.structs.replace(
                given, data=types.Data(dataset=str(tmp_path / "shards")), train=types.Train(eval_every=2)
            ),
            VOCAB,
        )


def test_blend_follows_its_weights_and_anneals(tmp_path: Path, tokenizer: str) -> None:
    for letter in "abc":
        path = jsonl(tmp_path / f"{letter}.jsonl", rows([letter * 40] * 20))
        tokenize([path], tokenizer, str(tmp_path / letter))
    a, b, c = (str(tmp_path / letter) for letter in "abc")
    given = pretraining("mock", blend={a: 3.0, b: 1.0}, anneal_blend={b: 1.0, c: 1.0}, anneal_steps=2)
    given = msgspec.structs.replace(given, train=types.Train(global_batch_size=8, steps=6))
    tokens = open_source(given, VOCAB).samples(range(48)).tokens
    dominant = np.array([np.bincount(row).argmax() for row in tokens])
    (first, second, third) = (np.unique(shards.open_shards(tmp_path / n)[0].read(0, 3)).max() for n in "abc")
    assert [(dominant[:32] == letter).sum() for letter in (first, second, third)] == [24, 8, 0]
    assert [(dominant[32:] == letter).sum() for letter in (first, second, third)] == [0, 8, 8]
    with pytest.raises(InputError, match="annealing needs both"):
        open_source(pretraining("mock", blend={a: 1.0}, anneal_steps=2), VOCAB)


def test_a_training_lists_all_lines_that_are_no_documents(tmp_path: Path, tokenizer: str) -> None:
    path = Path(jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": None}, {"content": "two"}]))
    for dataset, leaves_out in ((path, f"sed '2d;3d' {path}"), (tmp_path, f"meshwright tokenize {tmp_path} ")):
        with pytest.raises(InputError, match=r"a\.jsonl:2: 'text' is empty, not text; .*a\.jsonl:3: has no") as error:
            open_source(pretraining(str(dataset), tokenizer=tokenizer), VOCAB)
        assert any(fix.startswith(leaves_out) for fix in error.value.fix)
        assert error.value.fix[-1].endswith(f"--tokenizer {tokenizer} --out TOKENS --skip-bad-lines")
    jsonl(path, [{"content": "one"}, {"content": "two"}])
    with pytest.raises(InputError, match="it has content") as error:
        open_source(pretraining(str(path), tokenizer=tokenizer), VOCAB)
    assert error.value.fix[0] == "data.columns.text=content"
    assert error.value.fix[-1].endswith("--out TOKENS --column content")  # no row has the other column
    jsonl(path, [{"content": "one", "title": "two"}])
    with pytest.raises(InputError, match="it has content, title") as error:
        open_source(pretraining(str(path), tokenizer=tokenizer), VOCAB)
    assert error.value.fix[0] == "data.columns.text=content"


def test_unknown_datasets_and_out_of_vocabulary_tokens_are_rejected(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", rows())
    tokenize([path], tokenizer, str(tmp_path / "shards"))
    with pytest.raises(InputError, match="did you mean") as error:
        open_source(pretraining(str(tmp_path / "shard")), VOCAB)
    assert f"data.dataset={tmp_path / 'shards'}" in error.value.fix
    assert any(fix.startswith("meshwright tokenize") for fix in error.value.fix)
    with pytest.raises(InputError, match="vocabulary has 20 tokens"):
        open_source(pretraining(str(tmp_path / "shards")), 20)
    assert isinstance(open_source(pretraining("llm-pretrain-mock"), VOCAB), Mock)
