"""Documents: every value has its line, and nothing odd gets in or hangs."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from meshwright.config_io import FORMATS, Leaf, leaves, read_text, tree
from meshwright.errors import InputError

YAML = """\
# a comment
a: &x {lr: 1e-4, on: yes}

b:
  <<: *x
  lr: 3
  "a.b": 'q'
datasets:
  - path: x
    n: [1,
        2]
  - path: y
empty: {}
none:
list:
- 1
- two
text: |
  several
  lines
alias: &y "v"
again: *y
"""

TOML = """\
a = 1
"a.b".c = [
  1,
  2, # a comment with ] and "
]
[x.y]
s = \"\"\"
several # lines
k = 3
"" \\\\ \"\"\"\"
z = {p = 1, q.r = [{u = 1}, {u = '2'}]}
[[arr]]
k = 1
[[arr]]  # the second
k = 2
[arr.sub]
d = 2024-01-01T00:00:00Z
[[arr.inner]]
w = '''a'''
[[arr.inner]]
w = 07:32:00
[empty]
"""

JSON = """\
{"a": 1,

 "b": {"c": [1, 2.5,
   1e999], "d": [{"x": null},
   []]},
 "a.b":
    "\\u00e9\\n",
 "e": {}}
"""

EXAMPLES = {"yaml": YAML, "toml": TOML, "json": JSON}


def said(text: str, format: str) -> dict[str, tuple[Any, int]]:
    return {key: (leaf.value, leaf.line) for key, leaf in leaves(text, format, "f").items()}


def test_every_value_of_yaml_has_its_line() -> None:
    assert said(YAML, "yaml") == {
        "a.lr": (1e-4, 2),
        "a.on": ("yes", 2),
        "b.lr": (3, 6),
        "b.on": ("yes", 2),
        'b."a.b"': ("q", 7),
        "datasets[0].path": ("x", 9),
        "datasets[0].n": ([1, 2], 10),
        "datasets[1].path": ("y", 12),
        "empty": ({}, 13),
        "none": (None, 14),
        "list": ([1, "two"], 15),
        "text": ("several\nlines\n", 18),
        "alias": ("v", 21),
        "again": ("v", 22),
    }


def test_every_value_of_toml_has_its_line() -> None:
    assert said(TOML, "toml") == {
        "a": (1, 1),
        '"a.b".c': ([1, 2], 2),
        "x.y.s": ('several # lines\nk = 3\n"" \\ "', 7),
        "x.y.z.p": (1, 11),
        "x.y.z.q.r[0].u": (1, 11),
        "x.y.z.q.r[1].u": ("2", 11),
        "arr[0].k": (1, 13),
        "arr[1].k": (2, 15),
        "arr[1].sub.d": ("2024-01-01T00:00:00+00:00", 17),
        "arr[1].inner[0].w": ("a", 19),
        "arr[1].inner[1].w": ("07:32:00", 21),
        "empty": ({}, 22),
    }


def test_every_value_of_json_has_its_line() -> None:
    assert said(JSON, "json") == {
        "a": (1, 1),
        "b.c": ([1, 2.5, math.inf], 3),
        "b.d[0].x": (None, 4),
        "b.d[1]": ([], 5),
        '"a.b"': ("é\n", 6),
        "e": ({}, 8),
    }


@pytest.mark.parametrize("format", FORMATS)
def test_lines_are_the_same_with_windows_line_ends_and_a_byte_order_mark(format: str) -> None:
    windows = "\ufeff" + EXAMPLES[format].replace("\n", "\r\n")
    assert tree(windows, format, "f")[1] == tree(EXAMPLES[format], format, "f")[1]


def test_a_tree_has_the_lines_of_maps_and_lists_too() -> None:
    content, lines = tree("a:\n  b:\n    - c: 1\n    - 2\n", "yaml", "f")
    assert content == {"a": {"b": [{"c": 1}, 2]}}
    assert lines == {"a": 1, "a.b": 2, "a.b[0]": 3, "a.b[0].c": 3, "a.b[1]": 4}


@pytest.mark.parametrize("key", ["a.b", "a[0]", 'say "x"', "", "two\nlines"])
def test_a_key_that_would_be_taken_for_a_path_is_quoted(key: str) -> None:
    (name,) = leaves(json.dumps({key: 1}), "json", "f")
    assert name == json.dumps(key)


PYYAML = [  # the word, as YAML 1.2 reads it, and as PyYAML does
    ("1e-4", 1e-4, "1e-4"),
    ("1.0e5", 1e5, "1.0e5"),
    ("-.5", -0.5, "-.5"),
    ("010", 10, 8),
    ("0o17", 15, "0o17"),
    ("08", 8, "08"),
    ("12:30:00", "12:30:00", 45000),
    ("-1:30.5", "-1:30.5", -90.5),
    ("yes", "yes", True),
    ("Off", "Off", False),
    ("2024-01-31", "2024-01-31", date(2024, 1, 31)),
]
SAME = ["1", "-1", "1.5", "1.0e-5", "1_000", "0x1F", "true", "FALSE", "null", "~", ".inf", "-.INF", ".nan", "word", "y"]


@pytest.mark.parametrize(("word", "value", "pyyaml"), PYYAML)
def test_what_pyyaml_reads_otherwise_is_said(word: str, value: Any, pyyaml: Any) -> None:
    leaf = leaves(f"a: {word}", "yaml", "f")["a"]
    assert (leaf.value, type(leaf.value)) == (value, type(value))
    assert (leaf.pyyaml, type(leaf.pyyaml)) == (pyyaml, type(pyyaml))
    assert leaves(f"a: '{word}'", "yaml", "f")["a"] == Leaf(word, 1)
    assert leaves(f"a: [{word}, x]", "yaml", "f")["a"].pyyaml == [pyyaml, "x"]


@pytest.mark.parametrize("word", SAME)
def test_what_pyyaml_reads_alike_is_not_said(word: str) -> None:
    assert leaves(f"a: [{word}]", "yaml", "f")["a"].pyyaml is UNSET


def test_a_file_that_says_yaml_1_1_is_read_as_that() -> None:
    assert leaves("%YAML 1.1\n---\na: yes\n", "yaml", "f")["a"] == Leaf(True, 3)


WORDS = st.text("0123456789_+-.:eEoxbBaAtTfFnNyYsSlLuUiIrR~=", min_size=1, max_size=12)


@settings(max_examples=200)
@given(WORDS)
@example("=")
@example("0b_")
@example("+_")
@example("._")
@example("2024-13-45")
def test_words_mean_what_both_readers_make_of_them(word: str) -> None:
    pyyaml = pytest.importorskip("yaml")
    from ruamel import yaml as ruamel

    text = f"a: {word}"
    try:
        leaf = leaves(text, "yaml", "f")["a"]
    except InputError:
        return
    ours = leaf.value if leaf.pyyaml is UNSET else leaf.pyyaml
    assert same(ours, read_by(pyyaml.safe_load, text, ours))
    theirs = read_by(ruamel.YAML(typ="safe", pure=True).load, text, leaf.value)
    assert isinstance(theirs, date) or same(leaf.value, theirs)


def read_by(reader: Callable[[str], Any], text: str, otherwise: Any) -> Any:
    """The value of a in another reader; what is expected where it fails."""
    try:
        return reader(text)["a"]
    except Exception:
        return otherwise


def same(ours: Any, theirs: Any) -> bool:
    return type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))


TAGS = [("!!str 5", "5"), ("!!int '5'", 5), ("!!float 5", 5.0), ("!!bool on", True), ("!!null ''", None), ("! 5", 5)]


@pytest.mark.parametrize(("word", "value"), TAGS)
def test_tags_of_plain_values_are_read(word: str, value: Any) -> None:
    assert same(leaves(f"a: {word}", "yaml", "f")["a"].value, value)


def test_merges_take_the_first_map_and_what_is_said_beside_them() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc:\n  z: 3\n  <<: [*a, *b]\n"
    assert tree(text, "yaml", "f")[0]["c"] == {"x": 1, "y": 1, "z": 3}
    assert leaves(text, "yaml", "f")["c.y"].line == 1


DEEP = "[" * 41 + "]" * 41
REFUSED = [
    ("yaml", "a: 1\nb: 2\na: 3\n", "f:3: .*key a is given twice, on lines 1 and 3"),
    ("yaml", "a:\n  <<: {}\n  <<: {}\n", "<< is given twice, on lines 2 and 3"),
    ("yaml", "a: 1\nb: !!python/object/apply:os.system [ls]\n", "f:2: .*tags that build objects"),
    ("yaml", "a: !Mine {b: 1}\n", "f:1: .*tags that build objects"),
    ("yaml", "a: !str 1\n", "tags that build objects"),
    ("yaml", "a: !!binary aGk=\n", "tags that build objects"),
    ("yaml", "a: !!int word\n", "'word' is no int"),
    ("yaml", "!!python/name:os.system a: 1\n", "tags that build objects"),
    ("yaml", "a: 1\n---\nb: 2\n", "f:2: .*second document"),
    ("yaml", "a: &a [*a]\n", "inside what it stands for"),
    ("yaml", "a: *b\n", "stands for nothing"),
    ("yaml", "a:\n  <<: 3\n", "f:2: .*merges a map"),
    ("yaml", "? [a]\n: 1\n", "a key is a word"),
    ("yaml", f"a: 1\nb: {DEEP}\n", "f:2: has deep nesting: more than 40"),
    ("yaml", f"a: {'9' * 5000}\n", "too many digits"),
    ("yaml", f"a: 0x{'9' * 5000}\n", "too many digits"),
    ("yaml", 'a: "\\ud800"\n', "half a character"),
    ("yaml", 'a: "\\UFFFFFFFF"\n', "not plain YAML"),
    ("yaml", "a: 1\n\tb: 2\n", "f:2: is not plain YAML"),
    ("yaml", "a: \x07\n", "f:1: is not plain YAML"),
    ("yaml", "- a\n", "no table of keys at its top, but a list"),
    ("yaml", "", "no table of keys at its top, but nothing"),
    ("yaml", "a: 1\n" + "#" * 250_000, "at most 250,000"),
    ("toml", "a = 1\nb = 2\na = 3\n", "f:3: .*key a is given twice, on lines 1 and 3"),
    ("toml", "[a]\nb.c = 1\n[x]\n[a]\n", "f:4: .*key a is given twice, on lines 1 and 4"),
    ("toml", "[a]\nb = {c = 1,\n c = 2}\n", "a.b.c is given twice"),
    ("toml", "[[a]]\nb = 1\n[a]\n", r"a\[0\] is given twice, on lines 1 and 3"),
    ("toml", "a = 1\n[a.b]\n", "f:2: is not TOML"),
    ("toml", "a = 1\nb =\n", "f:2: is not TOML"),
    ("toml", f"a = 1\nb = {DEEP}\n", "f:2: has deep nesting"),
    ("toml", f"a{'.a' * 40} = 1\n", "f:1: has deep nesting"),
    ("toml", f"a = 0x{'9' * 5000}\n", "too many digits"),
    ("toml", f"a = {'9' * 5000}\n", "not TOML"),
    ("json", '{"a": 1,\n"b": {"c": 1,\n\n"c": 2}}', "f:4: .*key c is given twice, on lines 2 and 4"),
    ("json", '{"a": NaN}', "no NaN"),
    ("json", '{"a": -Infinity}', "no NaN and no Infinity"),
    ("json", '{"a": 1, // why\n}', "JSON has no comments"),
    ("json", '{"a": 1,\n}', "f:1: .*comma before }"),
    ("json", '{"a": 1} 2', "the end is expected, not 2"),
    ("json", '{"a": 1', "a comma or } is expected, not the end of the file"),
    ("json", "{'a': 1}", "double quotes"),
    ("json", '{"a": True}', "true, false"),
    ("json", '{"a": "b', "not closed"),
    ("json", '{"a": "\\ud800"}', "half a character"),
    ("json", '{"a": "\\u12"}', "escape"),
    ("json", '{"a": 01}', "a comma or } is expected"),
    ("json", f'{{"a": {DEEP}}}', "deep nesting"),
    ("json", f'{{"a": {"9" * 5000}}}', "too many digits"),
    ("json", "", "it is empty"),
    ("json", "[1]", "no table of keys at its top, but a list"),
    ("json", '{"a": [' + "1," * 20_000 + "1]}", "more than 20,000 values"),
    ("xml", "", "unknown format"),
]


@pytest.mark.parametrize(("format", "text", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused_with_its_line(format: str, text: str, words: str) -> None:
    for read in (leaves, tree):
        with pytest.raises(InputError, match=words):
            read(text, format, "f")


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_forty_levels_are_read(format: str) -> None:
    text = '{"a": ' * 40 + "1" + "}" * 40
    assert leaves(text, format, "f") == {".".join("a" * 40): Leaf(1, 1)}


def bomb(link: str) -> str:
    rows = ["a0: &a0 {x: 1, y: 2, z: 3}", *(f"a{i}: &a{i} {link.format(i - 1)}" for i in range(1, 40))]
    return "\n".join(rows)


M = 1_000_000
SLOW = {  # what makes a reader slow: each ends soon, read or refused
    "aliases": ("yaml", bomb("[*a{0}, *a{0}, *a{0}, *a{0}, *a{0}, *a{0}, *a{0}, *a{0}, *a{0}]")),
    "alias keys": ("yaml", bomb("{{x: *a{0}, y: *a{0}, z: *a{0}}}")),
    "merges": ("yaml", bomb("{{<<: [*a{0}, *a{0}, *a{0}], b{0}: *a{0}}}")),
    "alias chain": ("yaml", "a: [&a0 [1]" + "".join(f", &a{i} [*a{i - 1}]" for i in range(1, 5000)) + "]"),
    "one alias, often": ("yaml", "a: &a [1, 2, 3]\nb: [" + "*a," * 50_000 + "]"),
    "a megabyte of values": ("yaml", "- 1\n" * (M // 4)),
    "open lists": ("yaml", "[" * 240_000),
    "open maps": ("yaml", "{" * 240_000),
    "open keys": ("yaml", "? " * 120_000),
    "open items": ("yaml", "- " * 120_000),
    "a long tag": ("yaml", "a: !" + "x" * 240_000 + " 1"),
    "folded words": ("yaml", "a: " + "x " * 120_000),
    "blank lines": ("yaml", "a: 1" + "\n" * 240_000),
    "directives": ("yaml", "%A x\n" * 48_000 + "---\n"),
    "values": ("yaml", "a: [" + "1," * 120_000 + "]"),
    "sixties": ("yaml", "a: 1" + ":1" * 120_000),
    "dotted": ("toml", "a" + ".a" * (M // 2) + " = 1"),
    "dotted header": ("toml", "[a" + ".a" * (M // 2) + "]"),
    "arrays": ("toml", "a = " + "[" * M),
    "tables": ("toml", "[[a]]\n" * (M // 6)),
    "quotes": ("toml", 'a = """' + '"" ' * (M // 3)),
    "backslashes": ("toml", 'a = "' + "\\\\" * (M // 2)),
    "lists": ("json", "[" * M),
    "an open text": ("json", '{"a": "' + "\\n" * (M // 2)),
    "many keys": ("json", "{" + ",".join(f'"k{i}": {i}' for i in range(60_000)) + "}"),
    "long keys": ("json", '{"' + "k" * (M // 2) + '": {' + ",".join(f'"{i}": 1' for i in range(10_000)) + "}}"),
    "a long key": ("json", '{"' + "k" * (M - 10) + '": 1}'),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_is_made_to_be_slow_ends_soon(name: str) -> None:
    format, text = SLOW[name]
    start = time.process_time()
    with suppress(InputError):
        leaves(text, format, "f")
    assert time.process_time() - start < 3


def test_a_bomb_says_that_it_is_one() -> None:
    with pytest.raises(InputError, match="expands to more than 20,000"):
        leaves(SLOW["aliases"][1], "yaml", "f")


def test_a_usual_file_is_read_at_once() -> None:
    text = "\n".join(f"s{i}:\n  lr: 1e-4\n  name: some words  # why\n  flag: true\n  n: {i}" for i in range(40))
    leaves(text, "yaml", "f")
    start = time.process_time()
    for _ in range(5):
        leaves(text, "yaml", "f")
    assert (time.process_time() - start) / 5 < 0.1  # 0.02 s on a quiet machine


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
CONTENT = st.dictionaries(
    st.text(max_size=5),
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
    max_size=5,
)


@settings(max_examples=200)
@given(CONTENT, st.sampled_from([None, 1]))
def test_json_is_read_as_it_was_written(content: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(content, indent=indent)
    assert tree(text, "json", "f")[0] == content
    assert all(line <= text.count("\n") + 1 for line in tree(text, "json", "f")[1].values())


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value if item is not None]
    return value


@settings(max_examples=200)
@given(CONTENT)
def test_toml_is_read_as_tomllib_reads_it_with_the_lines_of_its_keys(content: dict[str, Any]) -> None:
    text = tomlkit.dumps(without_none(content))
    try:
        expected = tomllib.loads(text)
    except ValueError:  # tomlkit writes characters that TOML does not allow
        return
    found, lines = tree(text, "toml", "f")
    assert found == expected
    rows = text.split("\n")
    for key in (key for key in found if key.isascii() and key.isalnum()):
        assert key in rows[lines[key] - 1]


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), st.text() | st.text("[]{}:,-&*!<>|?#'\"\\ \n\t=.ab01%~", max_size=80))
def test_no_text_breaks_a_reader(format: str, text: str) -> None:
    with suppress(InputError):
        assert all(isinstance(leaf, Leaf) for leaf in leaves(text, format, "f").values())


@settings(max_examples=300)
@given(st.data(), st.sampled_from(FORMATS))
def test_no_change_of_a_good_document_breaks_a_reader(data: st.DataObject, format: str) -> None:
    text = EXAMPLES[format]
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 8)))
        new = data.draw(
            st.sampled_from([*"[]{}:,-&*!|>#'\"\\\n\t=.a1%\x00\x85\u2028", "<<", "*x", "!!int ", '"""', "---\n"])
        )
        text = text[:start] + new + text[end:]
    with suppress(InputError):
        found = leaves(text, format, "f")
        assert all(1 <= leaf.line <= text.count("\n") + 1 for leaf in found.values())


def test_a_file_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\r\n")
    assert read_text(path) == read_text(str(path)) == "a: é\r\n"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("a".encode("utf-16"), "UTF-16"),
        (b"\x7fELF\0\0", "binary, not text: byte 4"),
        (b"a\nb\xff", r"not UTF-8 text \(line 2\)"),
        (b"a" * 101, "101 bytes, and at most 100"),
    ],
)
def test_what_is_no_text_file_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "odd"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=words) as caught:
        read_text(path, largest=100)
    assert (caught.value.field, caught.value.value) == ("file", str(path))


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.yaml").write_text("a: 1\n")
    odd = {
        tmp_path: "folder",
        tmp_path / "pipe": "a device or a pipe",
        "/dev/zero": "a device or a pipe",
        tmp_path / "tran.yaml": "did you mean .*train.yaml",
        tmp_path / "none" / "a": "no such file",
        "a\0b": "cannot be read",
        "a" * 5000: "cannot be read",
    }
    for path, words in odd.items():
        with pytest.raises(InputError, match=words):
            read_text(path)


def test_a_file_that_says_no_size_is_read_no_further_than_allowed() -> None:
    if not os.path.exists("/proc/self/status"):
        pytest.skip("there is no /proc here")
    with pytest.raises(InputError, match="more bytes"):
        read_text("/proc/self/status", largest=100)
