"""Constraints of Megatron-DeepSpeed: what its argument validation and the DeepSpeed engine refuse or ignore."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from meshwright.frameworks.common import new_batch
from meshwright.frameworks.framework import Problem, RuleContext, rule_of
from meshwright.frameworks.megatron_deepspeed.parse import DECODERS, zero_stage
from meshwright.frameworks.megatron_deepspeed.translate import GIVEN_EXPERTS, INTERVAL, JSON, expert_counts
from meshwright.frameworks.megatron_lm import required_args
from meshwright.frameworks.megatron_lm.accessors import get_int, has_unread_args, is_on
from meshwright.frameworks.megatron_lm.layouts import CONNECTIONS
from meshwright.frameworks.megatron_lm.required_args import ASSERTED
from meshwright.frameworks.types import as_int
from meshwright.rules.rule import Severity

STAGE, BATCH = f"{JSON}zero_optimization.stage", f"{JSON}train_batch_size"
MICRO, STEPS = f"{JSON}train_micro_batch_size_per_gpu", f"{JSON}gradient_accumulation_steps"
HALVES = ("fp16", "bf16")


def _json_int(ctx: RuleContext, key: str) -> int | None:
    return as_int(ctx.parsed.settings.get(key))


def _has_json(ctx: RuleContext) -> bool:
    return any(key.startswith(JSON) for key in ctx.parsed.settings)


def _may_be_set(ctx: RuleContext, *keys: str) -> bool:
    return any(map(ctx.is_set, keys)) or has_unread_args(ctx, *keys)


def no_config(ctx: RuleContext) -> Problem | None:
    if not is_on(ctx, "deepspeed") or _may_be_set(ctx, "deepspeed_config"):
        return None
    return Problem("--deepspeed needs --deepspeed_config", ("--deepspeed_config ds_config.json",), key="deepspeed")


def sharded_pipeline(ctx: RuleContext) -> Problem | None:
    """GPT models are built as a PipelineModule unless the flag says otherwise, with one stage too."""
    stage = zero_stage(ctx.parsed.settings) or 0
    if not is_on(ctx, "deepspeed") or stage < 2 or not DECODERS.fullmatch(ctx.parsed.entry):
        return None
    if _may_be_set(ctx, "no_pipeline_parallel"):
        return None
    stages = get_int(ctx, "pipeline_model_parallel_size") or 1
    fix = ("--no-pipeline-parallel",) if stages == 1 else ("--zero-stage 1", '"zero_optimization": {"stage": 1}')
    built = "" if stages > 1 else ", and without --no-pipeline-parallel the model is built as a pipeline of one stage"
    severity: Severity = "error" if _has_json(ctx) else "warning"
    key = STAGE if ctx.is_set(STAGE) else "zero_stage"
    return Problem(f"ZeRO-{stage} cannot be combined with pipeline parallelism{built}", fix, key=key, severity=severity)


def stages_without_pipeline(ctx: RuleContext) -> Problem | None:
    stages = get_int(ctx, "pipeline_model_parallel_size") or 1
    if not is_on(ctx, "no_pipeline_parallel") or stages < 2:
        return None
    message = f"--no-pipeline-parallel is set, but --pipeline-model-parallel-size is {stages}"
    return Problem(
        message, ("--pipeline-model-parallel-size 1", "without --no-pipeline-parallel"), key="no_pipeline_parallel"
    )


def other_stage(ctx: RuleContext) -> Problem | None:
    """The flag decides whether the model is built in shards, the config everything else."""
    flag, config = _json_int(ctx, "zero_stage"), _json_int(ctx, STAGE)
    config = 0 if config is None and _has_json(ctx) and not ctx.is_set(STAGE) else config
    if flag is None or config is None or flag == config or not is_on(ctx, "deepspeed"):
        return None
    severity: Severity = "error" if flag == 3 and ctx.is_set("no_pipeline_parallel") else "warning"
    return Problem(
        f"--zero-stage {flag} and stage {config} of the DeepSpeed config disagree",
        (f"--zero-stage {config}",),
        key="zero_stage",
        severity=severity,
    )


def batch_sizes(ctx: RuleContext) -> Iterator[Problem]:
    """Compare the batch of the flags with that of the config; only a pipeline takes its micro batches by the config."""
    if not is_on(ctx, "deepspeed"):
        return
    severities: tuple[tuple[str, str, Severity], ...] = (
        ("micro_batch_size", MICRO, "warning" if is_on(ctx, "no_pipeline_parallel") else "error"),
        ("global_batch_size", BATCH, "warning"),
    )
    for flag, key, severity in severities:
        given, config = get_int(ctx, flag), _json_int(ctx, key)
        if given and config and given != config:
            name = f"--{flag.replace('_', '-')}"
            what = "the loader and the engine count differently" if key == MICRO else "the flag replaces it"
            message = f"{name} {given} and {key.removeprefix(JSON)} {config} of the DeepSpeed config disagree: {what}"
            yield Problem(message, (f'"{key.removeprefix(JSON)}": {given}',), key=key, severity=severity)


def batch_arithmetic(ctx: RuleContext) -> Problem | None:
    """DeepSpeed asserts batch = micro batch × accumulation steps × data-parallel ranks."""
    batch, micro, steps = _json_int(ctx, BATCH), _json_int(ctx, MICRO), _json_int(ctx, STEPS)
    count = ctx.cluster.world if ctx.cluster is not None else ctx.parsed.gpu_request.count
    layout = ctx.recipe.layout
    split = layout.tp * layout.pp * layout.cp
    if not count or count % split or not is_on(ctx, "deepspeed"):
        return None
    ranks = count // split
    if not batch or not micro:
        return None
    if batch == micro * (steps or max(1, batch // micro // ranks)) * ranks:
        return None
    rounds = steps or max(1, batch // micro // ranks)
    product = f"{micro} × {rounds} × {ranks} data-parallel ranks"
    message = f"train_batch_size {batch} of the DeepSpeed config is not {product} = {micro * rounds * ranks}"
    if steps and batch % (micro * ranks) == 0:  # keeps the batch, which affects the trained weights
        return Problem(message, (f'"{STEPS.removeprefix(JSON)}": {batch // (micro * ranks)}',), key=BATCH)
    fix = (f"--global-batch-size {micro * rounds * ranks}", f'"train_batch_size": {micro * rounds * ranks}')
    return Problem(f"{message}{new_batch(batch, micro * rounds * ranks)}", fix, key=BATCH)


def precision(ctx: RuleContext) -> Problem | None:
    """DeepSpeed checks the dtype of the weights that Megatron builds, or casts them."""
    if not is_on(ctx, "deepspeed") or not _has_json(ctx) or has_unread_args(ctx, *HALVES):
        return None
    enabled = {one: ctx.parsed.settings.get(f"{JSON}{one}.enabled") for one in HALVES}
    if any(one is not None and one.unresolved for one in enabled.values()):
        return None
    config = [one for one, setting in enabled.items() if setting is not None and setting.value is True]
    flags = [one for one in HALVES if is_on(ctx, one)]
    if config == flags or len(flags) > 1 or len(config) > 1:
        return None
    built, run = flags[0] if flags else "fp32", config[0] if config else "fp32"
    shown = f"--{built}" if flags else "neither --fp16 nor --bf16"
    message = f"{shown} builds {built} weights, but the DeepSpeed config trains in {run}"
    fix = (f'"{built}": {{"enabled": true}}',) if flags else (f"--{run}",)
    return Problem(
        message, fix, key=built if flags else f"{JSON}{run}.enabled", severity="error" if run == "fp32" else "warning"
    )


def two_dtypes(ctx: RuleContext) -> Problem | None:
    if not all(is_on(ctx, one) for one in HALVES):
        return None
    return Problem("--fp16 and --bf16 are exclusive", ("without --fp16",), key="fp16")


def expert_list(ctx: RuleContext) -> Problem | None:
    experts, layers = ctx.parsed.settings.get(GIVEN_EXPERTS), get_int(ctx, "num_layers")
    every = max(1, _json_int(ctx, "expert_interval") or INTERVAL)
    counts = expert_counts(experts) if experts is not None else []
    if len(counts) < 2 or not layers or len(counts) == layers // every:
        return None
    have = f"{layers} layers with --expert-interval {every} have experts in {layers // every}"
    message = f"--num-experts has {len(counts)} values, but {have}"
    return Problem(message, (), key="num_experts")


def rates(ctx: RuleContext) -> Problem | None:
    try:
        lr, least = float(ctx.get("lr", "")), float(ctx.get("min_lr", ""))
    except (TypeError, ValueError):
        return None
    return (
        Problem(f"--min-lr {least:g} is higher than --lr {lr:g}", (f"--min-lr {lr / 10:g}",), key="min_lr")
        if least > lr
        else None
    )


def connections(ctx: RuleContext) -> Problem | None:
    """Only sequence parallelism needs it here."""
    if not is_on(ctx, "sequence_parallel") or (get_int(ctx, "tensor_model_parallel_size") or 1) < 2:
        return None
    setting = ctx.parsed.env.get(CONNECTIONS)
    if setting is not None and (setting.unresolved or str(setting.value) == "1"):
        return None
    return Problem(f"--sequence-parallel needs {CONNECTIONS}=1", (f"export {CONNECTIONS}=1",), key="sequence_parallel")


_rule = partial(rule_of, "megatron-deepspeed")


RULES = (
    _rule(
        "no-config",
        "deepspeed",
        no_config,
        "TypeError while the config is opened",
        "the engine is built from a DeepSpeed config",
    ),
    _rule(
        "sharded-pipeline",
        f"{STAGE} zero_stage",
        sharded_pipeline,
        "AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        "the pipeline engine accumulates whole gradients over micro batches",
        supersedes=("strategy.fsdp2-pp",),
    ),
    _rule(
        "stages-without-pipeline",
        "no_pipeline_parallel pipeline_model_parallel_size",
        stages_without_pipeline,
        ASSERTED,
        "the flag turns pipeline parallelism off",
    ),
    _rule(
        "zero-stage",
        f"zero_stage {STAGE}",
        other_stage,
        "training uses the config's stage, or fails on weights that are built in shards",
        "the engine reads the stage of the config; the flag only tells Megatron how to build the model",
        "warning",
    ),
    _rule(
        "batch-sizes",
        f"{MICRO} {BATCH}",
        batch_sizes,
        "another batch is trained than the one meant",
        "Megatron's loader reads the flags, and DeepSpeed's engine its config",
    ),
    _rule(
        "batch-arithmetic",
        f"{BATCH} {MICRO} {STEPS}",
        batch_arithmetic,
        "AssertionError: Check batch related parameters",
        "DeepSpeed asserts batch = micro batch × accumulation steps × data-parallel ranks",
        supersedes=("batch.divides",),
    ),
    _rule(
        "precision",
        "fp16 bf16",
        precision,
        "ValueError about the dtype of parameters, or training in the config's precision",
        "Megatron builds the weights, and DeepSpeed casts or checks them",
    ),
    _rule(
        "expert-list",
        "num_experts",
        expert_list,
        "AssertionError while the model is built",
        "--num-experts has one value, or one for each layer with experts",
    ),
    _rule(
        "missing",
        " ".join(required_args.REQUIRED),
        required_args.missing,
        ASSERTED,
        "model sizes and the micro batch size have no default",
    ),
    _rule(
        "no-length",
        "train_iters",
        required_args.no_length,
        "TypeError before the first iteration",
        "the training length is not set",
    ),
    _rule(
        "no-learning-rate",
        "lr",
        required_args.no_learning_rate,
        "TypeError while the scheduler of the learning rate is built",
        "the learning rate has no default",
    ),
    _rule("two-dtypes", "fp16 bf16", two_dtypes, ASSERTED, "the weights have one dtype"),
    *required_args.schedule_rules("megatron-deepspeed"),
    _rule(
        "position-embeddings",
        "max_position_embeddings seq_length",
        required_args.position_embeddings,
        ASSERTED,
        "the position embedding table must cover the longest sequence",
        supersedes=("sequence.position-table", "sequence.beyond-model"),
    ),
    _rule(
        "head-dim",
        "num_attention_heads hidden_size",
        required_args.head_dim,
        ASSERTED,
        "without --kv-channels the head dimension is hidden size / heads",
    ),
    _rule("learning-rates", "min_lr lr", rates, ASSERTED, "the rate decays from --lr to --min-lr"),
    _rule(
        "max-connections",
        "sequence_parallel",
        connections,
        "RuntimeError about CUDA_DEVICE_MAX_CONNECTIONS",
        "the kernel launch order decides whether communication overlaps with compute",
    ),
)
