"""The engine's own step on fake tensors for everything beyond plain pretraining, with tiny models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from meshwright.dryrun.fake_data import DryTokens, dry_recipe, open_samples
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.data.sampler import check_document_boundaries
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.config import distinct_layer_types
from meshwright.engine.model_families import family_of
from meshwright.errors import InputError
from meshwright.recipes import overrides
from meshwright.recipes.index import load

ALONE = {f"layout.{axis}": "1" for axis in ("tp", "pp", "cp", "ep", "micro_batch_size")}
ALONE |= {"layout.sp": "false", "layout.recompute": "none"}
LLAMA, ADAPTED = "llama3_8b_sft_config", "llama3_8b_peft_config"


def train_two_steps(
    name: str,
    *changes: str,
    world: int = 1,
    on_op: Callable[..., None] | None = None,
    capability: tuple[int, int] = (9, 0),
    width: int = 64,
    micro_batches: int = 1,
) -> Any:
    """Return a trainer after two steps of a recipe's model, made tiny."""
    wanted = ALONE | {"data.seq_length": str(width)} | dict(change.split("=") for change in changes)
    recipe = overrides.apply(load(name), [f"{field}={value}" for field, value in wanted.items()])
    family, layout = family_of(recipe), recipe.layout
    full_config = family.config_for(recipe)
    layers = max(2, family.layer_types(full_config))
    config = family.read_config(family.tiny(full_config, layers).to_dict())
    samples = micro_batches * world // (layout.tp * layout.pp * layout.cp)
    train = msgspec.structs.replace(recipe.train, global_batch_size=samples)
    recipe = dry_recipe(msgspec.structs.replace(recipe, train=train))
    with fake_rank(world, 0, on_op, capability) as device:
        mesh = build_mesh(recipe.layout, device.type)
        trainer = family.trainer()(recipe, config, mesh, device, open_samples(recipe, config), None)
        for step in range(2):
            assert not trainer.step(step, figures=False).skipped
        trainer.close()
    return trainer


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: one for stage in trainer.stages for name, one in stage.named_parameters()}


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    made: list[tuple[int, ...]] = []

    def record(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        made.extend(
            tuple(one.shape) for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor)
        )

    trainer = train_two_steps(ADAPTED, on_op=record, micro_batches=2)
    found = parameters(trainer)
    learn = {name for name, one in found.items() if one.requires_grad}
    assert learn
    assert all("lora_" in name for name in learn)
    assert {id(one) for one in trainer.optimizer.state} == {id(found[name]) for name in learn}
    assert all(one.device.type == DRY for one in found.values())
    rank, _ = found["model.layers.0.mlp.gate_proj.lora_A"].shape
    assert (64, rank) in made  # the adapter's intermediate is recorded


def test_nf4_weights_take_four_bits_and_their_scales() -> None:
    unpacked: list[Any] = []

    def record(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor) and tuple(result.shape) == (128, 64) and "empty" in str(operation):
            unpacked.append(result.dtype)

    trainer = train_two_steps(ADAPTED, "peft.method=qlora", on_op=record)
    found = parameters(trainer)
    codes, scales = (found[f"model.layers.0.mlp.gate_proj.base_{part}"] for part in ("codes", "scales"))
    assert (codes.dtype, codes.numel()) == (torch.uint8, 128 * 64 // 2)
    assert (scales.dtype, scales.numel()) == (torch.bfloat16, 128)
    assert torch.bfloat16 in unpacked  # each pass unpacks a weight for itself


@pytest.mark.parametrize(
    "changes",
    [
        ("precision.compute=fp16", "optimizer.name=lion"),
        ("precision.matmul=fp8_tensor", "precision.fp8_gather=true"),
        pytest.param(("layout.offload=optimizer", "optimizer.name=lion"), marks=pytest.mark.slow),
        pytest.param(("optimizer.name=muon", "precision.moments=bf16"), marks=pytest.mark.slow),
    ],
    ids=lambda changes: changes[-1],
)
def test_a_step_on_two_ranks(changes: tuple[str, ...]) -> None:
    trainer = train_two_steps(LLAMA, *changes, world=2)
    home = "cpu" if "layout.offload=optimizer" in changes else DRY
    assert {one.device.type for one in parameters(trainer).values()} == {home}
    if trainer.scale is not None:
        assert trainer.scale._good == 2  # no step of a dry run overflows


def test_mxfp8_runs_if_the_fake_gpu_supports_it() -> None:
    train_two_steps(LLAMA, "precision.matmul=mxfp8", capability=(10, 0))
    with pytest.raises(InputError, match="no MXFP8 tensor cores"):
        train_two_steps(LLAMA, "precision.matmul=mxfp8", capability=(9, 0))


def test_a_fused_loss_never_has_all_logits() -> None:
    largest = 0

    def record(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal largest
        if "aten.mm" in str(operation) and result.shape[1] == 128 and not result.is_cpu:
            largest = max(largest, result.shape[0])

    train_two_steps(LLAMA, "kernels.loss=fused_linear", "layout.tp=2", world=2, on_op=record)
    assert 0 < largest <= 64


def test_images_take_their_share_of_a_full_sample() -> None:
    seen: list[int] = []

    def record(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "convolution.default" in str(operation):
            seen.append(args[0].shape[0])

    trainer = train_two_steps("qwen3_vl_8b_sft_config", on_op=record)
    samples = trainer.loader.source.samples([0, 1])
    patches = 4 * 4 * 2 * 2  # four images of 2 × 2 tokens of 2 × 2 patches
    assert samples.width == 64
    assert samples.extras["pixels"].shape[:2] == (2, patches)
    assert set(seen) == {patches}


@pytest.mark.slow
def test_latents_and_their_texts() -> None:
    trainer = train_two_steps("wan_1_3B_sft_config", "layout.cp=2", world=2)
    assert len(parameters(trainer)) > 10


def test_packed_documents_are_isolated() -> None:
    rows: set[tuple[int, ...]] = set()

    def record(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "convolution.default" in str(operation):
            rows.add(tuple(result.shape))

    trainer = train_two_steps("nemotronh_4b_sft_config", on_op=record, width=512)
    assert distinct_layer_types(trainer.config) == 3
    assert {shape[0] for shape in rows} == {1, 2}  # rows of 256 and 129 tokens, and of the 127 that are left


def test_packed_samples_are_full_and_predict_nothing_across_documents() -> None:
    samples = DryTokens(1000, packed=True).samples(range(2))
    assert samples.tokens.shape == (2, 1001)
    assert samples.documents is not None
    check_document_boundaries(samples, [0, 1])
    assert len(np.unique(samples.documents)) > 2
    assert samples.loss_mask.mean() > 0.99


def test_a_dry_recipe_differs_only_in_its_data() -> None:
    recipe = load(LLAMA)
    dry = dry_recipe(recipe)
    assert (dry.data.dataset, dry.data.prefetch, dry.data.seq_length) == ("mock", 0, recipe.data.seq_length)
    assert msgspec.structs.replace(dry, data=recipe.data) == recipe
