"""QLoRA trains like torchao's and bitsandbytes' NF4; balancing losses equal transformers' by a documented relation."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from tests.engine import parity
from tests.engine.expert_cases import differ
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from tests.engine.test_adapters import PEFT, joined, own_name, recipe, trainer_of
from tests.engine.test_qlora import WIDE, packed
from torch import nn
from torch.nn import functional

from meshwright.engine import experts as moe
from meshwright.engine.data.sampler import tokens_up_to_last_target
from meshwright.engine.kernels import nf4
from meshwright.engine.kernels.lora_linear import adapted_linear
from meshwright.engine.model import adapters
from meshwright.engine.model.adapters import full_tensor
from meshwright.engine.model.build import transformers_config
from meshwright.engine.model.init import InitSpec
from meshwright.engine.post_training import perplexity
from meshwright.engine.trainer import Trainer
from meshwright.notes import collected_notes
from meshwright.recipes import types

# NF4

BLOCKS_OF_SCALES = 64  # torchao quantizes this many scales together; the tiny matrices have no 256
STEPS = 4
EQUAL = {"loss": 2e-6, "gradients": 1e-5, "adapters": 2e-6}
ROUNDED = {"loss": 1e-3, "gradients": 0.05, "adapters": 5e-3}  # double quantization: scales of 8 bits
QLORA = msgspec.structs.replace(PEFT, method="qlora")


def library(name: str) -> None:
    """Import a library before the fork, or skip the test."""
    reason = f"{name} is not installed: pip install {name}"
    pytest.importorskip(name, reason=reason)
    if name == "torchao":
        pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", reason=reason)


def four_bit_codes(packed_codes: torch.Tensor) -> torch.Tensor:
    packed_codes = packed_codes.flatten()
    return torch.stack([packed_codes >> 4, packed_codes & 15], -1).flatten().int()


def torchao_weight(weight: torch.Tensor) -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return to_nf4(weight, block_size=64, scaler_block_size=BLOCKS_OF_SCALES)


def torchao_scales(stored: Any) -> torch.Tensor:
    found: torch.Tensor = stored.dequantize_scalers(
        stored.quantized_scalers, stored.quantization_factor, stored.scaler_block_size
    )
    return found


def like_torchao(rank: int, world: int, dtype: torch.dtype) -> dict[str, float]:
    """Compare codes, scales, dequantized weights and a linear layer with its gradients."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

    torch.manual_seed(0)
    weight = (0.05 * torch.randn(128, 256)).to(dtype)
    codes, scales = packed(weight)
    stored = torchao_weight(weight)
    ours, theirs = four_bit_codes(codes), four_bit_codes(stored.quantized_data)
    found = {"codes": float((ours != theirs).float().mean()), "gap": float((ours - theirs).abs().max())}
    # A code may differ only where the value lies between two levels: torchao rounds its levels to four digits.
    relative = (weight.float().view(-1, 64) / scales.float().view(-1, 1)).flatten()
    middles = nf4._thresholds(weight.device)
    found["tie"] = float((relative[ours != theirs, None] - middles).abs().amin(1).max()) if found["gap"] else 0.0
    steps = (1 / stored.quantization_factor).repeat_interleave(BLOCKS_OF_SCALES)
    found["scale_steps"] = float(((torchao_scales(stored) - scales.flatten()).float().abs() / steps.float()).max())

    def error(dequantized: torch.Tensor) -> float:
        return float((dequantized.float() - weight.float()).square().mean().sqrt())

    found["error_ratio"] = error(nf4.unpack(codes, scales)) / error(stored.get_original_weight())
    # The same codes, scales and levels: what remains is the arithmetic.
    shared = stored.quantized_data.view(codes.shape), torchao_scales(stored).view(scales.shape)
    stored.nf4 = torch.tensor(nf4.LEVELS, dtype=dtype)
    found["weight"] = differ(nf4.unpack(*shared), stored.get_original_weight())
    x = torch.randn(3, 7, 256, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    none = torch.zeros(4, 256, dtype=dtype), torch.zeros(128, 4, dtype=dtype)
    outs = [adapted_linear(inputs[0], *shared, *none, 2.0), linear_nf4(inputs[1], stored)]
    probe = torch.randn_like(outs[0])
    for out in outs:
        (out * probe).sum().backward()
    found["forward"], found["backward"] = differ(outs[0], outs[1]), differ(inputs[0].grad, inputs[1].grad)
    return found


@pytest.mark.parametrize(("dtype", "codes", "close"), [(torch.float32, 5e-4, 1e-6), (torch.bfloat16, 1e-2, 1e-2)])
def test_nf4_codes_scales_and_linear_equal_torchao(dtype: torch.dtype, codes: float, close: float) -> None:
    library("torchao")
    found = run(1, like_torchao, dtype)[0]
    assert found["codes"] <= codes
    assert found["gap"] <= 1
    assert found["tie"] <= (1e-4 if dtype == torch.float32 else 4e-3)  # torchao divides in the weights' format
    assert found["scale_steps"] <= (1.001 if dtype == torch.float32 else 3)  # ours are exact, theirs have 8 bits
    assert found["error_ratio"] <= 1.0  # ours is not further from the weights
    assert max(found["weight"], found["forward"], found["backward"]) <= close, found


def like_bitsandbytes(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    from bitsandbytes import functional as bnb

    torch.manual_seed(0)
    weight = (0.05 * torch.randn(128, 256)).to(dtype)
    codes, scales = packed(weight)
    found: dict[str, Any] = {}
    for double in (False, True):
        stored, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        theirs = bnb.dequantize_4bit(stored, state)
        found[f"codes {double}"] = torch.equal(codes.flatten(), stored.flatten())
        found[f"weight {double}"] = differ(nf4.unpack(codes, scales), theirs)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_equals_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    library("bitsandbytes")
    found = run(1, like_bitsandbytes, dtype)[0]
    assert found["codes False"]
    assert found["codes True"]
    assert found["weight False"] == 0.0
    assert found["weight True"] < 1e-2  # double quantization: scales of 8 bits


class BitsAndBytesLinear(nn.Linear):
    """A frozen linear layer with bitsandbytes' product; made from its plain weight."""

    def quantize(self, double: bool) -> None:
        from bitsandbytes import functional as bnb

        weight = self.weight.data
        codes, self.state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import bitsandbytes

        out: torch.Tensor = bitsandbytes.matmul_4bit(x, self.weight.t(), quant_state=self.state)
        return out


def quantize(model: nn.Module, paths: list[str], how: str) -> None:
    """Replace the weights of linear layers by a library's NF4."""
    for path in paths:
        linear: Any = model.get_submodule(path)
        if how == "torchao":
            linear.weight = nn.Parameter(torchao_weight(linear.weight.detach()), requires_grad=False)
        else:
            linear.__class__ = BitsAndBytesLinear
            linear.quantize(how == "bitsandbytes double")


def their_model(trainer: Trainer, paths: list[str], plain: dict[str, torch.Tensor], how: str) -> Any:
    """Return transformers' model with a library's NF4 weights and peft's adapters that start as ours do."""
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_config(transformers_config(WIDE["llama_wide"]))
    model.load_state_dict(plain)
    quantize(model, paths, how)
    given = QLORA
    wrapped: Any = get_peft_model(model, LoraConfig(r=given.rank, lora_alpha=given.alpha, target_modules=paths))
    ours = dict(trainer.stages[0].named_parameters())
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.copy_(ours[own_name(name)])
    return wrapped


def trains_like(rank: int, world: int, how: str, shared_values: bool = False) -> dict[str, float]:
    """Train our QLoRA and the library's for a few steps; return the largest relative differences.

    With `shared_values` ours uses torchao's codes and 8-bit scales, and torchao our levels.
    """
    trainer, full = trainer_of("llama_wide", recipe(peft=QLORA)), trainer_of("llama_wide", recipe(peft=PEFT))
    stage: Any = trainer.stages[0]
    paths = [name for name, module in stage.named_modules() if hasattr(module, "lora_scale")]
    plain = joined({n: p.detach() for n, p in full.stages[0].named_parameters() if "lora" not in n}, set())
    theirs = their_model(trainer, paths, plain, how)
    if shared_values:
        for path in paths:
            linear, stored = stage.get_submodule(path), theirs.get_submodule(f"base_model.model.{path}").weight
            stored.nf4.copy_(torch.tensor(nf4.LEVELS))
            linear.base_codes.data.copy_(stored.quantized_data.view_as(linear.base_codes))
            linear.base_scales.data.copy_(torchao_scales(stored).view_as(linear.base_scales))
    trained = {own_name(n): p for n, p in theirs.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(list(trained.values()), lr=0.1)
    worst = {"loss": 0.0, "gradients": 0.0, "adapters": 0.0}
    for step in range(STEPS):
        batch = trainer.loader.batch(step)
        logits = theirs(batch.tokens, use_cache=False).logits
        each = functional.cross_entropy(logits.flatten(0, 1), batch.model_kwargs["labels"].flatten(), reduction="none")
        expected = (each * batch.model_kwargs["weights"].flatten()).sum()
        expected.backward()
        if step == 0:
            trainer.forward_backward(batch)
            ours = dict(stage.named_parameters())
            worst["gradients"] = max(differ(ours[n].grad, p.grad) for n, p in trained.items())
            trainer.optimizer.zero_grad(set_to_none=True)
        nn.utils.clip_grad_norm_(list(trained.values()), trainer.recipe.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        worst["loss"] = max(worst["loss"], abs(trainer.step(step).loss / expected.item() - 1))
    worst["adapters"] = max(differ(p, trained[n]) for n, p in stage.named_parameters() if n in trained)
    return worst


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a model with several blocks per row, and start B away from zero, so that A has a gradient from step 1."""
    monkeypatch.setattr(adapters, "INIT_B", InitSpec("uniform", -0.3, 0.3))
    monkeypatch.setitem(FAMILIES, "llama_wide", WIDE["llama_wide"])


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("how", "shared_values", "bounds"),
    [
        ("torchao", True, EQUAL),
        pytest.param("torchao", False, ROUNDED, marks=pytest.mark.slow),
        ("bitsandbytes", False, EQUAL),
        ("bitsandbytes double", False, ROUNDED),
    ],
)
def test_qlora_trains_like_the_library(how: str, shared_values: bool, bounds: dict[str, float]) -> None:
    for name in (how.split()[0], "peft"):
        library(name)
    found = run(1, trains_like, how, shared_values)[0]
    assert all(found[what] <= bound for what, bound in bounds.items()), found
    assert found["loss"] > 0 or found["gradients"] > 0  # two computations, not one


# Balancing losses

ROUTED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
COEFFICIENT = 0.5  # transformers' router_aux_loss_coef
Z_COEFFICIENT = 0.2  # these models have no router z-loss in transformers: compared with the ST-MoE paper's formula
for _family in ROUTED:  # before the fork
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")


def source_of(config: Any, packed_documents: bool, padding: int) -> Any:
    inner = parity.Ragged(parity.Mock(config.vocab_size, parity.SEQ, 1), packed_documents)
    return Padded(inner, padding) if padding else inner


class Padded:
    """Samples that end after a target, with padding up to the full length: 0, 1 or 2 times `padding` tokens."""

    def __init__(self, inner: Any, padding: int) -> None:
        self.inner, self.padding = inner, padding

    def samples(self, numbers: Any) -> Any:
        found = self.inner.samples(numbers)
        for row, number in enumerate(numbers):
            last = found.width - 1 - number % 3 * self.padding  # the last token of the data
            found.tokens[row, last + 1 :] = 0
            found.loss_mask[row, last:] = False
            found.loss_mask[row, last - 1] = True
        return found


def balanced_like_transformers(
    rank: int, world: int, family: str, layers: int, folder: str, packed_documents: bool = False, padding: int = 0
) -> dict[str, float]:
    """Return differences of the balancing loss and of all gradients from transformers' output_router_logits path."""
    settings = {**FAMILIES[family], "num_hidden_layers": layers}
    if "layer_types" in settings:
        settings["layer_types"] = ["full_attention"] * layers
    config = transformers_config(settings)
    config.router_aux_loss_coef, config.output_router_logits = COEFFICIENT, True
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config).float().train()
    if rank == 0:
        theirs.save_pretrained(folder)
    dist.barrier()
    topk = int(config.num_experts_per_tok)
    layout = types.Layout(micro_batch_size=parity.BATCH // world, ep=world)
    weights = {"aux_loss": COEFFICIENT * topk / layers, "router_z_loss": Z_COEFFICIENT}
    balancing = types.Moe(balancing="aux_loss" if world == 1 else "global_aux_loss", **weights)
    given = msgspec.structs.replace(parity.recipe(layout, moe=balancing), goal="sft" if padding else "pretrain")
    mesh = parity.build_mesh(given.layout, "cpu")
    source = source_of(config, packed_documents, padding)
    ours_config = transformers_config(settings)
    trainer = Trainer(given, ours_config, mesh, torch.device("cpu"), source, Path(folder))
    batch = trainer.loader.batch(0)
    trainer.forward_backward(batch)
    trainer.finish_gradients()
    statistics = moe.statistics(trainer.routers, dist.group.WORLD)
    ours = {n: full_tensor(p.grad) for n, p in trainer.stages[0].named_parameters() if p.grad is not None}

    tokens, labels, loss_weights, positions = (
        gathered(one) for one in (batch.tokens, *(batch.model_kwargs[n] for n in ("labels", "weights", "positions")))
    )
    mask = torch.ones_like(tokens)
    for row in range(len(mask) if padding else 0):
        mask[row, mask.shape[1] - row % 3 * padding :] = 0
    more = {"position_ids": positions} if packed_documents else {"attention_mask": mask}
    out = theirs(tokens, use_cache=False, **more)
    each = functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="none")
    lm_loss = (each * loss_weights.flatten()).sum()
    spread = covariance([logits[mask.flatten().bool()] for logits in out.router_logits], topk)
    z_losses = [logits[mask.flatten().bool()].logsumexp(-1).square().mean() for logits in out.router_logits]
    (lm_loss + COEFFICIENT * (out.aux_loss + spread) + Z_COEFFICIENT * sum(z_losses)).backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    same = [name for name in wanted if name in ours and ours[name].shape == wanted[name].shape]
    routers = [name for name in same if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == layers
    total = statistics["aux_loss"] * layers
    return {
        "loss": abs(total / (COEFFICIENT * float((out.aux_loss + spread).detach())) - 1),
        "z_loss": abs(statistics["z_loss"] * layers / (Z_COEFFICIENT * sum(z.item() for z in z_losses)) - 1),
        "routers": max(differ(ours[name], wanted[name]) for name in routers),
        "all": max(differ(ours[name], wanted[name]) for name in same if wanted[name].abs().max() > 1e-4),
        "spread": float((spread / out.aux_loss).detach()),
    }


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def covariance(router_logits: Any, topk: int) -> torch.Tensor:
    """Return K · E · Σ of the covariance over the layers of an expert's share of pairs and its mean probability."""
    probabilities = torch.stack([logits.softmax(-1) for logits in router_logits])
    experts = probabilities.shape[-1]
    chosen = functional.one_hot(probabilities.topk(topk).indices, experts).sum(2).float()
    share, mean = chosen.mean(1) / topk, probabilities.mean(1)
    return topk * experts * ((share * mean).mean(0) - share.mean(0) * mean.mean(0)).sum()


@pytest.mark.parametrize(
    ("family", "layers", "packed_documents", "padding"),
    [
        ("mixtral", 1, False, 0),
        ("qwen3_moe", 2, False, 0),
        ("gpt_oss", 2, False, 5),
        ("olmoe", 2, True, 0),
        *(pytest.param(family, 1, False, 0, marks=pytest.mark.slow) for family in ROUTED[1:]),
    ],
)
def test_balancing_loss_is_transformers_by_the_documented_relation(
    family: str, layers: int, packed_documents: bool, padding: int, tmp_path: Path
) -> None:
    """moe.aux_loss = router_aux_loss_coef · K / L; the rest is the covariance over layers, zero with one layer."""
    found = run(1, balanced_like_transformers, family, layers, str(tmp_path), packed_documents, padding)[0]
    assert max(found["loss"], found["z_loss"]) < 1e-5, found
    assert max(found["routers"], found["all"]) < 2e-5, found
    assert abs(found["spread"]) < 1e-6 if layers == 1 else found["spread"] > 1e-4, found


@pytest.mark.slow
def test_the_global_balancing_loss_is_transformers_on_the_batch_of_all_ranks(tmp_path: Path) -> None:
    # Without padding: micro batches count equally, so that ranks with uneven padding differ from one large batch.
    for found in run(2, balanced_like_transformers, "qwen3_moe", 3, str(tmp_path)):
        assert max(found["loss"], found["z_loss"]) < 1e-5, found
        assert max(found["routers"], found["all"]) < 2e-5, found


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ep": ("mixtral", 2, {"ep": 2}),
    "tp-sp-recompute": ("qwen3_moe", 2, {"tp": 2, "sp": True, "recompute": "full"}),
    "cp": ("qwen3_moe", 2, {"cp": 2}),
    "pp": ("qwen3_moe", 2, {"pp": 2}),
    "mtp": ("qwen3_next", 2, {"tp": 2, "sp": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_is_left_out_of_balancing_losses_in_every_layout(name: str, balancing: Any) -> None:
    family, world, layout = LAYOUTS[name]
    given = parity.recipe(
        types.Layout(**{"micro_batch_size": parity.MICRO_BATCH, **layout}),
        moe=types.Moe(balancing=balancing, aux_loss=0.5, router_z_loss=0.1),
        train=types.Train(global_batch_size=parity.BATCH, steps=100, mtp_loss=0.1 if name == "mtp" else 0.0),
    )
    found = parity.differences(family, world, msgspec.structs.replace(given, goal="sft"), 2)
    assert max(found.values()) <= parity.TOLERANCE, found


def test_padding_is_all_after_the_last_target() -> None:
    loss_mask = np.array([[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=np.bool_)
    assert tokens_up_to_last_target(loss_mask).sum(1).tolist() == [5, 0, 6]


@pytest.mark.parametrize(("peft", "said"), [(QLORA, True), (PEFT, False)])
def test_evaluate_says_that_adapters_beside_4_bits_are_merged_before_rounding(peft: types.Peft, said: bool) -> None:
    with collected_notes() as printed:
        perplexity._note_merged(recipe(peft=peft))
    assert bool(printed) == said
