"""Wan and FLUX: every layout trains like one process, and one process like diffusers itself."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel  # once here, not on every rank
from tests.engine.ranks import run
from torch.distributed.tensor import DTensor

from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.config import DenoiserConfig, config_for, tiny
from meshwright.engine.diffusion.data import open_latents
from meshwright.engine.diffusion.folders import save_model
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


def trainer_of(given: types.Recipe, weights: Path | None = None) -> DiffusionTrainer:
    """A trainer on this rank's process group."""
    config = small(given.model)
    mesh = build_mesh(given.layout, "cpu")
    return DiffusionTrainer(given, config, mesh, torch.device("cpu"), open_latents(given, config), weights)


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


def beside_diffusers(rank: int, world: int, given: types.Recipe, folder: str) -> dict[str, Any]:
    """The loss and gradients of a step, and those of diffusers' own model with the same weights."""
    trainer = trainer_of(given)
    model: Any = trainer.stages[0]
    save_model(model, Path(folder))
    losses = trainer.forward_backward(trainer.loader.batch(0))
    reference = CLASSES[given.model].from_pretrained(folder)
    config, samples = trainer.config, trainer.loader.source.samples(range(given.train.global_batch_size))
    latents = samples.latents
    shift = flow.shift_of(config.model_type, given.data.seq_length)
    drawn = [flow.draw(given.train.seed, n, tuple(latents.shape[1:]), shift) for n in range(len(latents))]
    noise, times = torch.stack([torch.from_numpy(n) for n, _ in drawn]), torch.tensor([t for _, t in drawn])
    t = times[:, None, None, None, None]
    noisy, wanted = (1 - t) * latents + t * noise, noise - latents
    if config.model_type == "wan":
        found = reference(noisy, times * 1000, samples.text).sample
    else:
        height, width = (side // 2 for side in latents.shape[-2:])
        ids = torch.zeros(height, width, 3)
        ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)[None]
        found = reference(
            _packed(noisy),
            samples.text,
            samples.pooled,
            times,
            ids.reshape(-1, 3),
            torch.zeros(samples.text.shape[1], 3),
            torch.full_like(times, flow.GUIDANCE),
        ).sample
        wanted = _packed(wanted)
    loss = (found - wanted).square().mean()
    loss.backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    ours = {name: p.grad for name, p in model.named_parameters()}
    for name in [name for name in ours if name.endswith("weight_0")]:
        ours[name[:-2]] = torch.cat((ours.pop(name), ours.pop(f"{name[:-1]}1")), 1)
    assert set(ours) == set(theirs)
    norm = float(torch.stack([g.norm() for g in theirs.values()]).norm())
    worst = max(float((ours[n] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * norm) for n, g in theirs.items())
    return {"ours": float(losses[0]), "theirs": float(loss), "worst": worst}


def _packed(latents: torch.Tensor) -> torch.Tensor:
    """Squares of 2 × 2 latents as tokens, as FLUX's pipeline packs them."""
    n, channels, _, height, width = latents.shape
    squares = latents.reshape(n, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(n, height * width // 4, channels * 4)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_computes_what_diffusers_does(model: str, tmp_path: Path) -> None:
    given = recipe(model, types.Layout(micro_batch_size=8))
    found = run(1, beside_diffusers, given, str(tmp_path))[0]
    assert found["ours"] == pytest.approx(found["theirs"], rel=TOLERANCE)
    assert found["worst"] < TOLERANCE


def saved(rank: int, world: int, given: types.Recipe, folder: str) -> None:
    """Trains a step and writes the folder in several files."""
    trainer = trainer_of(given)
    trainer.step(0)
    save_model(trainer.stages[0], Path(folder), file_bytes=50_000)  # type: ignore[arg-type]


def loaded(rank: int, world: int, given: types.Recipe, folder: str) -> list[float]:
    """The losses of training that starts from a folder."""
    trainer = trainer_of(given, Path(folder))
    return [trainer.step(number).loss for number in range(1, 3)]


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_written_in_one_layout_starts_another(model: str, tmp_path: Path) -> None:
    cut = recipe(model, types.Layout(micro_batch_size=2, tp=2, sp=True))
    run(2, saved, cut, str(tmp_path))
    assert len(list(tmp_path.glob("diffusion_pytorch_model-*.safetensors"))) > 1
    whole = recipe(model, types.Layout(micro_batch_size=2))
    expected = run(1, train, whole, 3)[0]["losses"][1:]
    for found in run(2, loaded, whole, str(tmp_path)):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"num_layers": 3}, "num_layers is 3, not 2"),
        ({"_class_name": "UNet2DModel"}, "UNet2DModel"),
        ({"colour": 1}, "colour"),
        ({"out_channels": 7}, "7"),
    ],
)
def test_a_folder_of_another_model_is_refused(broken: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = recipe("wan_1_3b", types.Layout(micro_batch_size=2))
    values = {**small("wan_1_3b").to_dict(), **broken}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(AssertionError, match=told):
        run(1, loaded, given, str(tmp_path))
