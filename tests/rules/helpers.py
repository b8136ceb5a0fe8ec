"""Small hand-written models, GPUs and clusters, so that these tests do not depend on a catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from meshwright.clusters import Cluster, Gpu
from meshwright.models import (
    MLA,
    Attention,
    Dense,
    GatedDelta,
    Group,
    Layer,
    Mamba2,
    ModelSpec,
    MoE,
    Quantization,
    Vision,
)
from meshwright.recipes.case import Case
from meshwright.recipes.types import SECTIONS, Engine, Goal, Recipe, recipe_fields

NAMES = {info.flat: key for key, info in recipe_fields().items()}


def _layers(layer: Layer, count: int) -> tuple[Group, ...]:
    return (Group(layer, tuple(range(count))),)


def model(
    mixer: Any = None, ffn: Any = None, layers: int = 32, hidden: int = 4096, family: str = "test", **facts: Any
) -> ModelSpec:
    """Return a model of equal layers, by default like an 8B one."""
    layer = Layer(mixer or Attention(32, 8, 128), ffn or Dense(14336), norm_params=2 * hidden)
    defaults: dict[str, Any] = {"name": family, "kind": "causal_lm", "vocab": 128256, "max_seq_length": 131072}
    return ModelSpec(family=family, hidden=hidden, groups=_layers(layer, layers), **{**defaults, **facts})


DENSE = model()
SMALL = model(Attention(16, 4, 64), Dense(2816), layers=12, hidden=1024)
TIED = model(tied=True)
GPT = model(Attention(32, 32, 128), learned_positions=2048, max_seq_length=2048)
WINDOWED = model(Attention(32, 8, 128, window=4096))
MIXTURE = model(ffn=MoE(64, 8, 1024, shared_width=1024), layers=24, hidden=2048)
BALANCED = model(ffn=MoE(64, 8, 1024, balance_bias=True), layers=24, hidden=2048)
PLAIN_MIXTURE = model(ffn=MoE(64, 8, 1024), layers=24, hidden=2048)
BIASED_MIXTURE = model(ffn=MoE(32, 4, 2880, bias=True), layers=24, hidden=2880)
LARGE_MIXTURE = model(ffn=MoE(256, 8, 2048), layers=60, hidden=7168)
LATENT = model(MLA(32, 512, 128, 64, 128), MoE(64, 6, 1408, shared_width=2816), layers=27, hidden=2048, mtp_layers=1)
STATE_SPACE = model(Mamba2(64, 64, 128, 8), family="nemotron")
DELTA = model(GatedDelta(16, 32, 128, 128), MoE(512, 10, 512), layers=48, hidden=2048, family="qwen")
VISION_LANGUAGE = model(
    kind="vision_language",
    vision=Vision(27, 1152, 4304, 16, 16, layer_params=15_000_000, stem_params=1, connector_params=1),
)
GPT_OSS = model(Attention(64, 8, 64), layers=24, hidden=2880, family="gpt_oss", model_type="gpt_oss")
NEXT = model(GatedDelta(16, 32, 128, 128), MoE(512, 10, 512), layers=48, hidden=2048, model_type="qwen3_next")
QWEN35 = model(
    GatedDelta(16, 32, 128, 128),
    MoE(256, 8, 512),
    layers=40,
    hidden=2048,
    model_type="qwen3_5_moe",
    kind="vision_language",
    vision=VISION_LANGUAGE.vision,
)
PHI3 = model(model_type="phi3")
GEMMA3 = model(model_type="gemma3", kind="vision_language", vision=VISION_LANGUAGE.vision)
VISION_MIXTURE = model(
    ffn=MoE(64, 8, 1024), layers=24, hidden=2048, kind="vision_language", vision=VISION_LANGUAGE.vision
)
QWEN3_VL = model(model_type="qwen3_vl", kind="vision_language", vision=VISION_LANGUAGE.vision)
TWO_PREDICTIONS = model(ffn=MoE(64, 8, 1024), layers=24, hidden=2048, mtp_layers=2)
WRONG_TOPK = model(ffn=MoE(4, 8, 1024), layers=24, hidden=2048)
ODD_WIDTH = model(Attention(24, 24, 64), Dense(4100), hidden=1530, vocab=50257)
GPTQ = model(quantization=Quantization("gptq", reason="GPTQ's grouped integers are not read"))
JAMBA = model(model_type="jamba")  # run by transformers
MIMO = model(model_type="mimo")  # transformers has no class for it
DIFFUSION = model(kind="diffusion", vocab=0, max_seq_length=0)

GPUS = {
    "H100": Gpu("H100", "hopper", 9.0, 79.6, {"bf16": 989.0, "fp8": 1979.0}, 3350, 450, 8, 50, 8),
    "A100": Gpu("A100", "ampere", 8.0, 79.3, {"bf16": 312.0}, 2039, 300, 8, 25, 8),
    "B200": Gpu("B200", "blackwell", 10.0, 179.0, {"bf16": 2250.0, "fp8": 4500.0, "fp4": 9000.0}, 8000, 900, 8, 50, 8),
    "GB200": Gpu(
        "GB200", "blackwell", 10.0, 184.0, {"bf16": 2500.0, "fp8": 5000.0, "fp4": 10000.0}, 8000, 900, 72, 50, 4
    ),
    "MI300X": Gpu("MI300X", "cdna3", 9.4, 191.0, {"bf16": 1307.0, "fp8": 2614.0}, 5300, 448, 8, 50, 8),
}


OLD_GPU = Cluster(Gpu("V100", "ampere", 7.0, 31.7, {"fp16": 125.0, "bf16": 1.0}, 900, 150, 8, 12, 8), 1, 8)
WITHOUT_BF16 = Cluster(Gpu("V100", "volta", 7.0, 31.7, {"fp32": 15.7, "fp16": 125.0}, 900, 150, 8, 12, 8), 1, 8)


def cluster(count: int = 8, gpu: str = "H100") -> Cluster:
    """Return a cluster of this many GPUs in nodes of the usual size."""
    per_node = max(n for n in range(1, GPUS[gpu].gpus_per_node + 1) if count % n == 0)
    return Cluster(GPUS[gpu], count // per_node, per_node)


@dataclass(frozen=True)
class StubMemory:
    """Memory by part in GiB, as an estimate gives it."""

    weights: Any = 1.0
    gradients: Any = 1.0
    optimizer: Any = 1.0
    activations: Any = 1.0
    logits: Any = 0.0
    buffers: Any = 0.0
    overhead: Any = 1.0
    capacity: float = 79.6
    band_pct: float = 0.0
    host: Any = 0.0
    least_state: float = 0.0

    @property
    def usable(self) -> float:
        return 0.98 * self.capacity

    @property
    def fit_probability(self) -> Any:
        """Return whether the band ends below capacity; else a chance between a half and one, or none."""
        return np.where(self.total * (1 + self.band_pct / 100) <= self.usable, 1.0, np.where(self.fits, 0.8, 0.0))

    @property
    def fits(self) -> Any:
        return self.total <= 0.98 * self.capacity

    @property
    def total(self) -> Any:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.logits, self.buffers)
        return sum(parts) + self.overhead


def recipe(goal: Goal = "pretrain", benchmark: bool = False, **values: Any) -> Recipe:
    """Return a recipe with some fields set by flat name; unknown names and wrong types are errors."""
    sections: dict[str, dict[str, Any]] = {}
    for flat, value in values.items():
        section, name = NAMES[flat].split(".")
        sections.setdefault(section, {})[name] = value
    built = {name: msgspec.convert(fields, SECTIONS[name]) for name, fields in sections.items()}
    return Recipe(name="test", model="test", goal=goal, cluster="8xH100", benchmark=benchmark, **built)


def case(
    spec: ModelSpec = DENSE,
    on: Cluster | None = None,
    engine: Engine = "meshwright",
    goal: Goal = "pretrain",
    benchmark: bool = False,
    memory: Callable[[Case], dict[str, Any]] | None = None,
    samples: int = 0,
    **values: Any,
) -> Case:
    """Return a case of a test model on a test cluster, with the counted samples of its epochs."""
    memory_of = (lambda case: StubMemory(**memory(case))) if memory else None
    built = Case(recipe(goal, benchmark, **values), spec, on or cluster(), engine, memory_of=memory_of)
    return built.with_samples(samples) if samples else built


def parse(override: str) -> tuple[str, Any]:
    """Parse an override into a flat name and a typed value."""
    key, text = override.split("=", 1)
    info = recipe_fields()[key]
    if text.startswith("["):
        raw: Any = [part for part in text[1:-1].split(",") if part]
    else:
        raw = text
    return info.flat, msgspec.convert(raw, info.type, strict=False)
