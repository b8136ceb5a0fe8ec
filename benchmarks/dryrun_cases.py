"""The configurations whose memory on one GPU is compared with the dry run.

Slices of published models, so that state, activations and logits all matter and fit on one GPU of 139 GiB.
Nothing here needs a GPU: the measurement and the prediction import the same table.
"""

from __future__ import annotations

import msgspec

from meshwright.recipes.overrides import apply
from meshwright.recipes.types import Data, Goal, Recipe, Schedule, Train

STEPS = 3  # optimizer steps of every case; the first creates the optimizer state


class Case(msgspec.Struct, frozen=True):
    """One configuration: a model, a goal and overrides."""

    name: str
    model: str
    overrides: tuple[str, ...] = ()
    goal: Goal = "pretrain"
    plain_allocator: bool = False  # also measured without expandable segments


HALF = ("precision.master=bf16", "precision.moments=bf16", "precision.grads=bf16", "precision.reduce=bf16")
MASTERS = ("precision.master=fp32", "precision.grads=fp32", "precision.reduce=fp32")
COMPILED = "kernels.compile=true"


def _layers(count: int) -> str:
    return f"architecture.layers={count}"


def _samples(micro_batch: int, micro_batches: int = 1, seq_length: int = 4096) -> tuple[str, ...]:
    return (
        f"layout.micro_batch_size={micro_batch}",
        f"train.global_batch_size={micro_batch * micro_batches}",
        f"data.seq_length={seq_length}",
    )


def _llama(name: str, *overrides: str, micro_batch: int = 4, plain_allocator: bool = False) -> Case:
    """Return four layers of Llama 3 8B in bf16 with one micro batch per step."""
    given = (_layers(4), *HALF, *_samples(micro_batch), *overrides)
    return Case(name, "llama3_8b", given, plain_allocator=plain_allocator)


def _part(name: str, model: str, layers: int, micro_batch: int, seq_length: int, *overrides: str) -> Case:
    """Return some layers of a model in bf16 with one micro batch per step."""
    return Case(name, model, (_layers(layers), *HALF, *_samples(micro_batch, 1, seq_length), *overrides))


def _modules(*names: str) -> tuple[str, ...]:
    return ("layout.recompute=selective", f"layout.recompute_modules={','.join(names)}")


DENSE = (
    Case("llama", "llama3_8b", (_layers(8), *HALF, *_samples(1)), plain_allocator=True),
    _llama("llama batch 4", plain_allocator=True),
    Case("llama 16k", "llama3_8b", (_layers(4), *HALF, *_samples(1, 1, 16384))),
    Case("llama masters", "llama3_8b", (_layers(4), *MASTERS, *_samples(2)), plain_allocator=True),
    Case("llama masters, 3 micro batches", "llama3_8b", (_layers(4), *MASTERS, *_samples(2, 3))),
    Case("llama 3 micro batches", "llama3_8b", (_layers(4), *HALF, *_samples(2, 3))),
    _llama("llama selective", "layout.recompute=selective"),
    _llama("llama selective modules", *_modules("core_attn", "layernorm", "mlp")),
    _llama("llama full", "layout.recompute=full", plain_allocator=True),
    _llama("llama full, half of the layers", "layout.recompute=full", "layout.recompute_layers=2"),
    _llama("llama loss plain", "kernels.loss=plain"),
    _llama("llama loss chunked", "kernels.loss=chunked"),
    _llama("llama loss fused", "kernels.loss=fused_linear"),
    _llama("llama masters full fused", *MASTERS, "layout.recompute=full", "kernels.loss=fused_linear"),
    _llama("llama muon", "optimizer.name=muon", micro_batch=1),
    _llama("llama lion", "optimizer.name=lion", micro_batch=1),
    _llama("llama flash", "kernels.attention=flash"),
    Case("llama eager", "llama3_8b", (_layers(4), *HALF, *_samples(2, 1, 2048), "kernels.attention=eager")),
    _llama("llama offload", "layout.offload=activations", micro_batch=2),
    _llama("llama fp8", "precision.matmul=fp8_tensor"),
    Case(
        "llama masters, optimizer on the host",
        "llama3_8b",
        (_layers(1), *MASTERS, *_samples(2), "layout.offload=optimizer"),
    ),
    Case("llama 1B", "llama32_1b", (*HALF, *_samples(2))),
    _part("gemma2", "gemma2_2b", 6, 1, 8192),
    _part("gemma3", "gemma3_1b", 12, 2, 4096),
)
EXPERTS = (
    _part("gpt-oss", "gpt_oss_20b", 4, 1, 4096),
    _part("qwen3 experts", "qwen3_30b_a3b", 4, 2, 4096),
    _part("qwen3 experts, activations again", "qwen3_30b_a3b", 4, 2, 4096, *_modules("moe_act", "layernorm")),
    _part("qwen3 experts full", "qwen3_30b_a3b", 4, 4, 4096, "layout.recompute=full"),
    Case("qwen3 experts masters", "qwen3_30b_a3b", (_layers(3), *MASTERS, *_samples(2))),
    _part("moonlight", "moonlight_16b", 4, 2, 4096),
    _part("moonlight, parts again", "moonlight_16b", 4, 2, 4096, *_modules("mla_up_proj", "moe_act", "layernorm")),
    _part("deepseek-v3", "deepseek_v3", 4, 1, 4096, "architecture.experts=32"),
    _part("deepseek-v3, two tokens ahead", "deepseek_v3", 4, 1, 4096, "architecture.experts=16", "train.mtp_loss=0.3"),
)
STATE_SPACE = (
    _part("qwen3-next", "qwen3_next_80b_a3b", 4, 1, 1024, "architecture.experts=64"),
    _part("qwen3-next 8k", "qwen3_next_80b_a3b", 4, 1, 8192, "architecture.experts=64"),
    _part("nemotron-h", "nemotronh_8b", 8, 1, 1024),
    _part("nemotron-h 8k", "nemotronh_8b", 12, 2, 8192),
    Case("nemotron-h packed", "nemotronh_8b", (_layers(8), *HALF, *_samples(1), "data.packing=true"), goal="sft"),
)
FINE_TUNING = (
    Case("lora", "llama3_8b", (*HALF, *_samples(1), "kernels.loss=fused_linear"), goal="peft"),
    Case("lora full", "llama3_8b", (*_samples(4), "layout.recompute=full"), goal="peft"),
    Case("qlora", "llama3_8b", (*HALF, *_samples(1), "peft.method=qlora", "kernels.loss=fused_linear"), goal="peft"),
    Case("packed", "llama3_8b", (_layers(4), *HALF, *_samples(2), "data.packing=true"), goal="sft"),
)
COMPILED_CASES = (
    _llama("llama compiled", COMPILED),
    _llama("llama compiled full", COMPILED, "layout.recompute=full"),
    _llama("llama compiled selective, fused", COMPILED, "layout.recompute=selective", "kernels.loss=fused_linear"),
    _llama("llama compiled fp8", COMPILED, "precision.matmul=fp8_tensor"),
    Case("llama compiled masters", "llama3_8b", (_layers(4), *MASTERS, *_samples(2), COMPILED)),
    _part("qwen3 experts compiled", "qwen3_30b_a3b", 4, 2, 4096, COMPILED),
    Case("lora compiled", "llama3_8b", (*HALF, *_samples(2), COMPILED, "kernels.loss=fused_linear"), goal="peft"),
    _part("gemma3 compiled", "gemma3_1b", 12, 2, 4096, COMPILED),
)
CASES: tuple[Case, ...] = (*DENSE, *EXPERTS, *STATE_SPACE, *FINE_TUNING, *COMPILED_CASES)


def recipe_of(case: Case) -> Recipe:
    """Return the recipe of a case on one H200."""
    start = Recipe(
        name=case.name,
        model=case.model,
        goal=case.goal,
        cluster="1xH200",
        data=Data(dataset="mock", prefetch=0, workers=0),
        train=Train(steps=STEPS, check_nan=False),
        schedule=Schedule(name="constant", warmup_steps=0),
    )
    return apply(start, _last_of_each_key(case.overrides))


def _last_of_each_key(overrides: tuple[str, ...]) -> list[str]:
    """Return the last override of each key: a case may override its group."""
    return list({text.partition("=")[0]: text for text in overrides}.values())
