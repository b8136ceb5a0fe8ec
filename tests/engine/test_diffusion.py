"""Wan and FLUX: every layout trains like one process, and one process like diffusers."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel  # once here, not on every rank
from safetensors.numpy import save_file
from tests.engine.parity import compile_without_a_compiler, run_steps
from tests.engine.ranks import run

from meshwright import api
from meshwright.engine.diffusion import flow
from meshwright.engine.diffusion.config import DenoiserConfig, config_for, tiny
from meshwright.engine.diffusion.data import LatentFolder, MockLatents, open_latents
from meshwright.engine.diffusion.hf_io import save_model
from meshwright.engine.diffusion.loader import patchify, token_positions
from meshwright.engine.diffusion.trainer import DiffusionTrainer
from meshwright.engine.mesh import build_mesh
from meshwright.errors import InputError
from meshwright.recipes import types

CLASSES = {"wan_1_3b": WanTransformer3DModel, "flux_12b": FluxTransformer2DModel}
MODELS = tuple(CLASSES)
TOLERANCE = 1e-5


def recipe(model: str, layout: types.Layout, **sections: Any) -> types.Recipe:
    """Return a recipe with fp32 and plain SGD, which does not hide gradients of the wrong scale."""
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
    """Return a tiny config with two layers of each type."""
    return tiny(config_for(recipe(model, types.Layout())), 4 if model == "flux_12b" else 2)


def trainer_of(given: types.Recipe, weights: Path | None = None) -> DiffusionTrainer:
    """Return a trainer on this rank's process group."""
    config = small(given.model)
    mesh = build_mesh(given.layout, "cpu")
    return DiffusionTrainer(given, config, mesh, torch.device("cpu"), open_latents(given, config), weights)


def train(rank: int, world: int, given: types.Recipe, steps: int = 2) -> dict[str, Any]:
    """Return losses, gradients of the first step and weights after the last."""
    if given.kernels.compile:
        compile_without_a_compiler()
    return run_steps(trainer_of(given), steps)


@lru_cache(maxsize=8)
def one_process(model: str) -> dict[str, Any]:
    """Return the result of one process with the same micro batches."""
    return run(1, train, recipe(model, types.Layout(micro_batch_size=2)))[0]  # type: ignore[no-any-return]


COMPILED = {"kernels": types.Kernels(compile=True)}
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
    "activations_offloaded": (1, {"offload": "activations"}, {}),
    "compiled": (1, {}, COMPILED),
    "compiled_recompute_full": (1, {"recompute": "full"}, COMPILED),
    "compiled_tp2_sp": (2, {"tp": 2, "sp": True}, COMPILED),
    "compiled_cp2": (2, {"cp": 2}, COMPILED),
    "eager_attention": (1, {}, {"kernels": types.Kernels(attention="eager")}),
}


# FLUX is trained with tp and sp below: its folder is saved in that layout.
QUICK = {"wan_1_3b": ("tp2_sp", "recompute_full"), "flux_12b": ("cp2_ring", "recompute_full")}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, name, marks=() if name in QUICK[model] else pytest.mark.slow)
        for model in MODELS
        for name in LAYOUTS
    ],
)
def test_every_layout_trains_like_one_process(model: str, layout: str) -> None:
    world, fields, sections = LAYOUTS[layout]
    given = recipe(model, types.Layout(**{"micro_batch_size": 2, **fields}), **sections)
    expected = one_process(model)
    for found in run(world, train, given):
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=TOLERANCE)
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=TOLERANCE)
        assert set(found["gradients"]) == set(expected["gradients"])
        for what in ("gradients", "weights"):
            for name, value in found[what].items():
                # Some gradients are zero up to rounding: a key bias shifts all scores equally.
                floor = 1e-3 * expected["norms"][0] if what == "gradients" else 1e-2
                scale = max(float(np.abs(expected[what][name]).max()), floor)
                assert float(np.abs(value - expected[what][name]).max()) / scale < TOLERANCE, (what, name)


def compare_with_diffusers(rank: int, world: int, given: types.Recipe, folder: str) -> dict[str, Any]:
    """Compare the loss and gradients of a step with those of the diffusers model with the same weights."""
    trainer = trainer_of(given)
    model: Any = trainer.stages[0]
    save_model(model, Path(folder), trainer.mesh)
    losses = trainer.forward_backward(trainer.loader.batch(0))
    reference = CLASSES[given.model].from_pretrained(folder)
    config, samples = trainer.config, trainer.loader.source.samples(range(given.train.global_batch_size))
    latents = samples.latents
    shift = flow.shift_of(config.model_type, given.data.seq_length)
    drawn = [flow.draw(given.train.seed, n, tuple(latents.shape[1:]), shift) for n in range(len(latents))]
    noise, times = torch.stack([torch.from_numpy(n) for n, _ in drawn]), torch.tensor([t for _, t in drawn])
    t = times[:, None, None, None, None]
    noisy, target = (1 - t) * latents + t * noise, noise - latents
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
        target = _packed(target)
    loss = (found - target).square().mean()
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
    """Pack 2 × 2 latents into tokens, as FLUX's pipeline does."""
    n, channels, _, height, width = latents.shape
    squares = latents.reshape(n, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(n, height * width // 4, channels * 4)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_matches_diffusers(model: str, tmp_path: Path) -> None:
    given = recipe(model, types.Layout(micro_batch_size=8))
    found = run(1, compare_with_diffusers, given, str(tmp_path))[0]
    assert found["ours"] == pytest.approx(found["theirs"], rel=TOLERANCE)
    assert found["worst"] < TOLERANCE


def train_and_save(rank: int, world: int, given: types.Recipe, folder: str) -> None:
    """Train a step and save the folder in several files."""
    trainer = trainer_of(given)
    trainer.step(0)
    save_model(trainer.stages[0], Path(folder), trainer.mesh, file_bytes=50_000)  # type: ignore[arg-type]


def loss_from_folder(rank: int, world: int, given: types.Recipe, folder: str) -> float:
    """Return the loss of the second step with weights from a folder."""
    return trainer_of(given, Path(folder)).step(1).loss


@pytest.mark.parametrize("model", [pytest.param("wan_1_3b", marks=pytest.mark.slow), "flux_12b"])
def test_folder_saved_in_one_layout_loads_in_another(model: str, tmp_path: Path) -> None:
    sharded = recipe(model, types.Layout(micro_batch_size=2, tp=2, sp=True))
    run(2, train_and_save, sharded, str(tmp_path))
    assert len(list(tmp_path.glob("diffusion_pytorch_model-*.safetensors"))) > 1
    found = run(2, loss_from_folder, recipe(model, types.Layout(micro_batch_size=2)), str(tmp_path))
    assert found == pytest.approx([one_process(model)["losses"][1]] * 2, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"num_layers": 3}, "num_layers is 3, not 2"),
        ({"_class_name": "UNet2DModel"}, "UNet2DModel"),
        ({"colour": 1}, "colour"),
        ({"out_channels": 7}, "7"),
    ],
)
def test_folder_of_another_model_is_rejected(broken: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = recipe("wan_1_3b", types.Layout(micro_batch_size=2))
    values = {**small("wan_1_3b").to_dict(), **broken}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(AssertionError, match=message):
        run(1, loss_from_folder, given, str(tmp_path))


LATENTS = {"wan_1_3b": (4, 1, 8, 8), "flux_12b": (4, 8, 8)}  # of 16 tokens


def write_latents(model: str, folder: Path, **changed: Any) -> Path:
    """Write five samples in two files; `changed` replaces tensors of the second file, None omits one."""
    folder.mkdir(exist_ok=True)
    random = np.random.Generator(np.random.Philox(key=[1, 2]))
    for number, count in enumerate((2, 3)):
        tensors = {"latents": (count, *LATENTS[model]), "text": (count, 6, 32)}
        if model == "flux_12b":
            tensors["pooled"] = (count, 16)
        generated: dict[str, Any] = {
            name: random.standard_normal(shape, dtype=np.float32) for name, shape in tensors.items()
        }
        generated |= changed if number else {}
        save_file(
            {name: value for name, value in generated.items() if value is not None}, folder / f"{number}.safetensors"
        )
    return folder


def zeros(count: int, *shape: int, dtype: Any = np.float32) -> Any:
    """Return zeros of a shape."""
    return np.zeros((count, *shape), dtype=dtype)


@pytest.mark.parametrize("model", MODELS)
def test_latent_folder_visits_every_sample_once_per_epoch(model: str, tmp_path: Path) -> None:
    source = LatentFolder(str(write_latents(model, tmp_path)), small(model), 16, seed=3)
    first, second = source.samples(range(5)), source.samples(range(5, 10))
    assert first.latents.shape == (5, 4, 1, 8, 8)
    assert first.text.shape == (5, 6, 32)
    assert (first.pooled is None) == (model == "wan_1_3b")
    of_sample = {float(one.sum()) for one in first.latents}
    assert len(of_sample) == 5
    assert {float(one.sum()) for one in second.latents} == of_sample
    assert not torch.equal(first.latents, second.latents)
    assert torch.equal(source.samples([3]).latents[0], first.latents[3])


def test_part_of_the_latents_is_held_out(tmp_path: Path) -> None:
    folder = str(write_latents("wan_1_3b", tmp_path))
    given = recipe("wan_1_3b", types.Layout(), data=types.Data(seq_length=16, dataset=folder, validation_part=0.4))
    trained, kept = (open_latents(given, small("wan_1_3b"), held_out) for held_out in (False, True))
    sums = [{float(one.sum()) for one in source.samples(range(12)).latents} for source in (trained, kept)]
    assert [len(each) for each in sums] == [3, 2]
    assert not sums[0] & sums[1]


@pytest.mark.parametrize(
    ("model", "changed", "message"),
    [
        ("wan_1_3b", {"text": None}, "has no text"),
        ("flux_12b", {"pooled": None}, "has no pooled"),
        ("wan_1_3b", {"latents": zeros(2, 4, 1, 8, 8)}, "number of samples"),
        ("wan_1_3b", {"latents": zeros(3, 5, 1, 8, 8)}, "the model expects"),
        ("wan_1_3b", {"latents": zeros(3, 4, 8, 8)}, "the model expects"),
        ("flux_12b", {"latents": zeros(3, 4, 2, 8, 8)}, "the model expects"),
        ("wan_1_3b", {"latents": zeros(3, 4, 1, 8, 7)}, "cannot be split into patches"),
        ("wan_1_3b", {"latents": zeros(3, 4, 1, 8, 4)}, "samples of 8 tokens"),
        ("wan_1_3b", {"latents": zeros(3, 4, 1, 4, 16)}, "unlike those"),
        ("wan_1_3b", {"latents": zeros(3, 4, 1, 2, 4096)}, "has 1024 positions"),
        ("wan_1_3b", {"text": zeros(3, 6, 31)}, "width 32"),
        ("flux_12b", {"pooled": zeros(3, 15)}, "width 16"),
        ("wan_1_3b", {"text": zeros(3, 6, 32, dtype=np.int32)}, "not floats"),
    ],
)
def test_latents_of_a_wrong_shape_are_rejected(
    model: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        LatentFolder(str(write_latents(model, tmp_path, **changed)), small(model), 16, seed=3)


def test_folder_without_latents_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder of latents"):
        LatentFolder(str(tmp_path), small("wan_1_3b"), 16, seed=3)
    (tmp_path / "a.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="not a safetensors file"):
        LatentFolder(str(tmp_path), small("wan_1_3b"), 16, seed=3)


def test_times_follow_a_shifted_logit_normal() -> None:
    times = [flow.draw(1, number, (1,), flow.WAN_SHIFT)[1] for number in range(4000)]
    assert 0 < min(times) < max(times) < 1
    assert np.median(times) == pytest.approx(0.75, abs=0.02)  # 3 · 0.5 / (1 + 2 · 0.5)
    assert flow.shift_of("flux", 256) == pytest.approx(np.exp(0.5))
    assert flow.shift_of("flux", 4096) == pytest.approx(np.exp(1.15))


@pytest.mark.parametrize("model", MODELS)
def test_mock_latents_have_the_requested_number_of_tokens(model: str) -> None:
    for tokens in (1, 6, 16, 64, 1000, 1024):
        config = small(model)
        latents = MockLatents(config, tokens, 1, 1).samples([0, 1]).latents
        assert patchify(latents, config.patch).shape[:2] == (2, tokens)
        assert token_positions(latents.shape, config.patch).shape == (tokens, 3)


def test_tiny_model_has_every_layer_type() -> None:
    flux = tiny(config_for(recipe("flux_12b", types.Layout())), 2)
    assert (flux.values["num_layers"], flux.values["num_single_layers"]) == (1, 1)


def test_only_the_depth_of_wan_can_be_changed() -> None:
    deeper = recipe("wan_1_3b", types.Layout(), architecture=types.Architecture(layers=7))
    assert config_for(deeper).num_hidden_layers == 7
    for model, change in (("wan_1_3b", {"hidden": 64}), ("flux_12b", {"layers": 3})):
        with pytest.raises(InputError, match="only the layers of Wan"):
            config_for(recipe(model, types.Layout(), architecture=types.Architecture(**change)))


def held_out_losses(rank: int, world: int, given: types.Recipe) -> list[float]:
    """Return the validation loss before and after some steps."""
    trainer = trainer_of(given)
    held_out = open_latents(given, trainer.config, True)
    before = trainer.evaluate(held_out, 2)
    for number in range(3):
        trainer.step(number)
    after = trainer.evaluate(held_out, 2)
    assert before is not None
    assert after is not None
    return [before, after]


@pytest.mark.parametrize("layout", [{"tp": 2, "sp": True}, pytest.param({"cp": 2}, marks=pytest.mark.slow)])
def test_validation_loss_falls(layout: dict[str, Any]) -> None:
    given = recipe("wan_1_3b", types.Layout(micro_batch_size=2, **layout))
    before, after = run(2, held_out_losses, given)[0]
    assert after < before
    assert run(1, held_out_losses, recipe("wan_1_3b", types.Layout(micro_batch_size=2)))[0] == pytest.approx(
        [before, after]
    )


@pytest.mark.parametrize(
    "name", ["wan_1_3B_pretrain_config", pytest.param("flux_12b_sft_config", marks=pytest.mark.slow)]
)
def test_recipe_trains_with_tiny(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.tiny.MICRO_BATCHES", 2)  # half of those of --tiny
    answer = tiny_run(name, tmp_path, 2, 4, "checkpoint.export=none")
    assert answer["losses"][-1] < answer["losses"][0]


@pytest.mark.slow
def test_run_resumes_in_another_layout_and_exports(tmp_path: Path) -> None:
    full = tiny_run("flux_12b_sft_config", tmp_path / "whole", 2, 4)
    tiny_run("flux_12b_sft_config", tmp_path / "cut", 2, 2)
    rest = tiny_run("flux_12b_sft_config", tmp_path / "cut", 1, 4, "layout.tp=1", "layout.sp=false")
    assert full["losses"][-1] < full["losses"][0]
    assert rest["losses"] == pytest.approx(full["losses"][2:], rel=TOLERANCE)
    assert {file.name for file in (tmp_path / "cut" / "model").iterdir()} >= {
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }


def tiny_run(name: str, folder: Path, nproc: int, steps: int, *overrides: str) -> dict[str, Any]:
    """Run the recipe with --tiny and return the command's JSON response."""
    given = [f"train.steps={steps}", "schedule.name=constant", "checkpoint.save_every=2", *overrides]
    done = api.train(name, tiny=True, nproc=nproc, quiet=True, out=str(folder), accept_changes=True, overrides=given)
    return api.to_json(api.train_response(done))
