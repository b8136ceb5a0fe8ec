"""Published numbers beyond a model's shape have a source and reach the export."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from meshwright.models import numerics

FAMILIES = tomllib.loads(Path(numerics.__file__).with_name("numerics.toml").read_text(encoding="utf-8"))["families"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_names_its_source(family: str) -> None:
    assert len(FAMILIES[family]["source"]) > 20


@pytest.mark.parametrize("size", ["7b", "13b", "29b", "70b", "moe"])
def test_kempner_models_have_the_base_of_their_presets(size: str) -> None:
    found = numerics.numerics_of(f"kempner_{size}")
    assert (found.rope_theta, found.norm_eps) == (500_000, 1e-5)
