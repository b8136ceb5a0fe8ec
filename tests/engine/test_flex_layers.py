"""Packed samples through flex attention in eager and compiled layers, on CPU: the path that GPUs take.

CPUs run flex attention without a kernel, so this tests what reaches it; `test_attention_gpu.py` tests the kernels.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.engine.parity import FAMILIES, FLOOR, _relative, alone, recipe, train
from tests.engine.ranks import run
from torch.nn.attention import flex_attention as torch_flex

from meshwright.engine.attention import flex, local, mask_tables
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.model import stage
from meshwright.recipes import types

TOKENS = 160  # more than one block, and the last is not full
WINDOWS = {"llama": 1, "gemma3_text": 2, "gpt_oss": 2}  # kinds of masks; gpt_oss has graph breaks and sinks
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "eager, operations recomputed": ("llama", False, {"recompute": "selective"}),
    "compiled": ("llama", True, {}),
    "compiled, operations recomputed": ("llama", True, {"recompute": "selective"}),
    "compiled, core recomputed": ("llama", True, {"recompute": "selective", "recompute_modules": ("core_attn",)}),
    "compiled, all recomputed": ("gemma3_text", True, {"recompute": "full"}),
    "compiled, sinks": ("gpt_oss", True, {}),
}
QUICK = "compiled, operations recomputed"
MICRO_BATCHES = 2
OPERATION_CHECKS = ("test_schema", "test_faketensor")


def packed_recipe(compiled: bool, layout: dict[str, Any]) -> types.Recipe:
    return recipe(
        types.Layout(micro_batch_size=2, **layout),
        data=types.Data(seq_length=TOKENS, packing=True),
        train=types.Train(global_batch_size=2 * MICRO_BATCHES, steps=1),
        kernels=types.Kernels(compile=compiled),
    )


def train_as_on_gpu(family: str, given: types.Recipe) -> tuple[dict[str, Any], int]:
    """Train with flex attention; return the result and how often block tables were built, always outside layers."""
    built = 0

    def outside(*args: Any) -> flex.BlockTables:
        nonlocal built
        built += 1
        assert not torch.compiler.is_compiling()
        return original(*args)

    def inside(*args: Any) -> flex.BlockTables:
        raise AssertionError("attention builds block tables again")

    original = mask_tables.block_tables
    local.on_gpu = lambda tensor: True  # type: ignore[attr-defined]
    stage.uses_tables = lambda hidden: True  # type: ignore[attr-defined]
    flex._compiled_flex = lambda: torch_flex.flex_attention  # type: ignore[assignment]
    torch_flex._validate_device = lambda *tensors: None  # it rejects gradients on CPU, which eager flex computes
    mask_tables.block_tables, flex.block_tables = outside, inside  # type: ignore[attr-defined]
    return train(0, 1, json.dumps(FAMILIES[family]), given, 1), built


def flex_differences(rank: int, world: int, name: str) -> tuple[float, int]:
    family, compiled, layout = CASES[name]
    given = packed_recipe(compiled, layout)
    expected = train(0, 1, json.dumps(FAMILIES[family]), alone(given, 1), 1)
    found, built = train_as_on_gpu(family, given)
    floor = FLOOR["gradients"] * expected["norms"][0]
    worst = max(_relative(found["gradients"][one], expected["gradients"][one], floor) for one in expected["gradients"])
    return worst, built


@pytest.mark.parametrize("name", [one if one == QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES])
def test_layers_share_tables_that_are_built_once_per_micro_batch_and_window(name: str) -> None:
    worst, built = run(1, flex_differences, name, timeout=300)[0]
    assert worst < 1e-4
    assert built == MICRO_BATCHES * WINDOWS[CASES[name][0]]


def table_strides(rank: int, world: int) -> None:
    for batch in (1, 3):
        ids = torch.arange(300).expand(batch, 300) // 70
        tables = flex.block_tables(300, AttentionSpec(1.0, True, 150), ids, torch.device("cpu"))
        for table in tables:
            assert table.dtype == torch.int32
            assert table.stride() == torch.empty(table.shape).stride()
        torch.library.opcheck(
            flex._block_tables, (300, True, 150, ids, None, torch.device("cpu")), test_utils=OPERATION_CHECKS
        )


def test_tables_have_plain_strides_also_in_the_head_dimension_of_size_one() -> None:
    run(1, table_strides)
