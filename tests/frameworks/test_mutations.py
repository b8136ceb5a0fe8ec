"""Mutated files give a finding or an InputError; they never crash or hang."""

from __future__ import annotations

import importlib
import time
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case

from meshwright import api, frameworks
from meshwright.errors import InputError

SECONDS = 3.0  # of CPU time for one file
MODULES = ("automodel", "torchtitan", "kempnerforge", "megatron_lm", "megatron_bridge", "deepspeed", "accelerate")
ODD = (
    "", "-1", "0", "1e400", "nan", "99999999999999999999", "true", "null", '""', "[]", "{}", "[[[[", "${X}", "=",
    "$(rm -rf /)", "`id`", "\x00", "\ufeff", "é", "\t", "\\", "'", '"', "a: &x [*x]", "!!python/object:os.system x",
    "<<: *a", "--", "${A:-${B:-${C}}}", "((((", "%YAML 9", "---", "...", "#", "0x10", "1_000", ".inf", "2024-13-45",
)  # fmt: skip


@cache
def originals() -> tuple[tuple[str, str, str], ...]:
    """Return every test config: framework, file name, text."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"tests.frameworks.test_{name}")
        cases: tuple[Case, ...] = module.CASES
        found += [(name.replace("_", "-"), case.path or module.PATH, case.text) for case in cases]
    return tuple(found)


def test_there_are_at_least_forty_configs() -> None:
    assert len(originals()) >= 40
    assert {framework for framework, _, _ in originals()} == set(frameworks.NAMES)


def test_every_finding_has_a_catalog_entry() -> None:
    ids = set()
    for name in MODULES:
        module = importlib.import_module(f"tests.frameworks.test_{name}")
        ids |= {rule for case in module.CASES for rule, _ in case.expected}
    for rule in sorted(ids):
        (found,) = [one for one in api.rule_catalogue(rule) if one.id == rule]
        assert found.symptom
        assert found.cause


GPUS = st.sampled_from([None, "8xH100", "2x8xB200"])


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, str, str]:
    """A config with deleted, duplicated and swapped lines, and replaced tokens."""
    framework, path, text = draw(st.sampled_from(originals()))
    for _ in range(draw(st.integers(1, 4))):
        lines = text.splitlines(keepends=True) or [""]
        place = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(("drop", "double", "swap", "cut", "word", "insert", "indent", "join"))):
            case "drop":
                del lines[place]
            case "double":
                lines.insert(place, lines[place])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[place], lines[other] = lines[other], lines[place]
            case "cut":
                lines[place] = lines[place][: draw(st.integers(0, len(lines[place])))]
            case "word":
                words = lines[place].split(" ")
                words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(ODD))
                lines[place] = " ".join(words)
            case "insert":
                lines.insert(place, draw(st.one_of(st.sampled_from(ODD), st.text(max_size=40))) + "\n")
            case "indent":
                lines[place] = " " * draw(st.integers(1, 9)) + lines[place]
            case "join":
                lines[place] = lines[place].rstrip("\n")
        text = "".join(lines)
    return framework, path, text


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(mutated(), GPUS)
def test_mutated_file_never_crashes_or_hangs(file: tuple[str, str, str], gpus: str | None) -> None:
    check_mutated(file, gpus)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
@given(mutated(), GPUS)
def test_a_thousand_mutated_files_never_crash_or_hang(file: tuple[str, str, str], gpus: str | None) -> None:
    check_mutated(file, gpus)


def check_mutated(file: tuple[str, str, str], gpus: str | None) -> None:
    """Check a file, which must end in time, with a result or an input error."""
    framework, path, text = file
    began = time.process_time()
    try:
        result = frameworks.check(frameworks.framework(framework), frameworks.content_of(text, path), gpus=gpus)
    except InputError:
        result = None
    for finding in result.findings if result else ():
        assert finding.message
        assert 0 <= finding.line <= text.count("\n") + 1
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("suffix", [".yaml", ".toml", ".json", ".sh", ".py"])
@settings(max_examples=20)
@given(st.text(max_size=300))
def test_any_text_is_parsed_or_rejected(suffix: str, text: str) -> None:
    with suppress(InputError):
        content = frameworks.content_of(text, f"file{suffix}")
        frameworks.check(frameworks.detect_framework(content), content)
