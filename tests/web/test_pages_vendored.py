"""The scripts that are shipped are those of their table, each with its licence."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

import pytest

VENDOR = resources.files("meshwright.web") / "static" / "vendor"
ROWS = [
    [cell.strip() for cell in line.strip("| \n").split("|")]
    for line in (VENDOR / "VENDORED.md").read_text().splitlines()
    if re.match(r"\| \S+\.js ", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_script_is_the_one_of_the_table(row: list[str]) -> None:
    name, _, version, _, _, licence, _, checksum = row
    assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == checksum
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert len((VENDOR / licence).read_text()) > 300


def test_nothing_is_shipped_that_the_table_does_not_name() -> None:
    scripts = {one.name for one in VENDOR.iterdir() if one.name.endswith(".js")}
    assert scripts == {row[0] for row in ROWS}


def test_no_script_or_style_of_ours_names_another_place() -> None:
    static = resources.files("meshwright.web") / "static"
    for name in ("app.css", "app.js", "charts.js", "explore.js", "theme.js"):
        text = (static / name).read_text()
        assert not re.search(r"https?://|url\(|@import|\beval\b|new Function|innerHTML\s*=", text), name
