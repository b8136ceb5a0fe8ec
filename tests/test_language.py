"""Retired words stay out of names, help, messages, docs and comments; docs/glossary.md lists the words we keep."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = [
    "told",
    "askers",
    "asker",
    "handed",
    "mended",
    "unsaid",
    "nought",
    "heard",
    "learnt",
    "dialect",
    "dialects",
    "judged",
    "unasked",
    "whereof",
    "thereof",
]
PHRASES = (
    r"gone on\b",
    r"go(es)? on from",
    r"made anew",
    r"held against",
    r"stands? for\b",
    r"\b(?<![Tt]here )is no [A-Z]",
    r"\bwhole numbers?\b",
    r"\bthe house\b",
    r"of several ranks",
    r"in (its|their|our) own words",
    r"\bwhat is (said|told)\b",
)
SUFFIXES = (".py", ".md", ".html", ".js", ".css", ".toml", ".yml", ".yaml", ".cff", ".sh", ".ipynb", "")
SKIPPED = (
    "tests/test_language.py",
    "LICENSE",
    "benchmarks/results/",
    "benchmarks/data/",
    "docs/data/",
    "vendor/",
    "axe.",
)
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
FOUND = re.compile(r"\b_*[A-Za-z][A-Za-z_]*")


@cache
def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\n") if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    return [
        name
        for name in names
        if name
        and Path(name).suffix in SUFFIXES
        and not any(part in name for part in SKIPPED)
        and (ROOT / name).is_file()
    ]


def retired(text: str) -> Iterator[tuple[int, str]]:
    """Retired words and phrases with their lines; identifiers are split at underscores and capitals."""
    words, phrases = frozenset(WORDS), re.compile("|".join(PHRASES))
    quick = re.compile("|".join(WORDS), re.IGNORECASE)
    lowered = text.lower()
    if not phrases.search(text) and not any(word in lowered for word in WORDS):
        return
    for number, line in enumerate(text.split("\n"), 1):
        if found := phrases.search(line):
            yield number, found[0]
        if quick.search(line):
            for token in FOUND.findall(line):
                yield from ((number, part) for part in PART.findall(token) if part.lower() in words)


@pytest.mark.parametrize("folder", ["src", "docs", "tests", "benchmarks", "examples", ""])
def test_no_retired_word(folder: str) -> None:
    names = [name for name in files() if name.split("/")[0] == folder or (not folder and "/" not in name)]
    assert names
    found = [f"{n}:{line}: {word}" for n in names for line, word in retired((ROOT / n).read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["def told(x):", "class AskersTold:", "lora_told = 1", "It is gone on from.", "that is no Python", "_judged"],
)
def test_a_retired_word_would_be_found(text: str) -> None:
    assert list(retired(text))


@pytest.mark.parametrize("text", ["retold = stolen", "The run resumes.", "unheard_of", "shell_dialectic"])
def test_other_words_are_not_found(text: str) -> None:
    assert list(retired(text)) == []


def test_every_word_of_the_glossary_is_used() -> None:
    rows = re.findall(r"^\| ([a-z -]+) \| ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [row for row in rows if row not in ("word", "---")]
    assert 15 <= len(words) <= 30
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")).lower()
    assert [word for word in words if word not in source and word.replace(" ", "_") not in source] == []
