"""Wan and FLUX: every layout trains like one process, and one process like diffusers itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel  # once here, not on every rank
from tests.engine.ranks import run
from torch.distributed.tensor import DTensor

from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.build import diffusers_model
from meshwright.engine.diffusion.config import DenoiserConfig, config_for, denoiser_config, tiny
from meshwright.engine.diffusion.data import open_latents
from meshwright.engine.diffusion.trainer import DiffusionTrainer
from meshwright.engine.mesh import build_mesh
from meshwright.recipes import types

CLASSES = {"wan_1_3b": WanTransformer3DModel, "flux_12b": FluxTransformer2DModel}
MODELS = tuple(CLASSES)
TOLERANCE = 1e-5


def recipe(model: str, layout: types.Layout, **sections: Any) -> types.Recipe:
    """fp32 and plain SGD, which hides no gradient of the wrong scale."""
    given = {
        "precision": types.Precision(compute="fp32"),
        "optimizer": types.Optimizer(name="sgd", lr=0.05, beta1=0.0, weight_decay=0.0),
        "schedule": types.Schedule(name="constant", warmup_steps=0),
        "train": types.Train(global_batch_size=8, steps=100),
        "data": types.Data(seq_length=16),
    }
    return types.Recipe(
        name="parity", model=model, goal="pretrain", cluster="1xH100", layout=layout, **{**given, **sections}
    )


def small(model: str) -> DenoiserConfig:
    """Two layers of each kind."""
    return tiny(config_for(recipe(model, types.Layout())), 4 if model == "flux_12b" else 2)


def trainer_of(given: types.Recipe) -> DiffusionTrainer:
    """A trainer on this rank's process group."""
    config = small(given.model)
    mesh = build_mesh(given.layout, "cpu")
    return DiffusionTrainer(given, config, mesh, torch.device("cpu"), open_latents(given, config))


def train(rank: int, world: int, given: types.Recipe, steps: int = 2) -> dict[str, Any]:
    """Losses, the gradients of the first step and the weights after the last."""
    trainer = trainer_of(given)
    found: dict[str, Any] = {}
    finish = trainer.finish_gradients

    def finish_and_keep() -> torch.Tensor:
        norm = finish()
        found.setdefault("gradients", {n: _whole(p.grad) for n, p in trainer.stages[0].named_parameters()})
        return norm

    trainer.finish_gradients = finish_and_keep  # type: ignore[method-assign]
    results = [trainer.step(step) for step in range(steps)]
    found["losses"] = [result.loss for result in results]
    found["norms"] = [result.grad_norm for result in results]
    found["weights"] = {n: _whole(p.detach()) for n, p in trainer.stages[0].named_parameters()}
    return found


def _whole(value: torch.Tensor | None) -> Any:
    assert value is not None
    return (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()


@lru_cache(maxsize=8)
def alone(model: str) -> dict[str, Any]:
    """One process with the same micro batches."""
    return run(1, train, recipe(model, types.Layout(micro_batch_size=2)))[0]  # type: ignore[no-any-return]


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, {}, {}),
    "ddp": (2, {"strategy": "ddp"}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "tp2_sp": (2, {"tp": 2, "sp": True}, {}),
    "cp2_ring": (2, {"cp": 2}, {}),
    "cp2_a2a": (2, {"cp": 2, "cp_comm": "a2a"}, {}),
    "cp2_allgather": (2, {"cp": 2, "cp_comm": "allgather"}, {}),
    "fsdp2_tp2": (4, {"tp": 2}, {}),
    "tp2_sp_cp2": (4, {"tp": 2, "sp": True, "cp": 2}, {}),
    "hsdp": (4, {"dp_replicate": 2}, {}),
    "recompute_full": (1, {"recompute": "full"}, {}),
    "recompute_ops": (1, {"recompute": "selective"}, {}),
    "offloaded": (2, {"offload": "optimizer"}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_trains_like_one_process(model: str, layout: str) -> None:
    world, fields, sections = LAYOUTS[layout]
    given = recipe(model, types.Layout(**{"micro_batch_size": 2, **fields}), **sections)
    expected = alone(model)
    for found in run(world, train, given):
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=TOLERANCE)
        assert set(found["gradients"]) == set(expected["gradients"])
        for what in ("gradients", "weights"):
            for name, value in found[what].items():
                # Some gradients are nought but for rounding: a bias of keys shifts all scores alike.
                floor = 1e-3 * expected["norms"][0] if what == "gradients" else 1e-2
                scale = max(float(np.abs(expected[what][name]).max()), floor)
                assert float(np.abs(value - expected[what][name]).max()) / scale < TOLERANCE, (what, name)
