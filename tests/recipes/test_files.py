"""Recipe files: round trips, and rejection of invalid files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.recipes import Recipe, from_file, from_text, load, names, to_text
from meshwright.recipes.files import FORMATS, MAX_BYTES

SOME = names()[::7]


@pytest.mark.parametrize("format", ["toml", "yaml", "json"])
def test_every_format_gives_the_recipe_back(format: str) -> None:
    for name in names() if format == "json" else SOME:
        assert from_text(to_text(load(name), format), format) == load(name)


def test_the_python_call_builds_the_same_recipe() -> None:
    for name in names()[::5]:
        scope: dict[str, Any] = {}
        exec(to_text(load(name), "python"), scope)
        assert scope["recipe"] == load(name)


def test_only_differences_are_written() -> None:
    text = to_text(load("llama3_8b_peft_config"))
    assert "weight_decay" not in text
    assert "architecture" not in text


def test_a_file_may_start_from_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "llama3_8b_sft"  # a comment\ncluster = "16xH100"\n[layout]\ntp = 4\ndp_shard = -1\n')
    made, base = from_file(path), load("llama3_8b_sft_config")
    assert (made.name, made.cluster, made.layout.tp, made.layout.dp_shard) == ("mine", "16xH100", 4, -1)
    assert made.optimizer == base.optimizer
    assert made.goal == "sft"


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".yml", ".json"])
def test_the_suffix_selects_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r{suffix}"
    path.write_text(to_text(load("qwen3_8b_sft"), {".yml": "yaml"}.get(suffix, suffix[1:])))
    assert from_file(path) == load("qwen3_8b_sft")


HEAD = 'model = "llama3_8b"\ngoal = "sft"\ncluster = "8xH100"\n'
BAD = [
    ("toml", "a =", "not valid TOML"),
    ("toml", HEAD + "[layout]\n\ntpp = 2\n", r"did you mean tp.*line 6"),
    ("toml", HEAD + "[layout]\ntp = 0\n", r">= 1.*line 5"),
    ("toml", HEAD + '[layout]\ntp = "2"\n', "Expected `int`"),
    ("toml", HEAD + "[layot]\ntp = 2\n", "did you mean layout"),
    ("toml", HEAD + "layout = 3\n", "table of fields"),
    ("toml", 'goal = "sft"\n', "model and cluster"),
    ("toml", 'base = "lama3_8b_sft"\n', "did you mean llama3_8b_sft_config"),
    ("toml", HEAD.replace("sft", "sfd"), "unknown goal sfd; did you mean sft"),
    (
        "toml",
        HEAD.replace("sft", 'sft"\nengine = "megtron'),
        r"unknown engine megtron; did you mean megatron\?.*line 3",
    ),
    ("toml", HEAD + "[layout]\ntp = 1\ntp = 2\n", "layout.tp is set twice, on lines 5 and 6"),
    ("yaml", "a: &x [*x]\n", "refers to a node that contains it"),
    ("yaml", "a: !!python/object/apply:os.system [ls]\n", "tags that construct objects"),
    ("yaml", "base: llama3_8b_sft\nlayout: {tp: 2}\nlayout: {tp: 3}\n", "layout is set twice, on lines 2 and 3"),
    ("yaml", "[" * 50 + "]" * 50, "nested too deeply"),
    ("yaml", "- a\n", "table of keys"),
    ("yaml", "base: llama3_8b_sft\noptimizer: {lr: fast}\n", "float"),
    ("json", "{", "not JSON"),
    ("json", '{"base": "llama3_8b_sft", "base": "llama3_8b_peft"}', "twice"),
    ("json", "[" * 100_000, "nested too deeply"),
    ("json", "3", "table of keys"),
    ("python", "", "unknown format"),
    ("yaml", "base: null\n", "base: must be the name of a shipped recipe"),
    ("yaml", "base:\n", "base: must be the name of a shipped recipe"),
    ("toml", 'base = ""\n', "the name of a shipped recipe"),
    ("toml", "base = 3\n", "the name of a shipped recipe"),
    ("toml", 'base = "./other.toml"\n', "a shipped recipe, not a file"),
    ("toml", 'base = "other.yaml"\n', "a shipped recipe, not a file"),
    ("toml", HEAD + f"[train]\nsteps = {'9' * 25}\n", "from -9007199254740992 to 9007199254740992.*line 5"),
    ("toml", HEAD + f"[train]\nsteps = {'9' * 5000}\n", "not valid TOML"),
    ("json", '{"base": "llama3_8b_sft", "train": {"steps": ' + "9" * 5000 + "}}", "too many digits"),
    ("json", '{"base": "llama3_8b_sft", "optimizer": {"lr": 1e999}}', "a finite number"),
    ("toml", HEAD + "[optimizer]\nlr = inf\n", "a finite number"),
    ("toml", HEAD + "[optimizer]\nlr = nan\n", "a finite number"),
    ("yaml", "base: llama3_8b_sft\ndata: {blend: {a: .inf}}\n", "a finite number"),
]


@pytest.mark.parametrize(("format", "text", "words"), BAD)
def test_a_bad_file_is_rejected_with_the_reason(format: str, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        from_text(text, format)


LINES = [  # what is wrong, on which line; words before it name the same thing
    ("toml", '# tp = 0\nname = "tp"\n' + HEAD + "[train]\nsteps = 1\n[layout]\npp = 1\ntp = 0\n", 10),
    ("toml", HEAD + "layout.pp = 1\nlayout.tp = 0\n", 5),
    ("toml", HEAD + "[layot]\ntp = 2\n", 4),
    ("toml", HEAD + "[data.blend]\na = 1.0\nb = 'x'\n", 4),
    ("toml", '# base\nbase = "lama3_8b_sft"\n', 2),
    ("yaml", "base: llama3_8b_sft\nlayout:\n  # tp: 0\n  pp: 1\n  tp: 0\n", 5),
    ("yaml", "base: llama3_8b_sft\nlayout: {pp: 1,\n  tpp: 2}\n", 3),
    ("json", '{"base": "llama3_8b_sft",\n "name": "tp",\n "layout": {"pp": 1,\n\n "tp": 0}}', 5),
    ("json", '{"base": "llama3_8b_sft",\n "data": {"blend":\n {"a": 1e999}}}', 2),
]


@pytest.mark.parametrize(("format", "text", "line"), LINES)
def test_an_error_names_its_line(format: str, text: str, line: int) -> None:
    with pytest.raises(InputError, match=rf"\(recipe, line {line}\)"):
        from_text(text, format)


def test_a_missing_key_has_no_line() -> None:
    with pytest.raises(InputError, match=r"\(recipe\)"):
        from_text('goal = "sft"\n', "toml")


def test_a_recipe_may_use_yaml_aliases() -> None:
    text = "base: llama3_8b_sft\nname: &name mine\ndata: {blend: {*name : 1.0}}\n"
    assert from_text(text, "yaml").data.blend == {"mine": 1.0}


def test_a_yaml_alias_bomb_is_rejected_quickly() -> None:
    rows = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="expands to more than"):
        from_text("\n".join(rows), "yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        from_file(tmp_path / "none.toml")
    (tmp_path / "big.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(InputError, match="at most"):
        from_file(tmp_path / "big.json")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        from_file(tmp_path / "odd.toml")
    with pytest.raises(InputError, match="unknown file type"):
        from_file(tmp_path / "recipe.py")
    with pytest.raises(InputError, match="unknown format"):
        to_text(load("llama3_8b_sft"), "xml")
    assert "xml" not in FORMATS


@given(st.sampled_from(["toml", "yaml", "json"]), st.text(max_size=60))
def test_no_text_crashes_the_parser(format: str, text: str) -> None:
    with suppress(InputError):
        assert isinstance(from_text(text, format), Recipe)
