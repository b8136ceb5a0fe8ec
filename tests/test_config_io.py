"""Config parsers: every value has its line number; invalid and hostile input is rejected quickly."""

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

from meshwright.config_io import FORMATS, Leaf, parse_leaves, parse_tree, read_text
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


def values_and_lines(text: str, format: str) -> dict[str, tuple[Any, int]]:
    return {key: (leaf.value, leaf.line) for key, leaf in parse_leaves(text, format, "f").items()}


def test_yaml_values_have_their_lines() -> None:
    assert values_and_lines(YAML, "yaml") == {
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


def test_toml_values_have_their_lines() -> None:
    assert values_and_lines(TOML, "toml") == {
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


def test_json_values_have_their_lines() -> None:
    assert values_and_lines(JSON, "json") == {
        "a": (1, 1),
        "b.c": ([1, 2.5, math.inf], 3),
        "b.d[0].x": (None, 4),
        "b.d[1]": ([], 5),
        '"a.b"': ("é\n", 6),
        "e": ({}, 8),
    }


@pytest.mark.parametrize("format", FORMATS)
def test_lines_are_unchanged_by_crlf_and_bom(format: str) -> None:
    windows = "\ufeff" + EXAMPLES[format].replace("\n", "\r\n")
    assert parse_tree(windows, format, "f")[1] == parse_tree(EXAMPLES[format], format, "f")[1]


def test_tree_has_lines_of_maps_and_lists() -> None:
    content, lines = parse_tree("a:\n  b:\n    - c: 1\n    - 2\n", "yaml", "f")
    assert content == {"a": {"b": [{"c": 1}, 2]}}
    assert lines == {"a": 1, "a.b": 2, "a.b[0]": 3, "a.b[0].c": 3, "a.b[1]": 4}


@pytest.mark.parametrize("key", ["a.b", "a[0]", 'say "x"', "", "two\nlines"])
def test_keys_that_look_like_paths_are_quoted(key: str) -> None:
    (name,) = parse_leaves(json.dumps({key: 1}), "json", "f")
    assert name == json.dumps(key)


PYYAML = [  # scalar, YAML 1.2 value, PyYAML value
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
def test_differing_pyyaml_value_is_recorded(word: str, value: Any, pyyaml: Any) -> None:
    leaf = parse_leaves(f"a: {word}", "yaml", "f")["a"]
    assert (leaf.value, type(leaf.value)) == (value, type(value))
    assert (leaf.pyyaml, type(leaf.pyyaml)) == (pyyaml, type(pyyaml))
    assert parse_leaves(f"a: '{word}'", "yaml", "f")["a"] == Leaf(word, 1)
    assert parse_leaves(f"a: [{word}, x]", "yaml", "f")["a"].pyyaml == [pyyaml, "x"]


@pytest.mark.parametrize("word", SAME)
def test_equal_pyyaml_value_is_unset(word: str) -> None:
    assert parse_leaves(f"a: [{word}]", "yaml", "f")["a"].pyyaml is UNSET


def test_yaml_1_1_directive_is_honored() -> None:
    assert parse_leaves("%YAML 1.1\n---\na: yes\n", "yaml", "f")["a"] == Leaf(True, 3)


SCALARS = st.text("0123456789_+-.:eEoxbBaAtTfFnNyYsSlLuUiIrR~=", min_size=1, max_size=12)


@settings(max_examples=40)
@given(SCALARS)
@example("=")
@example("0b_")
@example("+_")
@example("._")
@example("2024-13-45")
def test_scalars_match_pyyaml_and_ruamel(word: str) -> None:
    pyyaml = pytest.importorskip("yaml")
    from ruamel import yaml as ruamel

    text = f"a: {word}"
    try:
        leaf = parse_leaves(text, "yaml", "f")["a"]
    except InputError:
        return
    ours = leaf.value if leaf.pyyaml is UNSET else leaf.pyyaml
    assert same(ours, read_by(pyyaml.safe_load, text, ours))
    theirs = read_by(ruamel.YAML(typ="safe", pure=True).load, text, leaf.value)
    assert isinstance(theirs, date) or same(leaf.value, theirs)


def read_by(reader: Callable[[str], Any], text: str, default: Any) -> Any:
    """Return the value of `a` from another parser, or `default` if it fails."""
    try:
        return reader(text)["a"]
    except Exception:
        return default


def same(ours: Any, theirs: Any) -> bool:
    return type(ours) is type(theirs) and (ours == theirs or (ours != ours and theirs != theirs))


TAGS = [("!!str 5", "5"), ("!!int '5'", 5), ("!!float 5", 5.0), ("!!bool on", True), ("!!null ''", None), ("! 5", 5)]


@pytest.mark.parametrize(("word", "value"), TAGS)
def test_scalar_tags_are_applied(word: str, value: Any) -> None:
    assert same(parse_leaves(f"a: {word}", "yaml", "f")["a"].value, value)


def test_first_merged_map_wins_and_explicit_keys_override() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc:\n  z: 3\n  <<: [*a, *b]\n"
    assert parse_tree(text, "yaml", "f")[0]["c"] == {"x": 1, "y": 1, "z": 3}
    assert parse_leaves(text, "yaml", "f")["c.y"].line == 1


DEEP = "[" * 41 + "]" * 41
REJECTED = [
    ("yaml", "a: 1\nb: 2\na: 3\n", "f:3: .*key a is set twice, on lines 1 and 3"),
    ("yaml", "a:\n  <<: {}\n  <<: {}\n", "<< is set twice, on lines 2 and 3"),
    ("yaml", "a: 1\nb: !!python/object/apply:os.system [ls]\n", "f:2: .*tags that construct objects"),
    ("yaml", "a: !Mine {b: 1}\n", "f:1: .*tags that construct objects"),
    ("yaml", "a: !str 1\n", "tags that construct objects"),
    ("yaml", "a: !!binary aGk=\n", "tags that construct objects"),
    ("yaml", "a: !!int word\n", "'word' is not a valid int"),
    ("yaml", "!!python/name:os.system a: 1\n", "tags that construct objects"),
    ("yaml", "a: 1\n---\nb: 2\n", "f:2: .*second document"),
    ("yaml", "a: &a [*a]\n", "refers to a node that contains it"),
    ("yaml", "a: *b\n", "is not defined"),
    ("yaml", "a:\n  <<: 3\n", "f:2: .*merges a map"),
    ("yaml", "? [a]\n: 1\n", "a key must be a string"),
    ("yaml", f"a: 1\nb: {DEEP}\n", "f:2: is nested too deeply: more than 40"),
    ("yaml", f"a: {'9' * 5000}\n", "too many digits"),
    ("yaml", f"a: 0x{'9' * 5000}\n", "too many digits"),
    ("yaml", 'a: "\\ud800"\n', "lone surrogate"),
    ("yaml", 'a: "\\UFFFFFFFF"\n', "not plain YAML"),
    ("yaml", "a: 1\n\tb: 2\n", "f:2: is not plain YAML"),
    ("yaml", "a: \x07\n", "f:1: is not plain YAML"),
    ("yaml", "- a\n", "table of keys at the top level, not a list"),
    ("yaml", "", "table of keys at the top level, not nothing"),
    ("yaml", "a: 1\n" + "#" * 250_000, "at most 250,000"),
    ("toml", "a = 1\nb = 2\na = 3\n", "f:3: .*key a is set twice, on lines 1 and 3"),
    ("toml", "[a]\nb.c = 1\n[x]\n[a]\n", "f:4: .*key a is set twice, on lines 1 and 4"),
    ("toml", "[a]\nb = {c = 1,\n c = 2}\n", "a.b.c is set twice"),
    ("toml", "[[a]]\nb = 1\n[a]\n", r"a\[0\] is set twice, on lines 1 and 3"),
    ("toml", "a = 1\n[a.b]\n", "f:2: is not valid TOML"),
    ("toml", "a = 1\nb =\n", "f:2: is not valid TOML"),
    ("toml", f"a = 1\nb = {DEEP}\n", "f:2: is nested too deeply"),
    ("toml", f"a{'.a' * 40} = 1\n", "f:1: is nested too deeply"),
    ("toml", f"a = 0x{'9' * 5000}\n", "too many digits"),
    ("toml", f"a = {'9' * 5000}\n", "not valid TOML"),
    ("json", '{"a": 1,\n"b": {"c": 1,\n\n"c": 2}}', "f:4: .*key c is set twice, on lines 2 and 4"),
    ("json", '{"a": NaN}', "no NaN"),
    ("json", '{"a": -Infinity}', "no NaN or Infinity"),
    ("json", '{"a": 1, // why\n}', "JSON has no comments"),
    ("json", '{"a": 1,\n}', "f:1: .*trailing comma before }"),
    ("json", '{"a": 1} 2', "expected the end of the file, found 2"),
    ("json", '{"a": 1', "expected a comma or }, found the end of the file"),
    ("json", "{'a': 1}", "double quotes"),
    ("json", '{"a": True}', "true, false"),
    ("json", '{"a": "b', "not closed"),
    ("json", '{"a": "\\ud800"}', "lone surrogate"),
    ("json", '{"a": "\\u12"}', "escape"),
    ("json", '{"a": 01}', "expected a comma or }"),
    ("json", f'{{"a": {DEEP}}}', "nested too deeply"),
    ("json", f'{{"a": {"9" * 5000}}}', "too many digits"),
    ("json", "", "the file is empty"),
    ("json", "[1]", "table of keys at the top level, not a list"),
    ("json", '{"a": [' + "1," * 20_000 + "1]}", "more than 20,000 values"),
    ("xml", "", "unknown format"),
]


@pytest.mark.parametrize(("format", "text", "pattern"), REJECTED)
def test_invalid_documents_are_rejected_with_their_line(format: str, text: str, pattern: str) -> None:
    for read in (parse_leaves, parse_tree):
        with pytest.raises(InputError, match=pattern):
            read(text, format, "f")


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_forty_levels_of_nesting_are_allowed(format: str) -> None:
    text = '{"a": ' * 40 + "1" + "}" * 40
    assert parse_leaves(text, format, "f") == {".".join("a" * 40): Leaf(1, 1)}


def bomb(link: str) -> str:
    rows = ["a0: &a0 {x: 1, y: 2, z: 3}", *(f"a{i}: &a{i} {link.format(i - 1)}" for i in range(1, 40))]
    return "\n".join(rows)


M = 1_000_000
SLOW = {  # inputs that make parsers slow: each must end quickly, parsed or rejected
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
    "sexagesimal": ("yaml", "a: 1" + ":1" * 120_000),
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
def test_hostile_input_ends_quickly(name: str) -> None:
    format, text = SLOW[name]
    start = time.process_time()
    with suppress(InputError):
        parse_leaves(text, format, "f")
    assert time.process_time() - start < 3


def test_alias_bomb_is_reported_as_expansion() -> None:
    with pytest.raises(InputError, match="expands to more than 20,000"):
        parse_leaves(SLOW["aliases"][1], "yaml", "f")


def test_typical_file_parses_in_under_100_ms() -> None:
    text = "\n".join(f"s{i}:\n  lr: 1e-4\n  name: some words  # why\n  flag: true\n  n: {i}" for i in range(40))
    parse_leaves(text, "yaml", "f")
    start = time.process_time()
    for _ in range(5):
        parse_leaves(text, "yaml", "f")
    assert (time.process_time() - start) / 5 < 0.1  # 0.02 s on a quiet machine


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
CONTENT = st.dictionaries(
    st.text(max_size=5),
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
    max_size=5,
)


@settings(max_examples=20)
@given(CONTENT, st.sampled_from([None, 1]))
def test_json_round_trips(content: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(content, indent=indent)
    assert parse_tree(text, "json", "f")[0] == content
    assert all(line <= text.count("\n") + 1 for line in parse_tree(text, "json", "f")[1].values())


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value if item is not None]
    return value


@settings(max_examples=20)
@given(CONTENT)
def test_toml_matches_tomllib_and_lines_match_keys(content: dict[str, Any]) -> None:
    text = tomlkit.dumps(without_none(content))
    try:
        expected = tomllib.loads(text)
    except ValueError:  # tomlkit writes characters that TOML does not allow
        return
    found, lines = parse_tree(text, "toml", "f")
    assert found == expected
    rows = text.split("\n")
    for key in (key for key in found if key.isascii() and key.isalnum()):
        assert key in rows[lines[key] - 1]


@settings(max_examples=40)
@given(st.sampled_from(FORMATS), st.text() | st.text("[]{}:,-&*!<>|?#'\"\\ \n\t=.ab01%~", max_size=80))
def test_arbitrary_text_never_crashes_a_parser(format: str, text: str) -> None:
    with suppress(InputError):
        assert all(isinstance(leaf, Leaf) for leaf in parse_leaves(text, format, "f").values())


@settings(max_examples=60)
@given(st.data(), st.sampled_from(FORMATS))
def test_mutated_documents_never_crash_a_parser(data: st.DataObject, format: str) -> None:
    text = EXAMPLES[format]
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 8)))
        new = data.draw(
            st.sampled_from([*"[]{}:,-&*!|>#'\"\\\n\t=.a1%\x00\x85\u2028", "<<", "*x", "!!int ", '"""', "---\n"])
        )
        text = text[:start] + new + text[end:]
    with suppress(InputError):
        found = parse_leaves(text, format, "f")
        assert all(1 <= leaf.line <= text.count("\n") + 1 for leaf in found.values())


def test_file_is_read_as_utf8_text(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\r\n")
    assert read_text(path) == read_text(str(path)) == "a: é\r\n"


@pytest.mark.parametrize(
    ("raw", "pattern"),
    [
        ("a".encode("utf-16"), "UTF-16"),
        (b"\x7fELF\0\0", "binary, not text: byte 4"),
        (b"a\nb\xff", r"not UTF-8 text \(line 2\)"),
        (b"a" * 101, "101 bytes; at most 100"),
    ],
)
def test_non_text_files_are_rejected(tmp_path: Path, raw: bytes, pattern: str) -> None:
    path = tmp_path / "odd"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=pattern) as caught:
        read_text(path, max_bytes=100)
    assert (caught.value.field, caught.value.value) == ("file", str(path))


def test_non_files_are_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.yaml").write_text("a: 1\n")
    odd = {
        tmp_path: "directory",
        tmp_path / "pipe": "a device or a pipe",
        "/dev/zero": "a device or a pipe",
        tmp_path / "tran.yaml": "did you mean .*train.yaml",
        tmp_path / "none" / "a": "no such file",
        "a\0b": "cannot be read",
        "a" * 5000: "cannot be read",
    }
    for path, pattern in odd.items():
        with pytest.raises(InputError, match=pattern):
            read_text(path)


def test_file_that_reports_no_size_is_read_up_to_the_limit() -> None:
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc")
    with pytest.raises(InputError, match="more than 100 bytes"):
        read_text("/proc/self/status", max_bytes=100)
