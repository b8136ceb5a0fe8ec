"""All techniques of the engine as data: layouts whose training must equal that of one process.

A layout is tested with some families. For the others a rule refuses it, which is named, or a tested family represents
all that share the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engine.families import ALL, BALANCE_BIAS, DENSE, LATENT_ATTENTION, SHARED_EXPERTS, SPARSE

from meshwright.recipes import types

EXPERTS_NEED_SP = "sequence_parallel.required-by-moe"
NO_EXPERTS = "moe.ep-needs-experts"
ONE_BACKWARD = "recompute.ops-zero-bubble"
FOREIGN_MODULE = "recompute.modules-of-the-model"
NO_BIAS = "moe.bias-balancing"

# One family per code path: plain, windowed with softcap and tied, experts, latent attention with shared experts,
# state space, gated delta.
REPRESENTATIVES = ("llama", "gemma2", "olmoe", "deepseek_v3", "nemotron_h", "qwen3_next")
FEW = ("llama", "qwen3_moe")
MIXTURES = ("olmoe", "gpt_oss", "deepseek_v3", "nemotron_h")


@dataclass(frozen=True)
class Tried:
    """A layout, the families it is tested with and the rules that refuse it for others."""

    name: str
    technique: str  # its column in the table of supported techniques
    world: int
    layout: Mapping[str, Any]
    families: tuple[str, ...] = ALL
    sections: Mapping[str, Any] = field(default_factory=dict)  # further sections of the recipe
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # rule -> families it refuses
    quick: tuple[str, ...] = ()  # families of every test run; the others are slow
    also: tuple[str, ...] = ()  # further techniques that it contains
    fails: Mapping[str, str] = field(default_factory=dict)  # family -> why it is known not to work

    @property
    def runs(self) -> tuple[str, ...]:
        """All families it is tested with."""
        return tuple(dict.fromkeys((*self.families, *self.quick)))


def _pipeline(schedule: str, chunks: int = 1, **more: Any) -> dict[str, Any]:
    return {"pp": 2, "vp": chunks, "pp_schedule": schedule, **more}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": modules}


TP_SP: dict[str, Any] = {"tp": 2, "sp": True}
ADAM = {
    "lr": 1e-2,
    "eps": 1e-4,
    "weight_decay": 0.1,
}  # a large eps: gradients that are zero up to rounding change nothing

DATA = (
    Tried("ddp", "ddp", 2, {"strategy": "ddp"}, quick=("qwen2",)),
    Tried("fsdp2", "fsdp2", 2, {}),  # quick: with full recompute below
    Tried("hsdp", "hsdp", 4, {"dp_replicate": 2, "micro_batch_size": 1}),  # quick: with expert ranks below
    Tried("weights-kept", "fsdp2 options", 2, {"reshard_after_forward": False}, FEW),
    Tried("sums-every-micro-batch", "fsdp2 options", 2, {"defer_grad_sync": False}, FEW, quick=("llama",)),
    Tried(
        "sums-every-micro-batch-hsdp",
        "fsdp2 options",
        4,
        {"defer_grad_sync": False, "dp_replicate": 2, "micro_batch_size": 1},
        FEW,
    ),
)
TENSOR = (
    Tried("tp", "tp", 2, {"tp": 2}, DENSE, refused={EXPERTS_NEED_SP: SPARSE}, quick=("gpt2",)),
    Tried("tp-sp", "tp+sp", 2, TP_SP),  # quick: with experts, optimizers and losses below
    Tried("tp4-copied-kv", "tp+sp", 4, {"tp": 4, "sp": True}, quick=("qwen3",)),
    Tried("tp4-copied-kv-no-sp", "tp", 4, {"tp": 4}, DENSE, refused={EXPERTS_NEED_SP: SPARSE}),
)
PIPELINE = (
    Tried("1f1b", "pp", 2, _pipeline("1f1b")),  # quick: with uneven stages below
    Tried("gpipe", "pp", 2, _pipeline("gpipe"), REPRESENTATIVES),
    Tried("interleaved", "pp interleaved", 2, _pipeline("interleaved_1f1b", 2), quick=("gemma3_text",)),
    Tried("looped-bfs", "pp interleaved", 2, _pipeline("looped_bfs", 2), REPRESENTATIVES),
    Tried("interleaved-zero-bubble", "pp zero bubble", 2, _pipeline("interleaved_zero_bubble", 2), REPRESENTATIVES),
    Tried("zbv", "pp zero bubble", 2, _pipeline("zbv", 2)),  # quick: in test_mtp.py
    Tried("dualpipe-v", "pp zero bubble", 2, _pipeline("dualpipe_v", 2), REPRESENTATIVES, quick=("qwen3_moe",)),
    Tried("uneven-stages", "pp", 2, _pipeline("1f1b", stage_layers=(3, 1)), FEW, quick=("deepseek_v2",)),
    Tried("uneven-chunks", "pp interleaved", 2, _pipeline("interleaved_1f1b", 2, stage_layers=(1, 1, 1, 1)), FEW),
    Tried("ends-as-layers", "pp", 3, {"pp": 3, "embedding_as_layer": True, "head_as_layer": True}, FEW),
)
CONTEXT = (
    Tried("cp-ring", "cp ring", 2, {"cp": 2}),  # quick: with packed documents below
    Tried("cp-a2a", "cp a2a", 2, {"cp": 2, "cp_comm": "a2a"}, quick=("qwen3_5",)),
    Tried("cp-allgather", "cp allgather", 2, {"cp": 2, "cp_comm": "allgather"}, quick=("gpt_oss",)),
    Tried("cp-a2a-ring", "cp a2a+ring", 4, {"cp": 4, "cp_comm": "a2a+ring", "cp_inner": 2}, quick=("qwen2",)),
)
EXPERTS = (
    Tried("ep", "ep", 2, {"ep": 2}, SPARSE, refused={NO_EXPERTS: DENSE}),  # quick: balanced by a bias below
    Tried("ep4", "ep", 4, {"ep": 4, "micro_batch_size": 1}, SPARSE, refused={NO_EXPERTS: DENSE}),
    Tried("etp", "etp", 2, {"etp": 2}, SPARSE, refused={NO_EXPERTS: DENSE}, quick=("gpt_oss",)),
    Tried("ep-etp", "etp", 4, {"ep": 2, "etp": 2, "micro_batch_size": 1}, SPARSE, refused={NO_EXPERTS: DENSE}),
    Tried("ep-tp-sp", "ep × tp", 2, {**TP_SP, "ep": 2}, SPARSE, refused={NO_EXPERTS: DENSE}, quick=("deepseek_v3",)),
    Tried(
        "ep-hsdp",
        "ep × hsdp",
        4,
        {"ep": 2, "dp_replicate": 2, "micro_batch_size": 1},
        SPARSE,
        refused={NO_EXPERTS: DENSE},
        quick=("mixtral",),
        also=("hsdp",),
    ),
    Tried(
        "ep-over-copies",
        "ep × hsdp",
        4,
        {"ep": 4, "dp_replicate": 2, "micro_batch_size": 1},
        (),
        refused={"topology.expert-shard-group": SPARSE, NO_EXPERTS: DENSE},
    ),
    Tried("ep-cp", "ep × cp", 2, {"ep": 2, "cp": 2}, ("olmoe", "deepseek_v3"), quick=("qwen3_next",)),
    Tried("ep-pp", "ep × pp", 4, _pipeline("1f1b", ep=2), ("olmoe", "deepseek_v3", "gpt_oss"), quick=("nemotron_h",)),
    Tried("ep-zero-bubble", "ep × pp", 4, _pipeline("zbv", 2, ep=2, micro_batch_size=1), ("olmoe", "deepseek_v3")),
)


def _balancing(**moe: Any) -> dict[str, Any]:
    return {"moe": types.Moe(**{"aux_loss": 0.05, **moe})}


BALANCED_IN: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"ep": 2}),
    "tp-sp": (2, TP_SP),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
}
BALANCING = (
    *(
        Tried(
            f"{kind}-{place}",
            "balancing by loss",
            world,
            layout,
            ("olmoe", "deepseek_v3"),
            _balancing(**moe),
            quick=("olmoe",) if (kind, place) == ("sequence-loss", "cp") else (),
        )
        for place, (world, layout) in BALANCED_IN.items()
        for kind, moe in {
            "sequence-loss": {"balancing": "seq_aux_loss"},
            "global-loss": {"balancing": "global_aux_loss"},
            "router-z-loss": {"router_z_loss": 0.01},
        }.items()
    ),
    *(
        Tried(
            f"bias-{place}",
            "balancing by bias",
            world,
            layout,
            BALANCE_BIAS,
            _balancing(balancing="bias"),
            refused={NO_BIAS: tuple(f for f in SPARSE if f not in BALANCE_BIAS)},
            quick=("glm4_moe",) if place == "ep" else (),
            also=("ep",) if place == "ep" else (),
        )
        for place, (world, layout) in BALANCED_IN.items()
    ),
    Tried(
        "capacity",
        "token dropping",
        2,
        {"ep": 2},
        (),
        _balancing(capacity_factor=1.0),
        refused={"moe.no-capacity": SPARSE},
    ),
)
RECOMPUTE = (
    Tried("recompute", "recompute full", 2, {"recompute": "full"}, quick=("qwen3_5_moe",), also=("fsdp2",)),
    Tried("recompute-one-layer", "recompute full", 2, {"recompute": "full", "recompute_layers": 1}, FEW),
    Tried("recompute-tp-sp", "recompute full", 2, {"recompute": "full", **TP_SP}, REPRESENTATIVES),
    Tried("recompute-cp", "recompute full", 2, {"recompute": "full", "cp": 2}, REPRESENTATIVES),
    Tried("recompute-ep", "recompute full", 2, {"recompute": "full", "ep": 2}, ("olmoe", "deepseek_v3")),
    Tried("recompute-pp", "recompute full", 2, _pipeline("1f1b", recompute="full"), REPRESENTATIVES),
    Tried("recompute-zero-bubble", "recompute full", 2, _pipeline("zbv", 2, recompute="full"), REPRESENTATIVES),
    Tried("recompute-ops", "recompute ops", 2, _selective("ops"), quick=("qwen3",)),
    Tried("recompute-ops-tp-sp", "recompute ops", 2, {**_selective("ops"), **TP_SP}, REPRESENTATIVES),
    Tried("recompute-ops-cp", "recompute ops", 2, {**_selective("ops"), "cp": 2}, REPRESENTATIVES),
    Tried(
        "recompute-ops-zero-bubble",
        "recompute ops",
        2,
        _pipeline("interleaved_zero_bubble", 2, **_selective("ops")),
        (),
        refused={ONE_BACKWARD: ALL},
    ),
    *(
        Tried(
            f"recompute-{module}",
            f"recompute {modules}",
            2,
            _selective(module),
            families,
            refused={FOREIGN_MODULE: tuple(family for family in ALL if family not in having)},
            quick=quick,
        )
        for module, modules, families, having, quick in (
            ("core_attn", "modules", REPRESENTATIVES, ALL, ()),
            ("layernorm", "modules", REPRESENTATIVES, ALL, ()),
            ("mlp", "modules", REPRESENTATIVES, ALL, ()),
            ("moe", "experts", MIXTURES, SPARSE, ()),
            ("moe_act", "experts", MIXTURES, SPARSE, ()),
            ("mla_up_proj", "mla_up_proj", LATENT_ATTENTION, LATENT_ATTENTION, ()),
            ("shared_experts", "shared_experts", SHARED_EXPERTS, SHARED_EXPERTS, ()),
        )
    ),
    Tried(
        "recompute-several",
        "recompute modules",
        2,
        {**_selective("core_attn", "layernorm", "mla_up_proj", "moe_act", "shared_experts"), **TP_SP},
        ("deepseek_v3",),
        quick=("deepseek_v3",),
        also=("recompute experts", "recompute mla_up_proj", "recompute shared_experts"),
    ),
    Tried("recompute-mla-tp-sp", "recompute mla_up_proj", 2, {**_selective("mla_up_proj"), **TP_SP}, LATENT_ATTENTION),
)
OFFLOAD = (
    Tried("offload-params", "offload", 2, {"offload": "params"}, FEW, quick=("llama",)),
    Tried("offload-optimizer", "offload", 2, {"offload": "optimizer"}, FEW),
    Tried("offload-activations", "offload", 2, {"offload": "activations"}, REPRESENTATIVES, quick=("llama",)),
    Tried("offload-activations-tp-sp", "offload", 2, {"offload": "activations", **TP_SP}, FEW),
    Tried("offload-params-tp-sp", "offload", 4, {"offload": "params", **TP_SP}, FEW),
    Tried("offload-params-pp", "offload", 4, _pipeline("1f1b", offload="params"), FEW),
    Tried("offload-params-ep", "offload", 2, {"offload": "params", "ep": 2}, ("olmoe",)),
)


def _loss(kind: str) -> dict[str, Any]:
    return {
        "kernels": types.Kernels(loss=kind),  # type: ignore[arg-type]  # one of the four names
        "train": types.Train(global_batch_size=8, steps=100, z_loss=1e-2, per_token_loss=True),
    }


LOSSES = tuple(
    Tried(f"{kind}-loss{'-' * bool(place)}{place}", "losses", 2, layout, ("llama", "gemma2"), _loss(kind), quick=quick)
    for kind in ("vocab_parallel", "plain", "chunked", "fused_linear")
    for place, layout, quick in (
        ("", {}, ()),
        ("tp", {"tp": 2}, ()),
        ("tp-sp", TP_SP, ("gemma2",) if kind == "fused_linear" else ()),
        ("cp", {"cp": 2}, ()),
    )
)


def _optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": types.Optimizer(name=name, **ADAM, clip_grad=0.5)}  # type: ignore[arg-type]


OPTIMIZERS = tuple(
    Tried(f"{name}-{place}", "optimizers", world, layout, families, _optimizer(name), quick=quick)
    for name in ("adamw", "muon", "lion", "schedule_free_adamw")
    for place, world, layout, families, quick in (
        ("fsdp2", 2, {}, FEW, ()),
        ("tp-sp", 2, TP_SP, ("llama", "deepseek_v3"), ("llama",) if name == "muon" else ()),
        ("ep-tp-sp", 4, {**TP_SP, "ep": 2}, ("olmoe",), ()),
        ("pp", 2, {"pp": 2}, ("llama", "qwen3"), ()),
    )
)


def _compiled(place: str, layout: dict[str, Any], families: tuple[str, ...], world: int = 2, **more: Any) -> Tried:
    name = f"compile{'-' * bool(place)}{place}"
    return Tried(name, "compile", world, layout, families, {"kernels": types.Kernels(compile=True)}, **more)


COMPILED = (*REPRESENTATIVES, "gpt2", "gpt_oss")
CAT = "a real torch.cat of 4-D gates chooses another memory order than the traced one, and the traced view of it fails"
COMPILE = (
    _compiled("", {}, COMPILED, fails={"qwen3_next": CAT}),
    _compiled("one-rank", {}, ("llama",), 1, quick=("llama",)),  # every rank would trace for seconds
    _compiled("tp-sp", TP_SP, COMPILED, fails={"qwen3_next": CAT}),
    _compiled("recompute", {"recompute": "full"}, ("llama", "olmoe", "gpt2", "qwen3_5")),
    _compiled("ops", _selective("ops"), ("llama", "olmoe", "gpt2")),
    _compiled("ops-tp-sp", {**_selective("ops"), **TP_SP}, ("llama", "olmoe")),
    _compiled("modules-tp-sp", {**_selective("layernorm", "mlp"), **TP_SP}, ("llama",)),
    _compiled("selective", _selective("core_attn", "layernorm", "mlp"), ("llama", "deepseek_v3")),
    _compiled("mla-tp-sp", {**_selective("mla_up_proj", "moe_act"), **TP_SP}, ("deepseek_v3",)),
    _compiled("ep", {"ep": 2}, ("olmoe", "deepseek_v3")),
    _compiled("cp", {"cp": 2}, ("llama", "nemotron_h")),
    _compiled("pp", {"pp": 2}, ("llama", "olmoe")),
    _compiled("zero-bubble", _pipeline("zbv", 2), ("llama", "olmoe")),
)
PACKED_DATA = {"data": types.Data(seq_length=32, packing=True)}
PACKED = tuple(
    Tried(
        f"packed-{place}",
        "packing",
        2,
        layout,
        REPRESENTATIVES,
        PACKED_DATA,
        quick=("gemma2",) if place == "cp" else (),
        also=("cp ring",) if place == "cp" else (),
    )
    for place, layout in {
        "fsdp2": {},
        "tp-sp": TP_SP,
        "pp": {"pp": 2},
        "cp": {"cp": 2},
        "cp-a2a": {"cp": 2, "cp_comm": "a2a"},
    }.items()
)
SEVERAL = (
    Tried("tp-sp-cp", "several axes", 4, {**TP_SP, "cp": 2}, quick=("llama",)),
    Tried("pp-tp-sp", "several axes", 4, _pipeline("1f1b", **TP_SP), REPRESENTATIVES),
    Tried("pp-cp", "several axes", 4, _pipeline("1f1b", cp=2), REPRESENTATIVES),
    Tried("3d", "several axes", 8, _pipeline("1f1b", **TP_SP)),
    Tried(
        "3d-interleaved",
        "several axes",
        8,
        _pipeline("interleaved_1f1b", 2, **TP_SP, micro_batch_size=1),
        ("llama", "nemotron_h"),
    ),
    Tried("3d-cp", "several axes", 8, {**TP_SP, "cp": 2}, ("llama", "deepseek_v3", "qwen3_next")),
    Tried("3d-experts", "several axes", 8, _pipeline("1f1b", **TP_SP, ep=4), ("olmoe", "deepseek_v3", "nemotron_h")),
    Tried("hsdp-tp-sp", "several axes", 8, {**TP_SP, "dp_replicate": 2, "micro_batch_size": 1}, ("llama", "gemma2")),
    Tried("hsdp-tp-sp-ep", "several axes", 8, {**TP_SP, "dp_replicate": 2, "ep": 4, "micro_batch_size": 1}, ("olmoe",)),
    Tried("4d", "several axes", 16, _pipeline("1f1b", **TP_SP, cp=2), ("llama", "gemma2", "nemotron_h")),
    Tried(
        "4d-experts",
        "several axes",
        16,
        _pipeline("zbv", 2, **TP_SP, cp=2, ep=4, micro_batch_size=1, recompute="full"),
        ("deepseek_v3", "qwen3_next"),
    ),
)
REFUSED = (Tried("zero1", "zero1", 2, {"strategy": "zero1"}, (), refused={"strategy.supported": ALL}),)

TRIED: dict[str, Tried] = {
    one.name: one
    for one in (
        *DATA,
        *TENSOR,
        *PIPELINE,
        *CONTEXT,
        *EXPERTS,
        *BALANCING,
        *RECOMPUTE,
        *OFFLOAD,
        *LOSSES,
        *OPTIMIZERS,
        *COMPILE,
        *PACKED,
        *SEVERAL,
        *REFUSED,
    )
}
