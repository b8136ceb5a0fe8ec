"""Number formats: what the GPU, the engine and the training can bear."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, divisors_of, not_, one_of

FP8 = ("fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block")
NO_FP8: Fix = {"matmul": ["same"], "fp8_gather": [False], "first_last_bf16": [False]}
TORCHAO = ("meshwright", "torchtitan", "automodel", "kempnerforge")
FORMATS: dict[str, tuple[str, ...]] = {
    "meshwright": ("same", "fp8_tensor", "fp8_row", "mxfp8"),
    "torchtitan": ("same", "fp8_tensor", "fp8_row", "mxfp8", "nvfp4"),
    "automodel": ("same", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8"),
    "kempnerforge": ("same", "fp8_tensor"),
}


@rule(
    "precision.fp8-gpu",
    "error",
    "matmul",
    message="{gpu} has no 8-bit floating point ({matmul})",
    symptom="device compute capability 8.9 or higher is required for FP8 execution",
    cause="8-bit matrix units came with Ada and Hopper",
    fixes=(NO_FP8,),
)
def gpu_has_fp8(c: Case) -> Column:
    return one_of(c.matmul, FP8) & ("fp8" not in c.gpu_precisions)


@rule(
    "precision.block-scaled-gpu",
    "error",
    "matmul",
    message="{matmul} needs a Blackwell or newer GPU, not {gpu}",
    symptom="MXFP8 and NVFP4 need compute capability 10.0 or higher",
    cause="scales per small block are a feature of the newer matrix units",
    fixes=({"matmul": ["fp8_tensor"]}, NO_FP8),
)
def gpu_has_block_scales(c: Case) -> Column:
    return one_of(c.matmul, ("mxfp8", "nvfp4")) & (c.gpu_arch not in ("blackwell", "rubin"))


@rule(
    "precision.blockwise-on-blackwell",
    "advice",
    "matmul",
    message="{gpu} has mxfp8 in hardware; fp8_block is made for Hopper",
    symptom="slower than mxfp8 at no gain in accuracy",
    cause="software block scales stand in for what newer GPUs do themselves",
    fixes=({"matmul": ["mxfp8"]}, {"matmul": ["fp8_tensor"]}),
)
def hardware_scales_are_used(c: Case) -> Column:
    return (c.matmul == "fp8_block") & (c.gpu_arch in ("blackwell", "rubin"))


@rule(
    "precision.format-supported",
    "error",
    "matmul",
    engines=tuple(FORMATS),
    message="{engine} has no {matmul} linear layers",
    symptom="an unknown recipe name, or the option does not exist",
    cause="its low-precision layers know other scalings",
    fixes=({"matmul": ["fp8_tensor"]}, NO_FP8),
)
def format_is_offered(c: Case) -> Column:
    return _lacks_format(c) & not_(_publishes(c))


def _lacks_format(c: Case) -> Column:
    return not_(one_of(c.matmul, FORMATS.get(c.engine, (c.matmul,))))


def _publishes(c: Case) -> Column:
    """Whether this is a benchmark recipe on the default engine: the record of what some other engine reached."""
    return c.benchmark & (c.engine == "meshwright")


@rule(
    "precision.format-published",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="this benchmark was published with {matmul}, which meshwright has not: it can be estimated, not trained",
    symptom="training is refused before it starts",
    cause="the published figure is of another engine, whose low-precision layers know this scaling",
    fixes=({"matmul": ["mxfp8", "fp8_row", "fp8_tensor"]}, NO_FP8),
)
def published_format_is_offered(c: Case) -> Column:
    return _lacks_format(c) & _publishes(c)


@rule(
    "precision.mxfp8-untried",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="mxfp8 was tested as an emulation on CPUs, never on {gpu}",
    symptom="unknown: the first run on such a GPU is the test",
    cause="no GPU with this format was at hand when it was built",
    fixes=({"matmul": ["fp8_row", "fp8_tensor"]}, NO_FP8),
)
def format_was_run(c: Case) -> Column:
    return (c.matmul == "mxfp8") & not_(c.benchmark)


@rule(
    "precision.fp8-tokens",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="a micro batch of {tokens} tokens is not in steps of {step}: nothing computes in {matmul}",
    symptom="the speed of bf16",
    cause="8-bit matrix kernels work on aligned blocks, in the number of tokens too",
    fixes=({"micro_batch_size": [2, 4, 8, 16, 32]}, NO_FP8),
    values={"tokens": lambda c: _tokens(c), "step": lambda c: 32 if c.matmul == "mxfp8" else 16},
)
def micro_batches_are_aligned(c: Case) -> Column:
    return c.fp8 & (_tokens(c) % np.where(c.matmul == "mxfp8", 32, 16) != 0)


def _tokens(c: Case) -> Column:
    """The tokens that a linear layer sees at once."""
    return c.micro_batch_size * (c.seq_length // c.cp)


@rule(
    "precision.delayed-first-last",
    "error",
    "first_last_bf16",
    engines=("megatron",),
    message="delayed scaling cannot leave the first and last layers in bf16",
    symptom="delayed scaling does not support first/last layers in BF16",
    cause="its history of maxima is kept for all layers together",
    fixes=({"first_last_bf16": [False]}, {"matmul": ["fp8_tensor"]}),
)
def delayed_scaling_covers_all(c: Case) -> Column:
    return (c.matmul == "fp8_delayed") & c.first_last_bf16


@rule(
    "precision.delayed-recompute",
    "error",
    "recompute_modules",
    engines=("megatron",),
    message="delayed scaling cannot recompute moe_act or layernorm outputs ({recompute_modules})",
    symptom="delayed scaling does not support recomputing these modules",
    cause="recomputing would record the maxima of the same values twice",
    fixes=({"matmul": ["fp8_tensor"]}, {"recompute_modules": [()], "recompute": ["none"]}),
)
def delayed_scaling_sees_values_once(c: Case) -> Column:
    discarded = bool({"moe_act", "layernorm"} & set(c.recompute_modules))
    return (c.matmul == "fp8_delayed") & discarded & (c.recompute == "selective")


@rule(
    "precision.gather-needs-fp8",
    "error",
    "fp8_gather",
    message="fp8_gather sends parameters in 8 bits, but linear layers compute in {matmul}",
    symptom="fp8 parameters need fp8 compute to be enabled",
    cause="8-bit parameters are of use only to 8-bit matrix products",
    fixes=({"fp8_gather": [False]},),
)
def fp8_gather_needs_fp8(c: Case) -> Column:
    return c.fp8_gather & not_(one_of(c.matmul, (*FP8, "mxfp8")))


@rule(
    "precision.gather-needs-sharding",
    "error",
    "fp8_gather",
    message="fp8_gather needs a strategy that gathers parameters, not {strategy}",
    symptom="fp8 parameter gather needs the distributed optimizer or FSDP",
    cause="with replicated parameters nothing is gathered",
    fixes=({"fp8_gather": [False]}, {"strategy": ["fsdp2", "zero1"]}),
)
def fp8_gather_needs_sharding(c: Case) -> Column:
    return c.fp8_gather & (c.strategy == "ddp")


@rule(
    "precision.gather-stays-wide",
    "warning",
    "fp8_gather",
    engines=("meshwright",),
    message="fp8_gather changes nothing with matmul={matmul}, offload={offload} and {strategy}: weights travel in bf16",
    symptom="the traffic of bf16 weights, twice that of 8 bits",
    cause="only weights with one scale (fp8_tensor) that wait on the GPU in FSDP2's shards are cast before they travel",
    fixes=({"fp8_gather": [False]}, {"matmul": ["fp8_tensor"]}),
)
def weights_travel_in_fp8(c: Case) -> Column:
    shards = (c.strategy == "fsdp2") & not_(one_of(c.offload, ("params", "optimizer")))
    return c.fp8_gather & not_((c.matmul == "fp8_tensor") & shards) & not_(c.benchmark)


@rule(
    "precision.fp8-tensor-parallel",
    "error",
    "matmul",
    engines=("kempnerforge",),
    message="8-bit linear layers cannot be cut by tp={tp} on this engine",
    symptom="ValueError: FP8 is not supported together with tensor parallelism",
    cause="its 8-bit linear layer does not work on distributed tensors",
    fixes=(NO_TP, NO_FP8),
)
def fp8_layers_stay_whole(c: Case) -> Column:
    return c.fp8 & (c.tp > 1)


def _misaligned(c: Case) -> Column:
    """Where a linear layer's share of a width is no multiple of the scale block."""
    block = np.where(c.matmul == "mxfp8", 32, 16)
    dense = (c.hidden % block != 0) | ((c.ffn % c.tp == 0) & (c.ffn // c.tp % block != 0))
    return dense | ((c.expert_width % c.etp == 0) & (c.expert_width // c.etp % block != 0))


@rule(
    "precision.fp8-widths",
    "error",
    "matmul",
    message="{matmul} needs widths in steps of 16 (mxfp8 32): {hidden}, {ffn} at tp={tp}, {expert_width} at etp={etp}",
    symptom="an assertion on the dimensions of an FP8 tensor in the first forward",
    cause="8-bit matrix kernels work on aligned blocks",
    fixes=({"tp": divisors_of("ffn", "tp")}, {"etp": [1]}, {"tp": [1], "sp": [False], "etp": [1]}, NO_FP8),
)
def fp8_widths_are_aligned(c: Case) -> Column:
    return c.fp8 & _misaligned(c)


@rule(
    "precision.fp8-without-compile",
    "advice",
    "compile",
    engines=TORCHAO,
    message="{matmul} without compilation spends its gain on casting",
    symptom="no faster, often slower, than bf16",
    cause="scaling and casting are many small kernels until the compiler fuses them",
    fixes=({"compile": [True]},),
)
def fp8_is_compiled(c: Case) -> Column:
    return c.fp8 & not_(c.compile) & not_(c.is_moe)


@rule(
    "precision.fp8-over-fp32",
    "warning",
    "compute",
    message="8-bit linear layers between fp32 activations",
    symptom="slow: everything outside the linear layers runs at full width",
    cause="8-bit training is made to sit between bf16 activations",
    fixes=({"compute": ["bf16"]}, NO_FP8),
)
def fp8_sits_in_bf16(c: Case) -> Column:
    return c.fp8 & (c.compute == "fp32")


@rule(
    "precision.fp16-fsdp2",
    "error",
    "compute",
    engines=("megatron",),
    message="fp16 cannot be used with torch FSDP2 here",
    symptom="an assertion that fp16 is not supported with torch FSDP2",
    cause="its loss scaler does not know sharded gradients",
    fixes=({"compute": ["bf16"]}, {"strategy": ["zero1"]}),
)
def fp16_refuses_fsdp2(c: Case) -> Column:
    return (c.compute == "fp16") & (c.strategy == "fsdp2")


@rule(
    "precision.fp16",
    "warning",
    "compute",
    message="fp16 on {gpu}, which has bf16",
    symptom="overflows, skipped steps, or a loss that is not a number",
    cause="fp16 has a small range and needs loss scaling; bf16 has the range of fp32",
    fixes=({"compute": ["bf16"]},),
)
def bf16_is_preferred(c: Case) -> Column:
    return (c.compute == "fp16") & ("bf16" in c.gpu_precisions)


@rule(
    "precision.bf16-master",
    "warning",
    "master",
    engines=("meshwright", "megatron", "torchtitan", "automodel", "fsdp1", "deepspeed"),
    message="the optimizer updates weights kept in bf16 only",
    symptom="the loss flattens early: small updates are rounded away",
    cause="near the end of training an update is smaller than the last bit of a bf16 weight",
    fixes=({"master": ["fp32"]},),
)
def masters_are_fp32(c: Case) -> Column:
    return (c.master == "bf16") & (c.goal == "pretrain") & not_(c.benchmark)


@rule(
    "precision.no-fp32-master",
    "advice",
    "master",
    engines=("kempnerforge",),
    message="this engine keeps parameters and moments in bf16, whatever master={master} says",
    symptom="8 bytes of state per parameter instead of 16 or 18, and bf16 rounding in every update",
    cause="its parameters are created in bf16 and there is no second copy",
    fixes=({"master": ["bf16"], "moments": ["bf16"]},),
)
def master_exists(c: Case) -> Column:
    return (c.master == "fp32") | (c.moments == "fp32")


@rule(
    "precision.bf16-moments",
    "error",
    "moments",
    engines=("megatron",),
    message="bf16 moments need the distributed optimizer, not {strategy}",
    symptom="the precision-aware optimizer requires the distributed optimizer",
    cause="only that optimizer can keep its states in other formats",
    fixes=({"moments": ["fp32"]}, {"strategy": ["zero1"]}),
)
def bf16_moments_are_supported(c: Case) -> Column:
    return (c.moments == "bf16") & one_of(c.strategy, ("ddp", "fsdp2"))


@rule(
    "precision.bf16-reduction",
    "warning",
    "reduce",
    message="gradients of {ranks} ranks are summed in bf16",
    symptom="a slightly worse loss that grows with the number of GPUs",
    cause="each addition rounds to 8 bits of mantissa, and there are as many as there are ranks",
    fixes=({"reduce": ["fp32"]},),
    values={"ranks": lambda c: c.dp * c.cp},
)
def many_ranks_sum_in_fp32(c: Case) -> Column:
    return (c.reduce == "bf16") & (c.dp * c.cp >= 128) & not_(c.benchmark)


@rule(
    "precision.bf16-accumulation",
    "advice",
    "grads",
    message="{accumulation} micro batches add up their gradients in bf16",
    symptom="a worse loss than the same batch in fewer, larger micro batches",
    cause="small gradients are lost when added to a large bf16 sum",
    fixes=({"grads": ["fp32"]},),
)
def many_micro_batches_add_in_fp32(c: Case) -> Column:
    return (c.grads == "bf16") & (c.accumulation >= 16) & not_(c.benchmark) & (c.goal != "peft")


@rule(
    "precision.nvfp4-everywhere",
    "advice",
    "first_last_bf16",
    message="nvfp4 in every layer, the first and last included",
    symptom="a visible gap in the loss against bf16",
    cause="the layers next to embedding and head are the most sensitive to 4 bits",
    fixes=({"first_last_bf16": [True]},),
)
def nvfp4_spares_the_ends(c: Case) -> Column:
    return (c.matmul == "nvfp4") & not_(c.first_last_bf16) & not_(c.benchmark)
