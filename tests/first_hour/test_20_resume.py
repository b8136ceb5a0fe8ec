"""What a resumed run notices: data that changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.checkpoint.contract import changed_fields, check_contract
from meshwright.engine.data import fingerprint as fingerprints
from meshwright.engine.data.fingerprint import Fingerprint, data_fingerprints, fingerprint
from meshwright.errors import InputError
from meshwright.recipes.index import load as load_recipe
from meshwright.recipes.overrides import apply


def write_rows(path: Path, rows: int, first: int = 0) -> Path:
    """Write a chat dataset."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"question {i}", "response": f"answer {i}"}) for i in range(first, first + rows)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def of(*changes: str, recipe: str = "llama3_8b_sft_config") -> dict[str, Fingerprint]:
    """Return the fingerprints of a recipe with these overrides."""
    return data_fingerprints(apply(load_recipe(recipe), changes))


def refused(before: Any, after: Any, saved: Any = None, now: Any = None) -> str:
    """Return the message that refuses to resume; empty if nothing differs."""
    try:
        check_contract(saved or {}, now or {}, False, True, before, after)
    except InputError as error:
        return str(error)
    return ""


def test_a_file_with_fewer_rows_is_refused_and_a_moved_one_is_not(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a" / "chats.jsonl", 120)
    before = of(f"data.dataset={path}")
    moved = write_rows(tmp_path / "b" / "other.jsonl", 120)
    after = of(f"data.dataset={moved}")
    assert refused(before, after, {"data.dataset": str(path)}, {"data.dataset": str(moved)}) == ""
    write_rows(path, 60)
    message = refused(before, of(f"data.dataset={path}"))
    assert f"the content of {path} was 120 lines, " in message
    assert "and is 60 lines, " in message
    write_rows(moved, 119)
    assert "data.dataset was" in refused(
        before, of(f"data.dataset={moved}"), {"data.dataset": str(path)}, {"data.dataset": str(moved)}
    )


def test_changes_are_accepted_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "chats.jsonl", 3)
    before = of(f"data.dataset={path}")
    write_rows(path, 3, first=3)
    check_contract({}, {}, True, True, before, of(f"data.dataset={path}"))
    assert f"warning: resuming with changed contract fields: the content of {path} was" in capsys.readouterr().err


def test_a_row_changed_in_place_is_noticed_and_touching_the_file_is_not(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chats.jsonl", 10)
    before = of(f"data.dataset={path}")
    os.utime(path, (0, 0))
    assert of(f"data.dataset={path}") == before
    path.write_text(path.read_text().replace("answer 4", "answer X"))
    assert of(f"data.dataset={path}") != before


def test_folders_blends_and_checkpoints_without_fingerprints(tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "one" / "a.jsonl", 4), write_rows(tmp_path / "two" / "a.jsonl", 5)
    write_rows(tmp_path / "one" / "b.jsonl", 2)
    before = of(f"data.blend={{{one.parent}: 1, {two}: 2}}")
    assert {name: print_.files for name, print_ in before.items()} == {str(one.parent): 2, str(two): 1}
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    after = of(f"data.blend={{{tmp_path / 'copy'}: 1, {two}: 2}}")
    saved, now = ({"data.blend": {name: i + 1.0 for i, name in enumerate(names)}} for names in (before, after))
    assert changed_fields(saved, now, before, after) == {}
    (tmp_path / "one" / "README.md").write_text("a text is not data")
    assert of(f"data.dataset={one.parent}")[str(one.parent)] == before[str(one.parent)]
    (tmp_path / "one" / "b.jsonl").unlink()
    assert "the content of" in refused(before, of(f"data.dataset={one.parent}"))
    assert refused({}, after) == ""
    assert of("data.dataset=mock") == of("data.dataset=/no/such/file.jsonl") == {}


def test_a_saved_dataset_and_text_for_pretraining(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": str(i), "response": "b"} for i in range(8)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.Dataset.from_list(rows[:4]).save_to_disk(str(tmp_path / "cut"))
    shutil.copytree(tmp_path / "saved", tmp_path / "moved")
    saved, cut, moved = (
        next(iter(of(f"data.dataset={tmp_path / name}").values())).hash for name in ("saved", "cut", "moved")
    )
    assert saved == moved != cut
    text = tmp_path / "corpus.txt"
    text.write_text("hello\n" * 9)
    (found,) = of(f"data.dataset={text}", recipe="llama3_8b_pretrain_config").values()
    assert (found.lines, found.bytes) == (9, 54)


def test_a_large_dataset_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "FULL_BYTES", 1 << 16)
    monkeypatch.setattr(fingerprints, "SAMPLED_BYTES", 1 << 18)
    paths = [tmp_path / f"{i}.parquet" for i in range(3)]
    for path in paths:
        path.write_bytes(bytes(range(256)) * 4096)
    before = fingerprint(paths)
    with paths[2].open("r+b") as file:  # the last bytes: appended rows that keep the size
        file.seek(-8, os.SEEK_END)
        file.write(b"changed!")
    assert fingerprint(paths).hash != before.hash
    assert fingerprint(paths).lines is None
    with paths[1].open("ab") as file:
        file.write(b"x")
    assert fingerprint(paths).bytes == before.bytes + 1


def test_many_files_are_read_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "FULL_BYTES", 10)
    monkeypatch.setattr(fingerprints, "SAMPLED_BYTES", 4096 * 5)
    paths = [tmp_path / f"{i:03d}.jsonl" for i in range(50)]
    for path in paths:
        path.write_bytes(b"{}\n" * 5)
    opened: list[Path] = []
    real = Path.open

    def counting(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", counting)
    fingerprint(paths)
    assert (len(opened), opened[0], opened[-1]) == (5, paths[0], paths[-1])
