"""Hand-built models and cases, small enough to check by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from meshwright.clusters import Cluster, Gpu, cluster
from meshwright.costs.measurements import Measurement, read
from meshwright.models import MLA, Attention, Dense, GatedDelta, Group, Layer, Mamba2, ModelSpec, MoE, Vision
from meshwright.recipes import Recipe
from meshwright.recipes.case import Case

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


@cache
def published(table: str = "measurements") -> tuple[Measurement, ...]:
    """Return the rows of a table of published measurements, which take a second to read."""
    return tuple(read(DATA / f"{table}.csv"))


def llama(
    layers: int = 32, hidden: int = 4096, ffn: int = 14336, heads: int = 32, kv_heads: int = 8, vocab: int = 128256
) -> ModelSpec:
    """Return a Llama shape; the defaults are Llama 3 8B."""
    layer = Layer(Attention(heads, kv_heads, hidden // heads), Dense(ffn), norm_params=2 * hidden)
    groups = (Group(layer, tuple(range(layers))),)
    return ModelSpec("llama", "llama", "causal_lm", hidden, groups, vocab=vocab, final_norm_params=hidden)


def mixtral(layers: int = 8, experts: int = 8, topk: int = 2) -> ModelSpec:
    """Return a small mixture of experts whose first layer is dense."""
    attention = Attention(16, 4, 128)
    dense = Layer(attention, Dense(8192), norm_params=4096)
    moe = Layer(attention, MoE(experts, topk, 2048, shared_width=2048), norm_params=4096)
    groups = (Group(dense, (0,)), Group(moe, tuple(range(1, layers))))
    return ModelSpec("moe", "moe", "causal_lm", 2048, groups, vocab=32000, final_norm_params=2048)


def hybrid() -> ModelSpec:
    """Return a model with one layer of every mixer, MTP and a vision encoder."""
    mixers = (
        Attention(16, 4, 128, window=1024),
        MLA(16, 512, 128, 64, 128, 768),
        Mamba2(64, 64, 128, 8),
        GatedDelta(8, 16, 128, 128),
    )
    groups = tuple(Group(Layer(m, Dense(8192), norm_params=4096), (i, i + 4)) for i, m in enumerate(mixers))
    vision = Vision(4, 512, 2048, 8, 14, 3_000_000, 300_000, 2_000_000, merge=4)
    return ModelSpec(
        "hybrid", "hybrid", "vision_language", 2048, groups, vocab=32000, final_norm_params=2048,
        mtp_layers=1, mtp_layer=groups[0].layer, vision=vision,
    )  # fmt: skip


def diffusion() -> ModelSpec:
    """Return a diffusion transformer: no vocabulary, bidirectional attention, cross-attention to text."""
    block = Layer(Attention(12, 12, 128), Dense(8960, gated=False), cross=Attention(12, 12, 128, context_width=4096))
    return ModelSpec("dit", "wan", "diffusion", 1536, (Group(block, tuple(range(30))),), extra_params=50_000_000)


def case(
    model: ModelSpec, gpus: str | Cluster = "8xH100", goal: str = "pretrain", engine: str = "meshwright", **names: Any
) -> Case:
    """Return a case with some of its flat names replaced."""
    place = cluster(gpus) if isinstance(gpus, str) else gpus
    recipe = Recipe(name="test", model=model.name, goal=goal, cluster=str(gpus))  # type: ignore[arg-type]
    return Case(recipe, model, place, engine).replace(**names)  # type: ignore[arg-type]


def huge_gpu() -> Gpu:
    """Return a GPU on which everything fits."""
    return Gpu("Huge", "hopper", 9.0, 1e6, {"bf16": 1000.0}, 3000, 450, 8, 50, 8)
