"""Models that see: equal to transformers' own on one process, and equal to one process in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.ranks import run
from tests.engine.vision_cases import FAMILIES, against_transformers, differences, given_recipe, train

from meshwright.engine.vision.parts import EYES, part_of
from meshwright.recipes import types

TOLERANCE = 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp": (2, {"tp": 2}),
    "tp_sp": (2, {"tp": 2, "sp": True}),
    "fsdp2_tp_sp": (4, {"tp": 2, "sp": True}),
    "pp": (2, {"pp": 2}),
    "cp": (2, {"cp": 2}),
    "ep": (2, {"ep": 2}),
    "recompute": (2, {"recompute": "full"}),
}
MOE = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
DEFAULT = (
    *(("gemma3", name) for name in ("fsdp2", "tp_sp", "pp")),
    *(("qwen2_5_vl", name) for name in ("tp", "fsdp2_tp_sp")),
    *(("qwen3_vl", name) for name in ("tp_sp", "cp")),
    ("qwen3_vl_moe", "ep"),
    ("qwen3_5_moe", "pp"),
    ("glm4v_moe", "recompute"),
)


def _composes(family: str, name: str) -> bool:
    return not (name == "ep" and family not in MOE) and not (name == "cp" and EYES[family].sees_whole_images)


SLOW = [(f, n) for f in FAMILIES for n in LAYOUTS if _composes(f, n) and (f, n) not in DEFAULT]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_equals_transformers(family: str) -> None:
    loss, far = run(1, against_transformers, family, given_recipe(types.Layout(), global_batch_size=2))[0]
    assert loss < TOLERANCE
    assert max(far.values()) < TOLERANCE, max(far, key=far.__getitem__)
    assert any(part_of(EYES[family], name) == "vision" for name in far)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_packed_documents_equal_single_ones(family: str) -> None:
    given = given_recipe(types.Layout(), packing=True, global_batch_size=2)
    loss, far = run(1, against_transformers, family, given)[0]
    assert loss < TOLERANCE
    assert max(far.values()) < TOLERANCE, max(far, key=far.__getitem__)


def _check(family: str, name: str) -> None:
    world, layout = LAYOUTS[name]
    found = differences(family, world, given_recipe(types.Layout(**layout)))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(("family", "name"), DEFAULT)
def test_layout_trains_like_one_process(family: str, name: str) -> None:
    _check(family, name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), SLOW)
def test_every_layout_trains_like_one_process(family: str, name: str) -> None:
    _check(family, name)


@pytest.mark.parametrize(
    ("family", "frozen"), [("qwen3_vl", ("vision",)), ("gemma3", ("language", "vision")), ("qwen2_5_vl", ("language",))]
)
def test_frozen_parts_have_no_gradient_and_stay(family: str, frozen: tuple[str, ...]) -> None:
    before = run(1, train, family, given_recipe(types.Layout(), freeze=frozen), 0)[0]["weights"]
    after = run(2, train, family, given_recipe(types.Layout(), freeze=frozen), 2)[0]
    for name, gradient in after["gradients"].items():
        is_frozen = part_of(EYES[family], name) in frozen
        assert (gradient is None) == is_frozen, name
        assert np.array_equal(before[name], after["weights"][name]) == is_frozen or name.endswith("k_proj.bias"), name
