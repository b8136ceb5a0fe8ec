"""FSDP on one rank: gradients stay in one buffer and keep their values."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import recipe, train
from tests.engine.ranks import run
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from meshwright.engine.model import stage
from meshwright.engine.parallelize import fsdp
from meshwright.recipes import types


def both_ways(rank: int, world: int, settings: str, given: types.Recipe) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Train with one gradient buffer and with FSDP's own; return both results and the number of FSDP units."""
    units: list[FSDPModule] = []
    in_place = fsdp.reduce_in_place

    def counted(one: stage.Stage, stored: torch.dtype) -> None:
        in_place(one, stored)
        units.extend(module for module in one.modules() if isinstance(module, FSDPModule))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fsdp, "reduce_in_place", counted)
        ours = train(rank, world, settings, given, 2)
        patched.setattr(fsdp, "reduce_in_place", lambda *_: None)
        patched.setattr(_fsdp_collectives, fsdp.COPY_IN, fsdp._copy_in_chunks)
        return ours, train(rank, world, settings, given, 2), len(units)


@pytest.mark.parametrize(
    ("family", "reduce", "defer"),
    [
        pytest.param("llama", "fp32", True, marks=pytest.mark.slow),
        ("llama", "bf16", False),
        pytest.param("qwen3_moe", "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_one_gradient_buffer_changes_no_bit(family: str, reduce: Any, defer: bool) -> None:
    precision = types.Precision(compute="bf16", master="fp32", grads="fp32", reduce=reduce)
    given = recipe(types.Layout(micro_batch_size=2, defer_grad_sync=defer), precision=precision)
    given = msgspec.structs.replace(given, train=types.Train(global_batch_size=4, steps=100))
    [(ours, plain, units)] = run(1, both_ways, json.dumps(FAMILIES[family]), given)
    assert units > 2
    assert ours["losses"] == plain["losses"]
    for part in ("gradients", "weights"):
        assert ours[part].keys() == plain[part].keys()
        assert all(np.array_equal(value, plain[part][name]) for name, value in ours[part].items())
