"""Shipped files that are read table by table have the values of the whole file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import meshwright
from meshwright.recipes import index
from meshwright.toml_tables import TomlTables

SOURCE = Path(meshwright.__file__).parent
FILES = ("clusters/gpus.toml", "costs/memory_profiles.toml", "costs/memory_meshwright.toml", "models/numerics.toml")


@pytest.mark.parametrize("name", FILES)
def test_every_table_is_that_of_the_whole_file(name: str) -> None:
    path = SOURCE / name
    found: dict[str, object] = {}
    tables = TomlTables(path)
    for header, table in tables.items():
        *outer, last = header.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})  # type: ignore[assignment]
        place[last] = table
    assert found == tomllib.loads(path.read_text(encoding="utf-8"))
    assert len(tables) == len(set(tables))
    assert tables.every("aliases") == {name: table["aliases"] for name, table in tables.items() if "aliases" in table}
    with pytest.raises(KeyError):
        tables["no such table"]


def test_no_benchmark_has_the_name_of_a_model() -> None:
    known = [*index._name_aliases(False), *index._name_aliases(True)]
    assert [name for name in known if not index.is_known(name)] == []
    assert not index.is_known("llama3-8b")
