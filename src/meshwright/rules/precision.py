"""Number formats that GPU, engine and training support."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.capabilities import executed, rows_of
from meshwright.recipes.case import Case, Column
from meshwright.rules.model_families import overflows_in_fp16
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, divisors_of, not_, one_of

FP8 = ("fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block")
NO_FP8: Fix = {"matmul": ["same"], "fp8_gather": [False], "first_last_bf16": [False]}
TORCHAO = ("meshwright", "torchtitan", "automodel", "kempnerforge")
(FORMATS,) = rows_of("matmul")


@rule(
    "precision.bf16-gpu",
    "error",
    "compute",
    message="{gpu} (compute capability {capability}) does not support bf16",
    symptom="bf16 is rejected at the start, or emulated at a fraction of the speed of fp16",
    cause="bf16 tensor cores came with Ampere (compute capability 8.0); Volta and Turing have fp16",
    fixes=({"compute": ["fp16"]}, {"compute": ["fp16"], **NO_FP8}, {"compute": ["fp32"], **NO_FP8}),
)
def bf16_unsupported_gpu(c: Case) -> Column:
    return (c.compute == "bf16") & ("bf16" not in c.gpu_precisions) & ("fp16" in c.gpu_precisions)


@rule(
    "precision.fp8-gpu",
    "error",
    "matmul",
    message="{gpu} does not support FP8 (matmul={matmul})",
    symptom="device compute capability 8.9 or higher is required for FP8 execution",
    cause="FP8 tensor cores came with Ada and Hopper",
    fixes=(NO_FP8,),
)
def fp8_unsupported_gpu(c: Case) -> Column:
    return one_of(c.matmul, FP8) & ("fp8" not in c.gpu_precisions)


@rule(
    "precision.block-scaled-gpu",
    "error",
    "matmul",
    message="matmul={matmul} needs a Blackwell or newer GPU, not {gpu}",
    symptom="MXFP8 and NVFP4 need compute capability 10.0 or higher",
    cause="scales per small block are a feature of newer tensor cores",
    fixes=({"matmul": ["fp8_tensor"]}, NO_FP8),
)
def block_scaling_unsupported_gpu(c: Case) -> Column:
    return one_of(c.matmul, ("mxfp8", "nvfp4")) & (c.gpu_arch not in ("blackwell", "rubin"))


@rule(
    "precision.blockwise-on-blackwell",
    "advice",
    "matmul",
    message="{gpu} supports mxfp8 in hardware; fp8_block is made for Hopper",
    symptom="slower than mxfp8, with no gain in accuracy",
    cause="fp8_block does in software what newer GPUs do in hardware",
    fixes=({"matmul": ["mxfp8"]}, {"matmul": ["fp8_tensor"]}),
)
def software_block_scaling(c: Case) -> Column:
    return (c.matmul == "fp8_block") & (c.gpu_arch in ("blackwell", "rubin"))


@rule(
    "precision.format-supported",
    "error",
    "matmul",
    engines=FORMATS.refusing,
    message="{engine} does not support matmul={matmul}",
    symptom=FORMATS.symptom,
    cause=FORMATS.cause,
    fixes=({"matmul": ["fp8_tensor"]}, NO_FP8),
)
def format_unsupported(c: Case) -> Column:
    return _lacks_format(c) & not_(_is_published_benchmark(c))


def _lacks_format(c: Case) -> Column:
    return FORMATS.unsupported(c)


def _is_published_benchmark(c: Case) -> Column:
    """Return whether this is a benchmark recipe on the default engine: a published result of another engine."""
    return c.benchmark & (c.engine == "meshwright")


@rule(
    "precision.format-published",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="this benchmark was published with {matmul}, which meshwright can estimate but not train",
    symptom="training is rejected before it starts",
    cause="the published number is from another engine, whose low-precision layers implement this scaling",
    fixes=({"matmul": ["fp8_tensor", "fp8_row"]}, NO_FP8),
)
def published_format_unsupported(c: Case) -> Column:
    return _lacks_format(c) & _is_published_benchmark(c)


@rule(
    "precision.mxfp8-untested",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="mxfp8 was tested in CPU emulation only, never on {gpu}",
    symptom="unknown: the first run on such a GPU is the test",
    cause="no GPU with this format was available during development",
    fixes=({"matmul": ["fp8_tensor", "fp8_row"]}, NO_FP8),
)
def mxfp8_untested(c: Case) -> Column:
    return (c.matmul == "mxfp8") & not_(c.benchmark)


@rule(
    "precision.fp8-tokens",
    "warning",
    "matmul",
    engines=("meshwright",),
    message="{tokens} tokens per micro batch are not a multiple of {step}: nothing is computed in {matmul}",
    symptom="the speed of bf16",
    cause="FP8 kernels need aligned dimensions, including the number of tokens",
    fixes=({"micro_batch_size": [2, 4, 8, 16, 32]}, NO_FP8),
    values={"tokens": lambda c: _tokens_per_forward(c), "step": lambda c: 32 if c.matmul == "mxfp8" else 16},
)
def micro_batch_misaligned(c: Case) -> Column:
    return c.fp8 & (_tokens_per_forward(c) % np.where(c.matmul == "mxfp8", 32, 16) != 0)


def _tokens_per_forward(c: Case) -> Column:
    """Return the tokens in one forward pass of a linear layer."""
    return c.micro_batch_size * (c.seq_length // c.cp)


@rule(
    "precision.delayed-first-last",
    "error",
    "first_last_bf16",
    engines=("megatron",),
    message="fp8_delayed does not support first_last_bf16=true",
    symptom="delayed scaling does not support first/last layers in BF16",
    cause="its amax history covers all layers together",
    fixes=({"first_last_bf16": [False]}, {"matmul": ["fp8_tensor"]}),
)
def delayed_scaling_first_last(c: Case) -> Column:
    return (c.matmul == "fp8_delayed") & c.first_last_bf16


@rule(
    "precision.delayed-recompute",
    "error",
    "recompute_modules",
    engines=("megatron",),
    message="fp8_delayed does not support recompute of moe_act or layernorm ({recompute_modules})",
    symptom="delayed scaling does not support recomputing these modules",
    cause="recompute would record the amax of the same values twice",
    fixes=({"matmul": ["fp8_tensor"]}, {"recompute_modules": [()], "recompute": ["none"]}),
)
def delayed_scaling_recompute(c: Case) -> Column:
    discarded = bool({"moe_act", "layernorm"} & set(c.recompute_modules))
    return (c.matmul == "fp8_delayed") & discarded & (c.recompute == "selective")


@rule(
    "precision.gather-needs-fp8",
    "error",
    "fp8_gather",
    message="fp8_gather=true, but linear layers compute in matmul={matmul}",
    symptom="fp8 parameters need fp8 compute to be enabled",
    cause="FP8 parameters are useful only for FP8 matmuls",
    fixes=({"fp8_gather": [False]},),
)
def fp8_gather_without_fp8(c: Case) -> Column:
    return c.fp8_gather & not_(one_of(c.matmul, (*FP8, "mxfp8")))


@rule(
    "precision.gather-needs-sharding",
    "error",
    "fp8_gather",
    message="fp8_gather=true needs a strategy that gathers parameters, not {strategy}",
    symptom="fp8 parameter gather needs the distributed optimizer or FSDP",
    cause="with replicated parameters, nothing is gathered",
    fixes=({"fp8_gather": [False]}, {"strategy": ["fsdp2", "zero1"]}),
)
def fp8_gather_without_sharding(c: Case) -> Column:
    return c.fp8_gather & (c.strategy == "ddp")


@rule(
    "precision.fp8-tensor-parallel",
    "error",
    "matmul",
    engines=("kempnerforge",),
    message="{engine} does not support FP8 linear layers with tp={tp}",
    symptom="ValueError: FP8 is not supported together with tensor parallelism",
    cause="its FP8 linear layer does not support DTensor",
    fixes=(NO_TP, NO_FP8),
)
def fp8_with_tensor_parallel(c: Case) -> Column:
    return c.fp8 & (c.tp > 1)


def _misaligned(c: Case) -> Column:
    """Return where the shard of a linear layer's width is not a multiple of the scale block."""
    block = np.where(c.matmul == "mxfp8", 32, 16)
    dense = (c.hidden % block != 0) | ((c.ffn % c.tp == 0) & (c.ffn // c.tp % block != 0))
    return dense | ((c.expert_width % c.etp == 0) & (c.expert_width // c.etp % block != 0))


@rule(
    "precision.fp8-widths",
    "error",
    "matmul",
    message="{matmul} needs widths divisible by 16 (mxfp8 32): {hidden}, {ffn} at tp={tp}, {expert_width} at etp={etp}",
    symptom="assertion on the dimensions of an FP8 tensor in the first forward pass",
    cause="FP8 kernels need aligned dimensions",
    fixes=({"tp": divisors_of("ffn", "tp")}, {"etp": [1]}, {"tp": [1], "sp": [False], "etp": [1]}, NO_FP8),
)
def fp8_widths_misaligned(c: Case) -> Column:
    return c.fp8 & _misaligned(c)


@rule(
    "precision.fp8-without-compile",
    "advice",
    "compile",
    engines=TORCHAO,
    message="matmul={matmul} without compile loses its gain to casting",
    symptom="no faster, often slower, than bf16",
    cause="scaling and casting are many small kernels until the compiler fuses them",
    fixes=({"compile": [True]},),
)
def fp8_without_compile(c: Case) -> Column:
    return c.fp8 & not_(c.compile) & not_(c.is_moe)


@rule(
    "precision.fp8-over-fp32",
    "warning",
    "compute",
    message="FP8 linear layers with compute=fp32",
    symptom="slow: everything outside the linear layers runs in fp32",
    cause="FP8 training is designed for bf16 activations",
    fixes=({"compute": ["bf16"]}, NO_FP8),
)
def fp8_over_fp32(c: Case) -> Column:
    return c.fp8 & (c.compute == "fp32")


@rule(
    "precision.fp16-fsdp2",
    "error",
    "compute",
    engines=("megatron",),
    message="{engine} does not support fp16 with FSDP2",
    symptom="assertion that fp16 is not supported with torch FSDP2",
    cause="its loss scaler does not support sharded gradients",
    fixes=({"compute": ["bf16"]}, {"strategy": ["zero1"]}),
)
def fp16_with_fsdp2(c: Case) -> Column:
    return (c.compute == "fp16") & (c.strategy == "fsdp2")


@rule(
    "precision.fp16-overflow",
    "warning",
    "compute",
    message="compute=fp16: activations of {name} exceed 65,504, the largest number of fp16, and become infinite",
    symptom="a loss of NaN, or every step skipped by the loss scaler, from the first steps on",
    cause="the family was trained in bf16, and its activations reach values that fp16 does not have; loss scaling "
    "does not help: it scales gradients, not activations",
    fixes=({"compute": ["bf16"]}, {"compute": ["fp32"]}),
    values={"name": lambda c: c.model.name},
)
def fp16_overflows(c: Case) -> Column:
    return (c.compute == "fp16") & overflows_in_fp16(c)


@rule(
    "precision.fp16",
    "warning",
    "compute",
    message="compute=fp16 on {gpu}, which supports bf16",
    symptom="overflows, skipped steps or a NaN loss",
    cause="fp16 has a small range and needs loss scaling; bf16 has the range of fp32",
    fixes=({"compute": ["bf16"]},),
)
def fp16_instead_of_bf16(c: Case) -> Column:
    return (c.compute == "fp16") & ("bf16" in c.gpu_precisions) & (not overflows_in_fp16(c))


@rule(
    "precision.bf16-master",
    "warning",
    "master",
    engines=("meshwright", "megatron", "torchtitan", "automodel", "fsdp1", "deepspeed"),
    message="master=bf16: the optimizer updates bf16 weights without an fp32 copy",
    symptom="the loss flattens early: small updates are rounded away",
    cause="late in training, an update is smaller than the last bit of a bf16 weight",
    fixes=({"master": ["fp32"]},),
)
def bf16_master_weights(c: Case) -> Column:
    return (c.master == "bf16") & (c.goal == "pretrain") & not_(c.benchmark)


@rule(
    "precision.no-fp32-master",
    "advice",
    "master",
    engines=("kempnerforge",),
    message="{engine} keeps parameters and moments in bf16 and ignores master={master}",
    symptom="8 bytes of state per parameter instead of 16 or 18, and bf16 rounding in every update",
    cause="its parameters are created in bf16, without an fp32 copy",
    fixes=({"master": ["bf16"], "moments": ["bf16"]},),
)
def master_dtype_ignored(c: Case) -> Column:
    return (c.master == "fp32") | (c.moments == "fp32")


@rule(
    "precision.bf16-moments",
    "error",
    "moments",
    engines=("megatron",),
    message="moments=bf16 needs the distributed optimizer, not {strategy}",
    symptom="the precision-aware optimizer requires the distributed optimizer",
    cause="only the distributed optimizer supports other state dtypes",
    fixes=({"moments": ["fp32"]}, {"strategy": ["zero1"]}),
)
def bf16_moments_unsupported(c: Case) -> Column:
    return (c.moments == "bf16") & one_of(c.strategy, ("ddp", "fsdp2"))


@rule(
    "precision.bf16-reduction",
    "warning",
    "reduce",
    message="reduce=bf16 sums the gradients of {ranks} ranks in bf16",
    symptom="a slightly worse loss, growing with the number of GPUs",
    cause="each addition rounds to 8 bits of mantissa, once per rank",
    fixes=({"reduce": ["fp32"]},),
    values={"ranks": lambda c: c.dp * c.cp},
)
def bf16_reduction_over_many_ranks(c: Case) -> Column:
    return (executed(c).reduce == "bf16") & (c.dp * c.cp >= 128) & not_(c.benchmark)


@rule(
    "precision.bf16-accumulation",
    "advice",
    "grads",
    message="gradients of {accumulation} micro batches are accumulated in bf16 (grads={grads}, reduce={reduce})",
    symptom="a worse loss than the same batch in fewer, larger micro batches",
    cause="small gradients are lost when added to a large bf16 sum",
    fixes=(
        {"grads": ["fp32"]},
        {"grads": ["fp32"], "reduce": ["fp32"]},
        {"grads": ["fp32"], "reduce": ["fp32"], "defer_grad_sync": [False]},  # sums shards where full sums do not fit
    ),
)
def bf16_accumulation(c: Case) -> Column:
    summed = executed(c).grads  # our engine sums in the format of the reduction
    return (summed == "bf16") & (c.accumulation >= 16) & not_(c.benchmark) & (c.goal != "peft")


@rule(
    "precision.nvfp4-everywhere",
    "advice",
    "first_last_bf16",
    message="nvfp4 in every layer, including the first and last",
    symptom="a visible loss gap to bf16",
    cause="the layers next to embedding and head are the most sensitive to 4-bit precision",
    fixes=({"first_last_bf16": [True]},),
)
def nvfp4_everywhere(c: Case) -> Column:
    return (c.matmul == "nvfp4") & not_(c.first_last_bf16) & not_(c.benchmark)
