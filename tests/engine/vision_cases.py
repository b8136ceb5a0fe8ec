"""Tiny vision-language models of every family: trained in a layout, by one process, and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.engine.parity import FLOOR, _expected, _relative, alone, recipe, run_steps
from tests.engine.ranks import run

from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import Batch
from meshwright.engine.hf_io import save_model
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.model.config import config_for, tiny
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.trainer import Trainer
from meshwright.engine.vision.data import MockImages
from meshwright.engine.vision.image_tokens import image_token_spec
from meshwright.recipes import load, types

# One recipe per model family.
FAMILIES = {
    "gemma3": "gemma3_vl_4b_sft_config",
    "qwen2_5_vl": "qwen25_vl_3b_sft_config",
    "qwen3_vl": "qwen3_vl_8b_sft_config",
    "qwen3_vl_moe": "qwen3_vl_30b_a3b_sft_config",
    "qwen3_5": "qwen35_vl_800m_sft_config",
    "qwen3_5_moe": "qwen35_vl_35b_a3b_sft_config",
    "glm4v_moe": "glm_45v_sft_config",
}
for _family in (*FAMILIES, "siglip"):  # once here, not on every rank
    import_module(f"transformers.models.{_family}.modeling_{_family}")
SEQ, BATCH = 64, 4
ZERO_INIT = "mm_input_projection_weight"  # Gemma's projector starts at zero: no gradient would reach the encoder
# Exponentials of sums of gates leave fp32 fewer digits (see tests/engine/families.py).
WIDTH = {"qwen3_5": 0.05, "qwen3_5_moe": 0.05}


@lru_cache(maxsize=16)
def values_of(family: str, layers: int = 2) -> dict[str, Any]:
    """Return the config of a family's tiny model, with initial weights large enough to matter."""
    config = tiny(config_for(load(FAMILIES[family])), layers)
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = WIDTH.get(family, 0.1)
    return config.to_dict()  # type: ignore[no-any-return]


def given_recipe(layout: types.Layout, packing: bool = False, dataset: str = "mock", **train: Any) -> types.Recipe:
    """Return a recipe for parity tests with images."""
    return recipe(
        msgspec.structs.replace(layout, micro_batch_size=2),
        data=types.Data(seq_length=SEQ, images=True, packing=packing, dataset=dataset),
        train=types.Train(**{"global_batch_size": BATCH, "steps": 100, **train}),
        moe=types.Moe(balancing="none", aux_loss=0.0),
    )


SOMETIMES = "images-in-every-other-micro-batch"


class Sometimes:
    """Mock samples in which every other micro batch has no image."""

    def __init__(self, inner: MockImages) -> None:
        self.inner = inner

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        found = self.inner.samples(numbers)
        for i in (i for i, number in enumerate(numbers) if number // 2 % 2):
            found.tokens[i][found.tokens[i] == self.inner.spec.image_token] = 1
            found.extras["image_at"][i] = -1
            for name in ("pixel_counts", "image_counts", "feature_counts"):
                if name in found.extras:
                    found.extras[name][i] = 0
        return found


def trainer_of(values: dict[str, Any], given: types.Recipe) -> Trainer:
    """Return a trainer with mock images."""
    config = transformers_config(values)
    mock = MockImages(image_token_spec(config), given.data.seq_length, given.train.seed, given.data.packing)
    source = Sometimes(mock) if given.data.dataset == SOMETIMES else mock
    trainer = Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)
    for stage in trainer.stages:
        for name, parameter in stage.named_parameters():
            if name.endswith(ZERO_INIT):
                fill_initial(parameter, name, InitSpec("normal", 0.0, 0.1), seed=0)
    return trainer


def train(rank: int, world: int, family: str, given: types.Recipe, steps: int = 2, layers: int = 2) -> dict[str, Any]:
    """Return losses and norms of some steps, gradients of the first and weights after the last."""
    trainer = trainer_of(values_of(family, layers), given)
    return run_steps(trainer, steps)


@lru_cache(maxsize=64)
def _reference(family: str, encoded: bytes, layers: int) -> dict[str, Any]:
    given = msgspec.msgpack.decode(encoded, type=types.Recipe)
    return run(1, train, family, given, 2, layers)[0]  # type: ignore[no-any-return]


def differences(family: str, world: int, given: types.Recipe, layers: int = 2) -> dict[str, float]:
    """Return the largest relative differences between a layout and one process."""
    values_of(family, layers)  # read once, before the ranks fork
    expected = _reference(family, msgspec.msgpack.encode(alone(given, world)), layers)
    ranks = run(world, train, family, given, 2, layers, timeout=240)
    worst = {"gradients": 0.0, "weights": 0.0}
    image_inputs: set[str] = set()
    for found in ranks:
        for what in worst:
            floor = FLOOR[what] * (expected["norms"][0] if what == "gradients" else 1.0)
            for name, value in found[what].items():
                image_inputs.add(name)
                worst[what] = max(worst[what], _relative(value, _expected(expected[what], name), floor))
    assert not set(expected["gradients"]) - image_inputs
    for what in ("losses", "norms"):
        worst[what] = max(_relative(np.array(found[what]), np.array(expected[what])) for found in ranks)
    return worst


def against_transformers(rank: int, world: int, family: str, given: types.Recipe) -> tuple[float, dict[str, float]]:
    """Return the relative errors of the loss and of each gradient of a micro batch against transformers."""
    trainer = trainer_of(values_of(family), given)
    batch = trainer.loader.batch(0)
    loss = float(trainer.forward_backward(batch).detach().sum())
    parameters = dict(trainer.stages[0].named_parameters())
    config = transformers_config(values_of(family))
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_joined(parameters, name, parameter.shape))
    expected = _loss_of(model, config, batch)
    expected.backward()
    floor = 1e-3 * float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    error_of = {}
    for name, parameter in model.named_parameters():
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        found = _joined(gradients, name, parameter.shape)
        error_of[name] = _relative(found.numpy(), parameter.grad.numpy(), floor)
    return abs(loss - float(expected)) / abs(float(expected)), error_of


def folder_round_trip(rank: int, world: int, family: str, folder: str) -> tuple[float, tuple[list[str], ...]]:
    """Load a transformers folder, save it again and reload it: return the spread of the three losses."""
    given = given_recipe(types.Layout(), global_batch_size=2)
    config = transformers_config(values_of(family))
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()
    model.save_pretrained(f"{folder}/first")
    if family == "qwen3_vl_moe":
        _transpose_experts(Path(folder) / "first" / "model.safetensors")
    source = MockImages(image_token_spec(config), SEQ, given.train.seed)
    mesh = build_mesh(given.layout, "cpu")
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source, Path(folder) / "first")
    batch = trainer.loader.batch(0)
    losses = [float(_loss_of(model, config, batch)), float(trainer.forward_backward(batch).detach().sum())]
    save_model(trainer.stages, mesh, config, Path(folder) / "second", dtype=torch.float32)
    reloaded, loading_info = transformers.AutoModelForImageTextToText.from_pretrained(
        f"{folder}/second", attn_implementation="eager", output_loading_info=True
    )
    losses.append(float(_loss_of(reloaded.train(), config, batch)))
    names = [sorted(map(str, loading_info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")]
    return (max(losses) - min(losses)) / losses[0], tuple(names)


def _transpose_experts(path: Path) -> None:
    """Transpose the experts' matrices, as in the hub's Qwen3-VL files.

    Only down_proj: the tiny model's first projection is square, so transformers could not detect the transpose.
    """
    tensors = load_file(path)
    transposed = {k: v.transpose(1, 2).contiguous() if "experts.down_proj" in k else v for k, v in tensors.items()}
    save_file(transposed, path, {"format": "pt"})


def _joined(parameters: dict[str, Any], name: str, shape: torch.Size) -> torch.Tensor:
    parts = (
        [parameters[name]]
        if name in parameters
        else [parameters[part] for part in parameters if part.rpartition("_")[0] == name]
    )
    return torch.cat([part.detach() for part in parts]).reshape(shape)


def _loss_of(model: Any, config: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of a micro batch, computed one document at a time if packed."""
    total = torch.zeros(())
    inputs = batch.model_kwargs
    for i, tokens in enumerate(batch.tokens):
        documents = inputs["documents"][i] if "documents" in inputs else torch.zeros_like(tokens)
        pixels, grids = 0, 0
        for number in documents.unique():
            in_document = documents == number
            image_inputs = {}
            images = int((tokens[in_document] == config.image_token_id).sum())
            if images:
                image_inputs, pixels, grids = _image_inputs(inputs, i, pixels, grids, whole="grids" not in inputs)
                token_types = (tokens[in_document] == config.image_token_id)[None].long()
                image_inputs["token_type_ids" if "grids" not in inputs else "mm_token_type_ids"] = token_types
            logits = model(
                input_ids=tokens[in_document][None],
                attention_mask=torch.ones_like(tokens[in_document][None]),
                **image_inputs,
            )
            losses = torch.nn.functional.cross_entropy(
                logits.logits[0].float(), inputs["labels"][i][in_document], reduction="none", ignore_index=-100
            )
            total = total + (losses * inputs["weights"][i][in_document]).sum()
    return total


def _image_inputs(
    inputs: dict[str, Any], i: int, pixels: int, grids: int, whole: bool
) -> tuple[dict[str, Any], int, int]:
    """Return the next image of a sample as transformers inputs (mock documents have one each)."""
    if whole:
        return {"pixel_values": inputs["pixels"][i, pixels : pixels + 1]}, pixels + 1, grids
    grid = inputs["grids"][i, grids]
    end = pixels + int(grid.prod())
    return {"pixel_values": inputs["pixels"][i, pixels:end], "image_grid_thw": grid[None]}, end, grids + 1
