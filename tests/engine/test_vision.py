"""Vision-language models: one process equals transformers, and every layout equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.engine.ranks import run
from tests.engine.vision_cases import (
    FAMILIES,
    SOMETIMES,
    against_transformers,
    differences,
    folder_round_trip,
    given_recipe,
    train,
)
from torch.nn.attention.flex_attention import flex_attention

from meshwright.engine.attention.flex import attend_flex
from meshwright.engine.attention.local import attend_local
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.vision import image_groups
from meshwright.engine.vision.vision_modules import VISION_MODULES, vision_part
from meshwright.recipes import types

TOLERANCE = 1e-5
# transformers' fp32 gradients of these are that far from fp64 (test_delta_rule.py): the decays of a chunk cancel.
ROUGH, ROUGH_TOLERANCE = ("A_log", "dt_bias"), 1e-4
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
DEFAULT = (  # Qwen2.5-VL trains with tp and sp below, with adapters
    ("gemma3", "pp"),
    ("qwen3_vl", "cp"),
    ("qwen3_vl_moe", "ep"),
)


def _composes(family: str, name: str) -> bool:
    """Return whether no rule rejects the combination: experts with tp need sp, and whole images stay on one rank."""
    if name in ("ep", "tp"):
        return (family in MOE) == (name == "ep")
    return not (name == "cp" and VISION_MODULES[family].whole_images)


SLOW = [(f, n) for f in FAMILIES for n in LAYOUTS if _composes(f, n) and (f, n) not in DEFAULT]


def _limit(name: str) -> float:
    return ROUGH_TOLERANCE if name.endswith(ROUGH) else TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_equals_transformers(family: str) -> None:
    loss, error_of = run(1, against_transformers, family, given_recipe(types.Layout(), global_batch_size=2))[0]
    assert loss < TOLERANCE
    assert {name: off for name, off in error_of.items() if off >= _limit(name)} == {}
    assert any(vision_part(VISION_MODULES[family], name) == "vision" for name in error_of)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_packed_documents_equal_unpacked_ones(family: str) -> None:
    given = given_recipe(types.Layout(), packing=True, global_batch_size=2)
    loss, error_of = run(1, against_transformers, family, given)[0]
    assert loss < TOLERANCE
    assert max(error_of.values()) < TOLERANCE, max(error_of, key=error_of.__getitem__)


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


@pytest.mark.parametrize("family", ["qwen3_vl"])
def test_ranks_without_an_image_join_the_gathers(family: str) -> None:
    """One rank of two has no image in a step: it takes part in the encoder's all-gathers and adds no gradient."""
    found = differences(family, 2, given_recipe(types.Layout(), dataset=SOMETIMES))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    ("family", "frozen"),
    [pytest.param("qwen3_vl", ("vision",), marks=pytest.mark.slow), ("gemma3", ("language", "vision"))],
)
def test_frozen_parts_have_no_gradient_and_do_not_change(family: str, frozen: tuple[str, ...]) -> None:
    before = run(1, train, family, given_recipe(types.Layout(), freeze=frozen), 0)[0]["weights"]
    after = run(2, train, family, given_recipe(types.Layout(), freeze=frozen), 2)[0]
    for name, gradient in after["gradients"].items():
        is_frozen = vision_part(VISION_MODULES[family], name) in frozen
        assert (gradient is None) == is_frozen, name
        assert np.array_equal(before[name], after["weights"][name]) == is_frozen or name.endswith("k_proj.bias"), name


def test_adapters_are_only_in_the_language_model() -> None:
    found = differences("qwen2_5_vl", 2, _adapted(types.Layout(tp=2, sp=True)))
    assert max(found.values()) < TOLERANCE, found
    gradients = run(1, train, "qwen2_5_vl", _adapted(types.Layout()), 1)[0]["gradients"]
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    assert trained
    assert all("lora_" in name and vision_part(VISION_MODULES["qwen2_5_vl"], name) == "language" for name in trained)


def _adapted(layout: types.Layout) -> types.Recipe:
    return msgspec.structs.replace(given_recipe(layout), goal="peft", peft=types.Peft(rank=4))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl_moe", "glm4v_moe"])
def test_folder_round_trip(family: str, tmp_path: Path) -> None:
    error_of, names = run(1, folder_round_trip, family, str(tmp_path))[0]
    assert error_of < TOLERANCE
    assert names == ([], [], [])  # missing, unexpected, mismatched


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_folder_round_trip_of_every_family(family: str, tmp_path: Path) -> None:
    test_folder_round_trip(family, tmp_path)


def flex_of_images(rank: int, world: int) -> float:
    """Return the error of flex attention's image mask against the eager one, with windows and documents."""
    torch.manual_seed(0)
    tokens = 300
    q, k, v = (torch.randn(2, 2, tokens, 8) for _ in range(3))
    at = torch.full((2, tokens), -1)
    at[0, 20:160], at[0, 200:230], at[1, 120:260] = torch.arange(140), torch.arange(30), torch.arange(140)
    groups = image_groups(at)
    documents = (torch.arange(tokens) >= 190).long().expand(2, -1)
    worst = 0.0
    for window in (None, 50):
        for given in (None, documents):
            terms = AttentionSpec(0.3, True, window)
            found = attend_flex(q, k, v, terms, None, given, groups)
            expected = attend_local(q, k, v, terms, None, given, "eager", groups=groups)
            worst = max(worst, float((found - expected).abs().max()))
    return worst


def test_flex_attention_is_bidirectional_within_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.attention.flex._compiled_flex", lambda: flex_attention)
    assert run(1, flex_of_images)[0] < TOLERANCE
