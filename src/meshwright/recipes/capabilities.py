"""What each engine executes: one row per recipe field with a restricted set of values.

Rules report the values that an engine does not execute, the cost model prices what runs in their place, the planner
writes it into the recipes it recommends, and docs/capabilities.md prints the table. For our own engine, a row states
what `engine/` does; tests/advice/test_01_capabilities.py compares both, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, get_args

import msgspec
import numpy as np

from meshwright.choices import ENGINES
from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import Recipe, Strategy, keys_by_flat_name, recipe_fields
from meshwright.recipes.values import bare_type

Condition = Callable[[Case], Column]
ENGINE_STRATEGY: dict[str, Strategy] = {"megatron": "zero1"}
"""The engine's equivalent of fsdp2."""
ONE_PASS = ("meshwright", "megatron", "kempnerforge", "fsdp1", "deepspeed")
"""Engines whose pipeline runs all micro batches of a step in one pass."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one field that engines execute, and what they do with others: refuse or ignore them."""

    field: str  # flat name
    name: str  # what the field turns on, in words
    runs: Mapping[str, tuple[Any, ...]]  # executed values by engine; engines without an entry execute every value
    instead: Mapping[str, Any] = {}  # by engine that ignores other values: what runs, or a function of the case
    applies: Condition | None = None  # where the engine reads the field at all; None: everywhere
    where: str = ""  # `applies` in words
    rule: str = ""  # id of the error for engines that refuse other values; empty: a rule of its own module reports it
    ignored_rule: str = ""  # id of the warning for engines that ignore them; empty: engine.ignores-FIELD
    symptom: str = ""  # what a user of a refusing engine sees
    cause: str = ""  # why, for refusing engines
    why: Mapping[str, str] = {}  # why, by engine that ignores
    exported: Mapping[
        str, tuple[Any, ...]
    ] = {}  # by engine, if exports can say fewer values than it runs in some version
    harmless: bool = False  # what runs in place is what the value asks for, or makes no difference
    resets: Mapping[str, Any] = {}  # fields that have no meaning once the value is ignored

    @property
    def warning(self) -> str:
        """Id of the warning for engines that ignore other values."""
        return self.ignored_rule or f"engine.ignores-{self.field}".replace("_", "-")

    @property
    def ignoring(self) -> tuple[str, ...]:
        """Engines that accept other values and run something else."""
        return tuple(engine for engine in ENGINES if engine in self.instead)

    @property
    def refusing(self) -> tuple[str, ...]:
        """Engines that stop with an error at other values."""
        return tuple(engine for engine in ENGINES if engine in self.runs and engine not in self.instead)

    def unsupported(self, case: Case) -> Column:
        """Return where the case's engine reads the field and does not execute its value."""
        allowed = self.runs.get(case.engine)
        if allowed is None:
            return False
        value = getattr(case, self.field)
        if isinstance(value, tuple):  # a list of names, each of which must be supported
            other: Column = not set(value) <= set(allowed)
        elif isinstance(value, np.ndarray):
            other = ~np.isin(value, allowed)
        else:
            other = value not in allowed
        return other if self.applies is None or other is False else other & self.applies(case)

    def what_runs(self, case: Case) -> Any:
        """Return the value that runs in place of one that the case's engine ignores."""
        value = self.instead[case.engine]
        return value(case) if callable(value) else value


FSDP2_ENGINES = ("meshwright", "torchtitan", "automodel", "kempnerforge", "fsdp1")
PROGRAM_RECOMPUTES = ("fsdp1", "deepspeed")  # whose files leave it to the training program
OPERATIONS_ONLY = ("torchtitan", "automodel")  # whose files have no list of modules beside selective recompute
NOT_MESHWRIGHT = tuple(engine for engine in ENGINES if engine != "meshwright")
CONVERTS_FROZEN = ("meshwright", "megatron", "deepspeed")
REDUCES_IN_FP32 = ("torchtitan", "kempnerforge")
NO_MTP = ("torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed")
NOT_MEGATRON = tuple(engine for engine in ENGINES if engine != "megatron")
ONE_CHUNK = ("1f1b", "gpipe")
SEVERAL_CHUNKS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
V_SHAPED = ("zbv", "dualpipe_v")
SCHEDULES = (*ONE_CHUNK, *SEVERAL_CHUNKS, *V_SHAPED)
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts")
DEEPEP_GPUS = ("B200", "B300")  # of Blackwell; DeepEP does not support GB200 and GB300

FP8_PARTS: Mapping[str, tuple[str, ...]] = {
    "meshwright": ("linear layers",),
    "megatron": ("linear layers", "experts"),
    "torchtitan": ("linear layers", "experts"),  # grouped_mm converters
    "automodel": ("linear layers",),
    "kempnerforge": ("linear layers",),
    "fsdp1": ("linear layers",),
    "deepspeed": ("linear layers",),
}
"""What computes in 8 bits or fewer with precision.matmul, by engine; attention, routers and heads never do."""


def fp8_experts(case: Case) -> bool:
    """Return whether the engine computes routed experts in the format of precision.matmul."""
    return bool(getattr(case, "quantized_experts", "experts" in FP8_PARTS[case.engine]))


def deepep_runs_on(case: Case) -> bool:
    """Return whether DeepEP's kernels exist for the GPU."""
    return case.gpu_arch in ("ampere", "hopper") or case.gpu in DEEPEP_GPUS


def _always_overlaps(case: Case) -> Column:
    return case.strategy != "megatron_fsdp"


def _gathers_in_bf16(case: Case) -> Column:
    """Return where our engine gathers weights in the compute format although fp8_gather is set."""
    on_gpu = (case.offload != "params") & (case.offload != "optimizer")
    return np.logical_not((case.matmul == "fp8_tensor") & (case.strategy == "fsdp2") & on_gpu)


def _accumulation_format(case: Case) -> str:
    """Return the format in which FSDP2 sums gradients: that of the reduction."""
    return "fp32" if case.compute == "fp32" else str(case.reduce)


def _grads_differ(case: Case) -> Column:
    """Return where FSDP2 sums gradients in another format; fp32 is harmless where nothing is summed before reducing."""
    if case.grads == _accumulation_format(case):
        return False
    sums = (case.defer_grad_sync | (case.pp > 1)) & (case.accumulation > 1)
    return (case.strategy != "megatron_fsdp") & (sums | (case.grads != "fp32"))


def _shards_norms(case: Case) -> Column:
    """Return where KempnerForge's tensor parallelism shards norms and residuals too."""
    return (case.tp > 1) & (case.pp == 1) & (not case.is_moe and not case.model.tied)


def _flex_attention(case: Case) -> Column:
    return (case.cp == 1) & (case.packing | case.has_sliding)


def _axis(field: str, name: str, *engines: str) -> Capability:
    """Return the row of a mesh axis that some engines do not have."""
    return Capability(
        field=field,
        name=name,
        runs=dict.fromkeys(engines, (1,)),
        rule=f"engine.no-{field}".replace("_", "-"),
        symptom="unknown option; or the degree is used in the arithmetic but nothing is parallelized",
        cause=f"{name} is not implemented in this engine, or its config has no key for it",
    )


CAPABILITIES: tuple[Capability, ...] = (
    _axis("tp", "tensor parallelism", "fsdp1"),
    _axis("pp", "pipeline parallelism", "fsdp1", "deepspeed"),
    _axis("cp", "context parallelism", "kempnerforge", "fsdp1", "deepspeed"),
    _axis("ep", "expert parallelism", "fsdp1"),
    _axis("etp", "tensor parallelism inside experts", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"),
    _axis("vp", "interleaved stages", "kempnerforge", "deepspeed"),
    _axis("dp_replicate", "replicas of sharding groups", "deepspeed"),
    Capability(
        field="sp",
        name="sequence parallelism",
        runs={"deepspeed": (False,)},
        instead={"deepspeed": False},
        why={"deepspeed": "its tensor parallelism keeps full norm and residual activations on every rank"},
    ),
    Capability(
        field="sp",
        name="sequence parallelism",
        runs={"kempnerforge": ()},
        instead={"kempnerforge": _shards_norms},
        applies=lambda c: (c.tp > 1) & (c.sp != _shards_norms(c)),
        where="with tp > 1",
        ignored_rule="engine.sp-follows-tp",
        why={"kempnerforge": "it comes with tensor parallelism of dense, untied models without a pipeline"},
    ),
    Capability(
        field="recompute",
        name="selective recompute",
        runs=dict.fromkeys(PROGRAM_RECOMPUTES, ("none", "full")),
        rule="recompute.supported",
        symptom="the training program recomputes whole layers or nothing",
        cause="gradient_checkpointing of the Trainer, and FSDP's activation checkpointing, are on or off",
    ),
    Capability(
        field="strategy",
        name="sharding of data-parallel state",
        runs={
            "meshwright": ("fsdp2", "ddp", "megatron_fsdp"),
            "megatron": ("zero1", "ddp", "megatron_fsdp", "fsdp2"),
            "torchtitan": ("fsdp2", "ddp"),
            "automodel": ("fsdp2", "megatron_fsdp", "ddp"),
            "kempnerforge": ("fsdp2",),
            "fsdp1": ("fsdp2", "ddp"),
            "deepspeed": ("zero1", "fsdp2", "ddp"),  # fsdp2 means ZeRO-3
        },
        rule="strategy.supported",
        symptom="unknown strategy or option",
        cause="engines shard data-parallel state in different ways",
    ),
    Capability(
        field="pp_schedule",
        name="pipeline schedules",
        runs={
            "meshwright": SCHEDULES,
            "torchtitan": SCHEDULES,
            "automodel": tuple(name for name in SCHEDULES if name != "dualpipe_v"),  # its stages are not placed in a V
            "kempnerforge": ("1f1b", "gpipe"),  # its program builds one stage per rank, which interleaved_1f1b refuses
            "megatron": ("1f1b", "interleaved_1f1b"),
            "deepspeed": ("1f1b",),
        },
        applies=lambda c: c.pp > 1,
        where="with pp > 1",
        rule="schedule.supported",
        symptom="unknown schedule name when the stages are built; or the setting is ignored",
        cause="engines ship different schedules, and their guides name some that do not exist",
    ),
    Capability(
        field="stage_layers",
        name="listed stages",
        runs={"kempnerforge": ()},
        instead={"kempnerforge": ()},
        applies=lambda c: c.pp > 1,
        where="with pp > 1",
        why={"kempnerforge": "it splits layers evenly, and its first stages get those left over"},
    ),
    Capability(
        field="pp_micro_batches",
        name="several passes through the pipeline per step",
        runs=dict.fromkeys(ONE_PASS, (0,)),
        instead=dict.fromkeys(ONE_PASS, 0),
        applies=lambda c: c.pipeline_passes > 1,
        where="with pp > 1",
        why=dict.fromkeys(ONE_PASS, "one pass runs all micro batches of a step"),
    ),
    Capability(
        field="cp_comm",
        name="exchange of keys and values between context-parallel ranks",
        runs={"torchtitan": ("allgather", "ring"), "automodel": ("allgather", "ring")},
        applies=lambda c: c.cp > 1,
        where="with cp > 1",
        rule="sequence.exchange-supported",
        symptom="the setting is ignored; keys and values are gathered or sent around a ring",
        cause="its context parallelism exchanges keys and values only",
    ),
    Capability(
        field="offload",
        name="offload to host memory",
        runs={
            "meshwright": ("none", "optimizer", "activations", "params"),
            "megatron": ("none", "optimizer", "activations"),
            "torchtitan": ("none", "params"),
            "automodel": ("none", "params"),
            "kempnerforge": ("none",),
            "fsdp1": ("none", "params"),
            "deepspeed": ("none", "optimizer", "params"),
        },
        rule="offload.supported",
        symptom="unknown option",
        cause="engines differ in what they can offload to the host",
    ),
    Capability(
        field="defer_grad_sync",
        name="gradient reduction in every micro batch",
        runs={"meshwright": (True,)},
        instead={"meshwright": True},
        applies=lambda c: (c.pp > 1) | (c.strategy == "megatron_fsdp"),
        where="with pp > 1 or megatron_fsdp",
        why={"meshwright": "a pipeline stage reduces after its last micro batch; Megatron-FSDP decides by itself"},
    ),
    Capability(
        field="defer_grad_sync",
        name="gradient reduction in every micro batch",
        runs={"kempnerforge": (True,)},
        instead={"kempnerforge": True},
        ignored_rule="engine.always-defers",
        why={"kempnerforge": "its training loop reduces after the last micro batch of a step"},
    ),
    Capability(
        field="recompute_modules",
        name="modules of selective recompute",
        runs={
            **dict.fromkeys(("megatron", "deepspeed"), MODULES),
            **dict.fromkeys(OPERATIONS_ONLY, ("ops",)),
            "kempnerforge": (),
        },
        instead=dict.fromkeys((*OPERATIONS_ONLY, "kempnerforge"), ()),
        applies=lambda c: c.recompute == "selective",
        where="with recompute=selective",
        rule="recompute.ops-supported",
        symptom="unknown module name in the list",
        cause="selection by operation is a feature of torch's selective checkpointing",
        why={
            **dict.fromkeys(OPERATIONS_ONLY, "its selective recompute chooses operations, not modules"),
            "kempnerforge": "its selective recompute is that of attention",
        },
    ),
    Capability(
        field="recompute_layers",
        name="full recompute of some layers",
        runs=dict.fromkeys(("automodel", "kempnerforge", "fsdp1", "deepspeed"), (0,)),
        instead=dict.fromkeys(("automodel", "kempnerforge", "fsdp1", "deepspeed"), 0),
        exported={"torchtitan": (0,)},  # whose 0.2 line recomputes each nth layer
        applies=lambda c: c.recompute == "full",
        where="with recompute=full",
        why=dict.fromkeys(("automodel", "kempnerforge", "fsdp1", "deepspeed"), "it recomputes every layer, or none"),
    ),
    Capability(
        field="attention",
        name="attention kernels",
        runs={
            "meshwright": ("auto", "flash", "cudnn", "sdpa", "flex", "eager"),
            "megatron": ("auto", "flash", "te", "cudnn", "eager"),
            "torchtitan": ("auto", "flash", "sdpa", "flex", "cudnn"),
            "kempnerforge": ("auto", "flash", "sdpa", "cudnn", "eager"),
            "automodel": ("auto", "flash", "te", "cudnn", "sdpa", "flex", "eager"),
            "deepspeed": ("auto", "flash", "sdpa", "eager"),
            "fsdp1": ("auto", "flash", "sdpa", "flex", "eager"),
        },
        rule="kernels.attention-supported",
        symptom="unknown attention backend",
        cause="engines ship different kernels",
    ),
    Capability(
        field="attention",
        name="attention kernels of context parallelism",
        runs={
            "meshwright": ("auto", "flash", "cudnn", "sdpa", "flex"),
            "megatron": ("auto", "flash", "te", "cudnn"),
            "torchtitan": ("auto", "flex"),
            "automodel": ("auto", "flash", "te", "cudnn", "sdpa"),
        },
        applies=lambda c: c.cp > 1,
        where="with cp > 1",
        rule="sequence.attention-kernel",
        symptom="context parallelism is only supported with other attention backends (assertion in the first forward)",
        cause="the kernel must return the softmax statistics that merge partial results",
    ),
    Capability(
        field="attention",
        name="attention kernels for windows and packed documents",
        runs={"meshwright": ("auto", "flex", "eager", "te")},  # te is refused everywhere
        instead={"meshwright": "flex"},
        applies=_flex_attention,
        where="with packing or sliding windows, at cp=1",
        ignored_rule="engine.ignores-attention-kernel",
        why={"meshwright": "layers with windows or packed documents run FlexAttention, which has such masks"},
    ),
    Capability(
        field="scan",
        name="kernels of Mamba-2 and gated-delta layers",
        runs=dict.fromkeys(NOT_MESHWRIGHT, ("auto",)),
        instead=dict.fromkeys(NOT_MESHWRIGHT, "auto"),
        why=dict.fromkeys(NOT_MESHWRIGHT, "it has one kernel for each such layer, and no option to choose another"),
    ),
    Capability(
        field="compile",
        name="compiled blocks",
        runs={"megatron": (False,)},
        instead={"megatron": False},
        why={"megatron": "it has fused kernels of its own and no option to compile a block"},
    ),
    Capability(
        field="cuda_graphs",
        name="CUDA graphs",
        runs={
            "torchtitan": ("none", "full_iteration"),
            **dict.fromkeys(("meshwright", "automodel", "kempnerforge", "fsdp1", "deepspeed"), ("none",)),
        },
        instead={"meshwright": "none"},
        rule="graphs.supported",
        symptom="unknown option",
        cause="this engine cannot capture its training step",
        why={"meshwright": "its step is launched kernel by kernel; compile=true fuses most of them"},
        resets={"cuda_graph_scope": ()},
    ),
    Capability(
        field="te_rng_tracker",
        name="RNG states for CUDA graphs",
        runs=dict.fromkeys(NOT_MEGATRON, (False,)),
        instead=dict.fromkeys(NOT_MEGATRON, False),
        why=dict.fromkeys(NOT_MEGATRON, "the tracker is part of Transformer Engine's module graphs"),
        harmless=True,
    ),
    Capability(
        field="tp_comm_overlap",
        name="overlap of tensor-parallel collectives",
        runs=dict.fromkeys(("meshwright", "kempnerforge", "fsdp1", "deepspeed"), (False,)),
        instead=dict.fromkeys(("meshwright", "kempnerforge", "fsdp1", "deepspeed"), False),
        why={
            "meshwright": "its collectives run between the matmuls, on the same stream",
            **dict.fromkeys(("kempnerforge", "fsdp1", "deepspeed"), "it has no such option"),
        },
    ),
    Capability(
        field="overlap_grad_reduce",
        name="gradient reduction after the backward pass",
        runs=dict.fromkeys(FSDP2_ENGINES, (True,)),
        instead=dict.fromkeys(FSDP2_ENGINES, True),
        applies=_always_overlaps,
        where="except megatron_fsdp",
        why=dict.fromkeys(FSDP2_ENGINES, "FSDP always reduces gradients while the backward pass runs"),
    ),
    Capability(
        field="overlap_param_gather",
        name="parameter gathers without overlap",
        runs=dict.fromkeys(FSDP2_ENGINES, (True,)),
        instead=dict.fromkeys(FSDP2_ENGINES, True),
        applies=_always_overlaps,
        where="except megatron_fsdp",
        why=dict.fromkeys(FSDP2_ENGINES, "FSDP always gathers the next layer while one runs"),
    ),
    Capability(
        field="loss",
        name="implementations of the cross-entropy",
        runs={
            **dict.fromkeys(("kempnerforge", "torchtitan"), ("vocab_parallel", "plain", "chunked")),
            "megatron": ("vocab_parallel", "fused_linear"),
            **dict.fromkeys(("fsdp1", "deepspeed"), ("vocab_parallel", "plain", "fused_linear")),
        },
        instead=dict.fromkeys(("megatron", "fsdp1", "deepspeed", "torchtitan"), "vocab_parallel"),
        exported={"torchtitan": ("vocab_parallel", "plain"), "megatron": ("vocab_parallel",)},
        rule="kernels.loss-supported",
        symptom="unknown loss function name",
        cause="it has plain and chunked cross-entropy",
        why={
            "megatron": "it computes a vocabulary-parallel loss; its dev branch has one fused with the output layer",
            "torchtitan": "its 0.2 line, which exports are written for, computes the loss of all logits at once",
            **dict.fromkeys(
                ("fsdp1", "deepspeed"),
                "the Trainer computes the loss of all logits, or one fused with the output layer (use_liger_kernel)",
            ),
        },
    ),
    Capability(
        field="dispatcher",
        name="token dispatchers",
        runs={
            "torchtitan": ("alltoall", "deepep"),
            "automodel": ("allgather", "deepep", "hybridep"),
            **dict.fromkeys(("meshwright", "kempnerforge", "fsdp1", "deepspeed"), ("alltoall",)),
        },
        instead={
            "automodel": lambda c: "deepep" if deepep_runs_on(c) else "allgather",  # its own default
            **dict.fromkeys(("meshwright", "torchtitan", "kempnerforge", "fsdp1", "deepspeed"), "alltoall"),
        },
        applies=lambda c: c.is_moe & ((c.ep > 1) | (c.dispatcher != "alltoall")),
        where="of MoE models",
        why={
            "meshwright": "it sends tokens with NCCL all-to-alls",
            "torchtitan": "its 0.2 line has all-to-all and DeepEP",
            "automodel": "it has an all-gather, DeepEP and HybridEP",
            **dict.fromkeys(("kempnerforge", "fsdp1", "deepspeed"), "it has all-to-alls only"),
        },
    ),
    Capability(
        field="grouped_gemm",
        name="experts one by one",
        runs={"meshwright": (True,)},
        instead={"meshwright": True},
        applies=lambda c: c.is_moe,
        where="of MoE models",
        why={"meshwright": "bf16 experts always run in one grouped GEMM, those of other formats one by one"},
    ),
    Capability(
        field="shared_expert_overlap",
        name="shared experts during the token dispatch",
        runs=dict.fromkeys(NOT_MEGATRON, (False,)),
        instead=dict.fromkeys(NOT_MEGATRON, False),
        applies=lambda c: c.is_moe,
        where="of MoE models",
        why=dict.fromkeys(NOT_MEGATRON, "its shared experts run after the routed ones, on the same stream"),
    ),
    Capability(
        field="ep_overlap",
        name="overlap of expert all-to-alls",
        runs=dict.fromkeys(NOT_MEGATRON, (False,)),
        instead=dict.fromkeys(NOT_MEGATRON, False),
        applies=lambda c: c.is_moe,
        where="of MoE models",
        why=dict.fromkeys(NOT_MEGATRON, "one micro batch runs at a time, so nothing hides its all-to-alls"),
    ),
    Capability(
        field="capacity_factor",
        name="token dropping",
        runs={"meshwright": (0.0,)},
        applies=lambda c: c.is_moe,
        where="of MoE models",
        rule="moe.no-capacity",
        symptom="the setting would have no effect: every token reaches its experts",
        cause="grouped GEMM takes any number of tokens per expert, so there is no capacity to fill",
    ),
    Capability(
        field="matmul",
        name="formats of linear layers",
        runs={
            "meshwright": ("same", "fp8_tensor", "fp8_row", "mxfp8"),
            "megatron": ("same", "fp8_delayed", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"),
            "torchtitan": ("same", "fp8_tensor", "fp8_row", "mxfp8"),  # its 0.2 line, which exports are written for
            "automodel": ("same", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8"),
            "kempnerforge": ("same", "fp8_tensor"),
            "fsdp1": ("same", "fp8_delayed", "fp8_tensor", "mxfp8"),  # Accelerate's Transformer Engine and torchao
            "deepspeed": ("same",),  # neither its config nor the Trainer beside it has a key for fp8
        },
        symptom="unknown recipe name or option",
        cause="its low-precision layers implement other scalings",
    ),
    Capability(
        field="fp8_gather",
        name="parameter gathers in fp8",
        runs={"meshwright": (False,)},
        instead={"meshwright": False},
        applies=_gathers_in_bf16,
        where="except with fp8_tensor, fsdp2 and weights on the GPU",
        ignored_rule="precision.gather-ineffective",
        why={"meshwright": "only FSDP2 shards with one scale per tensor (fp8_tensor) are cast before the gather"},
    ),
    Capability(
        field="grads",
        name="format of gradient accumulation",
        runs={"meshwright": ()},
        instead={"meshwright": _accumulation_format},
        applies=_grads_differ,
        where="with fsdp2 or ddp",
        why={"meshwright": "FSDP2 sums unreduced gradients in the format of the reduction"},
    ),
    Capability(
        field="reduce",
        name="reduction in bf16",
        runs={"meshwright": ("fp32",)},
        instead={"meshwright": "fp32"},
        applies=lambda c: c.compute == "fp32",
        where="with compute=fp32",
        why={"meshwright": "a run in fp32 reduces in fp32"},
    ),
    Capability(
        field="reduce",
        name="reduction in bf16",
        runs=dict.fromkeys(REDUCES_IN_FP32, ("fp32",)),
        instead=dict.fromkeys(REDUCES_IN_FP32, "fp32"),
        ignored_rule="engine.reduces-in-fp32",
        why=dict.fromkeys(REDUCES_IN_FP32, "it reduces gradients in float32"),
    ),
    Capability(
        field="mtp_loss",
        name="training of multi-token prediction",
        runs=dict.fromkeys(NO_MTP, (0.0,)),
        instead=dict.fromkeys(NO_MTP, 0.0),
        ignored_rule="engine.no-mtp",
        applies=lambda c: c.model.mtp_layers > 0,
        where="in models with MTP layers",
        why=dict.fromkeys(NO_MTP, "it builds the model without these layers"),
    ),
    Capability(
        field="moments",
        name="moments in bf16",
        runs={"meshwright": ("fp32",)},
        instead={"meshwright": "fp32"},
        applies=lambda c: (c.optimizer_name == "adamw8bit") | (c.optimizer_name == "schedule_free_adamw"),
        where="with adamw8bit or schedule_free_adamw",
        why={"meshwright": "this optimizer has a format of its own: 8 bits with scales (adamw8bit), or fp32"},
    ),
    Capability(
        field="master",
        name="weights that the optimizer updates, in bf16",
        runs={"megatron": ("fp32",)},
        applies=lambda c: c.offload != "optimizer",
        where="unless the optimizer is offloaded",
        rule="precision.master-supported",
        symptom="RuntimeError: FusedAdam only supports fp32/fp16 master weights",
        cause="its precision-aware optimizer is Transformer Engine's FusedAdam, which keeps them in fp32 or fp16",
    ),
    Capability(
        field="optimizer_name",
        name="optimizers",
        runs={
            "megatron": ("adamw", "sgd", "muon", "lion"),
            "torchtitan": ("adamw",),
            "automodel": ("adamw", "adamw8bit", "muon", "sgd"),
            "kempnerforge": ("adamw", "muon", "lion", "schedule_free_adamw"),
            "fsdp1": ("adamw", "adamw8bit", "lion", "schedule_free_adamw", "sgd"),  # those of the Trainer
            "deepspeed": ("adamw", "muon", "lion", "schedule_free_adamw", "sgd"),  # its own, and the Trainer's
        },
        rule="optimizer.supported",
        symptom="unknown optimizer name",
        cause="engines ship different optimizers",
    ),
    Capability(
        field="schedule_name",
        name="learning-rate schedules",
        runs={
            "megatron": ("cosine", "linear", "wsd", "constant", "inverse_sqrt"),
            "torchtitan": ("cosine", "linear", "wsd", "constant"),
            "automodel": ("cosine", "linear", "wsd", "constant", "inverse_sqrt"),
            "kempnerforge": ("cosine", "linear", "wsd", "constant", "rex"),
        },
        rule="learning_rate.supported",
        symptom="unknown decay style",
        cause="engines ship different schedules",
    ),
    Capability(
        field="method",
        name="adapters",
        runs={
            "meshwright": ("lora", "dora", "rslora", "qlora"),
            "megatron": ("lora", "dora"),
            "automodel": ("lora", "dora", "qlora", "lora8bit"),
        },
        applies=lambda c: c.goal == "peft",
        where="with goal peft",
        rule="peft.method-supported",
        symptom="unknown adapter scheme",
        cause="engines ship different adapters, and of frozen weights in 8 bits (LLM.int8) only transformers has the "
        "kernels; qlora stores them in 4 bits",
    ),
    Capability(
        field="frozen",
        name="frozen weights in fp32",
        runs=dict.fromkeys(CONVERTS_FROZEN, ("same",)),
        instead=dict.fromkeys(CONVERTS_FROZEN, "same"),
        applies=lambda c: c.goal == "peft",
        where="with goal peft",
        why=dict.fromkeys(CONVERTS_FROZEN, "it converts frozen weights to the format of compute when it loads them"),
        harmless=True,
    ),
    Capability(
        field="pad_to_max_length",
        name="packed samples of static length",
        runs={"meshwright": (False,)},
        instead={"meshwright": False},
        why={"meshwright": "every packed sample has seq_length tokens already"},
        harmless=True,
    ),
)


class StrategyLimit(msgspec.Struct, frozen=True):
    """A field that a strategy does not support above 1, or switched on, and on which engines."""

    strategy: Strategy
    field: str
    engines: tuple[str, ...]
    cause: str


TORCH_DDP = ("meshwright", "automodel", "torchtitan")
MFSDP = ("meshwright", "automodel")  # Megatron itself supports it with experts and sequence parallelism
REPLICATED = "every rank holds and updates the full model; ddp has no other mesh axis"
FULL_MODELS = "it shards full models over the data-parallel ranks"
WRAPS_FULL_MODELS = "torch FSDP2 inside Megatron wraps full models"
STRATEGY_LIMITS = (
    *(StrategyLimit("ddp", field, TORCH_DDP, REPLICATED) for field in ("tp", "pp", "cp", "ep", "dp_replicate")),
    StrategyLimit("megatron_fsdp", "pp", (*MFSDP, "megatron"), FULL_MODELS),
    StrategyLimit("megatron_fsdp", "ep", MFSDP, FULL_MODELS),
    StrategyLimit("megatron_fsdp", "sp", MFSDP, FULL_MODELS),
    StrategyLimit("megatron_fsdp", "dp_replicate", ("automodel",), FULL_MODELS),
    StrategyLimit("fsdp2", "pp", ("megatron",), WRAPS_FULL_MODELS),
    StrategyLimit("fsdp2", "ep", ("megatron",), WRAPS_FULL_MODELS),
)
"""What the strategies of an engine do not combine with."""


class ModelLimit(msgspec.Struct, frozen=True):
    """A degree that an engine does not support above 1 for some models."""

    engine: str
    field: str
    model_types: tuple[str, ...]  # of Hugging Face configs
    cause: str


MODEL_LIMITS = (
    ModelLimit(
        "torchtitan",
        "pp",
        ("qwen3", "qwen3_moe", "gpt_oss"),
        "each model of its 0.2 line, which exports are written for, has a pipelining function of its own, or none",
    ),
    ModelLimit("torchtitan", "cp", ("gpt_oss",), "attention with sinks has no context-parallel kernel in its 0.2 line"),
)
"""Degrees that engines do not support for some models: the search and the exports read the same rows."""
FRAMEWORK_GOALS: Mapping[str, tuple[str, ...]] = {
    "torchtitan": ("pretrain",),
    "kempnerforge": ("pretrain",),
    "megatron-lm": ("pretrain", "sft"),
}
"""Goals that a framework's configs can express; others express all."""


def limited_fields(strategy: str, engine: str) -> tuple[str, ...]:
    """Return the fields that a strategy of an engine does not support."""
    return tuple(row.field for row in STRATEGY_LIMITS if row.strategy == strategy and engine in row.engines)


@lru_cache(maxsize=16)
def _ignoring_rows(engine: str) -> tuple[Capability, ...]:
    return tuple(row for row in CAPABILITIES if engine in row.instead)


def rows_of(field: str) -> tuple[Capability, ...]:
    """Return the rows of a field, by flat name."""
    return tuple(row for row in CAPABILITIES if row.field == field)


ADAPTER_GOAL = "peft"  # the goal in which the fields of the peft section mean anything


def trains_goal(engine: str, goal: str) -> bool:
    """Return whether a config of an engine's framework can state a goal."""
    return goal in FRAMEWORK_GOALS.get(engine, (goal,))


def executed_values(field: str, engine: str) -> tuple[Any, ...] | None:
    """Return the values of a field that an engine executes in some layout; None if it executes every value."""
    return next((row.runs.get(engine) for row in rows_of(field)), None)


def can_export(field: str, engine: str, value: Any) -> bool:
    """Return whether exports for an engine can say a value of a field."""
    return all(value in row.exported.get(engine, (value,)) for row in rows_of(field))


def can_express(field: str, engine: str, value: Any) -> bool:
    """Return whether an engine executes a value of a field, in a layout that reads it, and exports can say it."""
    values = executed_values(field, engine)
    known = values is None or (set(value) <= set(values) if isinstance(value, tuple) else value in values)
    return known and can_export(field, engine, value)


def engines_with(field: str, value: Any) -> tuple[str, ...]:
    """Return the engines that execute a value of a field in some layout."""
    engines = [one for one in ENGINES if not _is_of_adapters(field) or trains_goal(one, ADAPTER_GOAL)]
    allowed = {engine: executed_values(field, engine) for engine in engines}
    return tuple(engine for engine, values in allowed.items() if values is None or value in values)


def _is_of_adapters(field: str) -> bool:
    return keys_by_flat_name().get(field, "").startswith(f"{ADAPTER_GOAL}.")


def substitutes(case: Case) -> dict[str, Column]:
    """Return what runs in place of the values that the engine ignores, by flat name.

    A measured run states what ran (`as_run`): its engine had more than our files of it can say.
    """
    found: dict[str, Column] = {}
    as_run: tuple[str, ...] = getattr(case, "as_run", ())
    for row in _ignoring_rows(case.engine):
        ignored = row.field not in as_run and row.unsupported(case)
        if ignored is False or not np.any(ignored):
            continue
        for name, value in {row.field: row.what_runs(case), **row.resets}.items():
            whole = np.all(ignored) or isinstance(value, tuple)  # a list is of all layouts: the others do not read it
            found[name] = value if whole else np.where(ignored, value, getattr(case, name))
    if case.engine == "meshwright" and np.any(case.offload == "optimizer"):
        # FSDP2 keeps weights, gradients and optimizer state in one place.
        on_host = case.offload == "optimizer"
        found["offload"] = "params" if np.all(on_host) else np.where(on_host, "params", case.offload)
    return found


def executed(case: Case) -> Case:
    """Return the case with the values that its engine runs; the same case if it ignores none."""
    return case.cached(_executed)


def _executed(case: Case) -> Case:
    changed = substitutes(case)
    if not changed:
        return case
    other = case.replace(**changed)
    other._memo[_executed] = other  # what runs is what runs
    return other


def adapted(recipe: Recipe, case: Case, keep: frozenset[str] = frozenset()) -> dict[str, tuple[Any, str]]:
    """Return the layout and benchmark fields that the engine ignores: by key, what runs instead and why.

    Contract fields stay: a rule reports them. `keep` are keys that the user set.
    """
    fields, keys = recipe_fields(), keys_by_flat_name()
    found: dict[str, tuple[Any, str]] = {}
    for row in _ignoring_rows(case.engine):
        if not bool(row.unsupported(case)) and can_export(row.field, case.engine, getattr(case, row.field)):
            continue
        why = f"{case.engine} ignores it: {row.why[case.engine]}"
        for name, value in {row.field: row.what_runs(case), **row.resets}.items():
            key = keys[name]
            if fields[key].kind != "contract" and key not in keep and getattr(case, name) != value:
                found[key] = (value, why)
    return found


def describe(field: str) -> dict[str, str]:
    """Return what each engine does with a field, by engine; empty if every engine executes every value."""
    rows = rows_of(field)
    found: dict[str, str] = {
        engine: "; ".join(_describe(row, engine) for row in rows if engine in row.runs) or "all" for engine in ENGINES
    }
    if _is_of_adapters(field):
        found |= {one: "none (no adapters)" for one in ENGINES if not trains_goal(one, ADAPTER_GOAL)}
    return found if rows else {}


class Executed(msgspec.Struct, frozen=True):
    """What an engine does with one field that it does not execute with every value."""

    field: str
    name: str
    executes: str  # values, where, and what happens with others
    why: str


def executed_by(engine: str) -> tuple[Executed, ...]:
    """Return the fields that an engine does not execute with every value, with the values it does."""
    keys = keys_by_flat_name()
    fields = tuple(
        Executed(keys[row.field], row.name, _describe(row, engine), row.why.get(engine) or row.cause)
        for row in CAPABILITIES
        if engine in row.runs and _describe(row, engine) != "all"
    )
    strategies = tuple(
        Executed(
            keys[row.field],
            f"{row.field} with {row.strategy}",
            f"{'false' if row.field == 'sp' else 1} with strategy={row.strategy} (others refused)",
            row.cause,
        )
        for row in STRATEGY_LIMITS
        if engine in row.engines
    )
    return (*fields, *strategies)


def _describe(row: Capability, engine: str) -> str:
    """Return the executed values and what happens with others, e.g. "none (others ignored)"."""
    values = row.runs[engine]
    choices = get_args(bare_type(recipe_fields()[keys_by_flat_name()[row.field]].type)[0])
    if choices and set(choices) <= set(values):
        return "all"
    names = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    if engine not in row.instead:
        other = "refused"
    else:
        runs = row.instead[engine]
        other = "ignored" if callable(runs) or runs in ((), *values) else f"run as {runs}"
    return f"{names or 'its own'}{f' {row.where}' if row.where else ''} (others {other})"
