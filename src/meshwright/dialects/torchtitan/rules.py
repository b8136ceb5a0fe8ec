"""What torchtitan refuses, ignores or changes by itself, beyond the arithmetic that our own rules know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from meshwright.dialects.dialect import ForeignRule, Look, Problem
from meshwright.dialects.torchtitan.follows import virtual_stages
from meshwright.dialects.torchtitan.models import ELSEWHERE, FLAVORS, PRESETS, plain
from meshwright.errors import closest
from meshwright.recipes.foreign.torchtitan import CONTEXT, DATA_SETS, LOCAL, MICRO, STEP, TOKENS
from meshwright.recipes.foreign.torchtitan import CONVERTERS as CONVERTER_NAMES

PP, EP, ETP, TP, CP = (
    f"parallelism.{name}_parallel_degree" for name in ("pipeline", "expert", "expert_tensor", "tensor", "context")
)
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
NAME, FLAVOR = "model.name", "model.flavor"


def _today(look: Look) -> bool:
    return look.says("config")


def _degree(look: Look, key: str) -> int:
    value = look(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _custom(look: Look) -> bool:
    """Whether a module of the user's own may register more names."""
    return any(look(f"experimental.{key}") for key in ("custom_import", "custom_args_module"))


def _unknown_model(look: Look) -> Problem | None:
    name, flavor = str(look(NAME)), str(look(FLAVOR))
    if _today(look) or _custom(look) or name in ELSEWHERE or "." in name:
        return None
    if name not in FLAVORS:
        known = ", ".join(FLAVORS)
        fix = tuple(look.dialect.spell(NAME, near) for near in closest(name, FLAVORS, 1))
        return Problem(f"torchtitan has no model {name}; it has {known}", fix, key=NAME)
    if plain(flavor) in FLAVORS[name] or not look.says(FLAVOR) or look.parsed.model is not None:
        return None  # or one of the user's own, whose shape was given
    fix = tuple(look.dialect.spell(FLAVOR, near) for near in _near_flavor(flavor, FLAVORS[name]))
    known = ", ".join(FLAVORS[name])
    return Problem(f"{name} has no flavor {flavor}; it has {known} (--model NAME for one of your own)", fix, key=FLAVOR)


def _near_flavor(flavor: str, known: Any) -> list[str]:
    same = [name for name in known if name.lower() == flavor.lower()]
    return same or closest(flavor, known, 1)


def _unknown_data(look: Look) -> Problem | None:
    name = str(look("training.dataset"))
    if _custom(look) or not look.says("training.dataset") or str(look(NAME)) not in FLAVORS or look(NAME) == "flux":
        return None
    if name in DATA_SETS or look("job.custom_config_module"):
        return None
    return Problem(
        f"no data set {name}: torchtitan knows {', '.join(DATA_SETS)}, and those a module of yours registers",
        (look.dialect.spell("training.dataset", "c4"),),
    )


def _unknown_optimizer(look: Look) -> Problem | None:
    name = str(look("optimizer.name"))
    near = [known for known in ("AdamW", "Adam") if known != name and known.lower() == name.lower()]
    if not near or _custom(look):
        return None
    return Problem(
        f"there is no optimizer {name}: names are looked up exactly", (look.dialect.spell("optimizer.name", near[0]),)
    )


def _schedule_without_file(look: Look) -> Problem | None:
    name = str(look(SCHEDULE))
    if not name.lower().strip("_").startswith("pipelineschedule") or _degree(look, PP) == 1:
        return None
    if look("parallelism.pipeline_parallel_schedule_csv"):
        return None
    return Problem(f"{name} runs a schedule from a file, and pipeline_parallel_schedule_csv names none")


def _uneven_chunks(look: Look) -> Problem | None:
    pp = _degree(look, PP)
    chunks = virtual_stages(look.parsed.settings, look.parsed.model)
    if pp == 1 or not chunks or chunks % pp == 0:
        return None
    key = "parallelism.pipeline_parallel_layers_per_stage"
    return Problem(f"{key}={look(key)} makes {chunks} stage chunks, which {pp} ranks cannot share equally", key=key)


def _microbatch_too_large(look: Look) -> Problem | None:
    """More samples in a micro batch than there are in the batch it is cut from."""
    local, micro = look(LOCAL), look(MICRO)
    if _today(look) or _degree(look, PP) == 1 or not (isinstance(local, int) and isinstance(micro, int)):
        return None
    stages = _degree(look, PP) * look.recipe.layout.vp
    if micro <= 0 or local % micro or local // micro >= stages:
        return None
    return Problem(
        f"{LOCAL}={local} in micro batches of {micro} fills {local // micro} of {stages} stage chunks",
        (look.dialect.spell(LOCAL, stages * micro),),
        key=LOCAL if look.says(LOCAL) else PP,
    )


def _batch_not_divided(look: Look) -> Problem | None:
    """With a pipeline, a step is made of whole local batches, not just of micro batches."""
    batch, local = look("training.global_batch_size"), look(LOCAL)
    ranks = _ranks(look)
    if _today(look) or _degree(look, PP) == 1 or not (isinstance(batch, int) and isinstance(local, int)) or not ranks:
        return None
    micro = look.recipe.layout.micro_batch_size
    if local <= 0 or batch % (local * ranks) == 0 or batch % (micro * ranks):
        return None  # right, or told by the rule of micro batches
    return Problem(
        f"training.global_batch_size={batch} is not a multiple of {local * ranks}: {LOCAL} × {ranks} data ranks",
        (look.dialect.spell("training.global_batch_size", max(1, round(batch / (local * ranks))) * local * ranks),),
    )


def _ranks(look: Look) -> int:
    """Data-parallel ranks, where they are known; 0 where they are not."""
    shard, copies = look(SHARD), _degree(look, REPLICATE)
    if isinstance(shard, int) and shard > 0:
        return shard * copies
    if look.cluster is None:
        return 0
    return max(1, look.cluster.world // (_degree(look, TP) * _degree(look, PP) * _degree(look, CP)))


def _step_not_divided(look: Look) -> Problem | None:
    step, tokens, ranks = look(STEP), look(TOKENS), _ranks(look)
    if not (isinstance(step, int) and isinstance(tokens, int)) or step <= 0 or tokens <= 0 or not ranks:
        return None
    micro_batches = _degree(look, "parallelism.num_pp_microbatches") if _degree(look, PP) > 1 else 1
    once = tokens * micro_batches * ranks
    if step % once == 0:
        return None
    return Problem(
        f"{STEP}={step} is not a multiple of {once}: tokens of a micro batch × micro batches × data ranks",
        (look.dialect.spell(STEP, max(1, round(step / once)) * once),),
        key=STEP,
    )


def _tokens_not_divided(look: Look) -> Problem | None:
    tokens = look(TOKENS)
    cut = look("parallelism.enable_sequence_parallel", True) is not False
    parts = (_degree(look, TP) if cut else 1) * (2 * _degree(look, CP) if _degree(look, CP) > 1 else 1)
    if not isinstance(tokens, int) or tokens <= look.recipe.data.seq_length or tokens % parts == 0:
        return None  # right, or told by the rule of sequences
    return Problem(
        f"{TOKENS}={tokens} is not a multiple of {parts}, the parts that tp and 2 × cp cut it into", key=TOKENS
    )


def _budget_uncompiled(look: Look) -> Problem | None:
    if look(MODE) != "memory_budget" or look.recipe.kernels.compile:
        return None
    fix = (look.dialect.spell("compile.enable", True), look.dialect.spell("compile.components", ["model", "loss"]))
    return Problem("a memory budget is kept by the compiler, and the model is not compiled", fix, key=MODE)


def _recompute_option(look: Look) -> Problem | None:
    option = look(OPTION)
    if look(MODE) != "selective" or not look.says(OPTION) or re.fullmatch("op|[1-9][0-9]*", str(option)):
        return None
    return Problem(
        f"{OPTION}={option}: op, or how often a layer is recomputed", (look.dialect.spell(OPTION, "op"),), key=OPTION
    )


def _budget_unread(look: Look) -> Problem | None:
    key = "activation_checkpoint.memory_budget"
    if not look.says(key) or look(MODE) == "memory_budget" or look(key) == 0.5:
        return None
    return Problem(
        f"{key} is read in mode memory_budget, and the mode is {look(MODE)}",
        (look.dialect.spell(MODE, "memory_budget"),),
    )


def _emulated(look: Look) -> Problem | None:
    key = "quantize.linear.float8.emulate"
    if look(key) is not True or not look.recipe.kernels.compile or CONVERTER_NAMES[0] not in _converters(look):
        return None
    return Problem(
        "emulated float8 does not run in a compiled model",
        (look.dialect.spell(key, False), look.dialect.spell("compile.enable", False)),
    )


def _converters(look: Look) -> list[str]:
    found = look("model.converters", [])
    return [str(name) for name in found] if isinstance(found, list) else [str(found)]


def _recipe_and_gather(look: Look) -> Problem | None:
    gather, recipe = "quantize.linear.float8.enable_fsdp_float8_all_gather", "quantize.linear.float8.recipe_name"
    if look(gather) is not True or not look(recipe) or CONVERTER_NAMES[0] not in _converters(look):
        return None
    return Problem(
        f"{gather} is for scaling without a recipe name, and {recipe}={look(recipe)}",
        (look.dialect.spell(gather, False),),
        key=gather,
    )


def _quantize_unread(look: Look) -> Iterator[Problem]:
    """Settings that switch something on in a table that no converter reads."""
    for table in CONVERTER_NAMES:
        if table in _converters(look):
            continue
        for key in look.under(table):
            if look(key) is True or (key == "quantize.linear.float8.recipe_name" and look(key)):
                fix = (look.dialect.spell("model.converters", [*_converters(look), table]),)
                yield Problem(
                    f"{key} is read by the converter {table}, which model.converters does not list", fix, key=key
                )


def _one_checkpoint(look: Look) -> Problem | None:
    key = "checkpoint.keep_latest_k"
    if look(key) != 1 or look("checkpoint.enable") is not True:
        return None
    return Problem(
        "one checkpoint is too few: the last may be half written; 0 keeps all", (look.dialect.spell(key, 2),)
    )


def _more_than_weights(look: Look) -> Iterator[Problem]:
    if look("checkpoint.enable") is not True:
        return
    for folder, only in (
        ("last_save_in_hf", "last_save_model_only"),
        ("initial_load_in_hf", "initial_load_model_only"),
    ):
        if look(f"checkpoint.{folder}") is True and look(f"checkpoint.{only}") is False:
            message = f"checkpoint.{folder} needs checkpoint.{only}: such a folder holds weights and nothing else"
            yield Problem(message, (look.dialect.spell(f"checkpoint.{only}", True),), key=f"checkpoint.{only}")


def _early_step(look: Look) -> Iterator[Problem]:
    key = "optimizer.early_step_in_backward"
    if look(key) is not True:
        return
    off = (look.dialect.spell(key, False),)
    for other, axis in ((PP, "a pipeline"), (EP, "expert parallelism")):
        if _degree(look, other) > 1:
            yield Problem(f"the optimizer cannot step in the backward pass with {axis}", off, key=key)


def _early_step_unclipped(look: Look) -> Problem | None:
    key, norm = "optimizer.early_step_in_backward", look("training.max_norm")
    if look(key) is not True or not isinstance(norm, int | float) or norm <= 0:
        return None
    if max(_degree(look, PP), _degree(look, EP)) > 1:
        return None  # which is refused anyway
    return Problem(f"training.max_norm={norm} clips nothing: gradients are used up in the backward pass", key=key)


def _expert_mesh(look: Look) -> Iterator[Problem]:
    ep, etp, tp, cp = (_degree(look, key) for key in (EP, ETP, TP, CP))
    if ep == 1 or _today(look):
        return
    if etp not in (1, tp):
        yield Problem(
            f"{ETP}={etp}: experts are cut over tp={tp} ranks or over none", (look.dialect.spell(ETP, 1),), key=ETP
        )
    elif ep % (cp if etp == tp else cp * tp):
        whole = f"cp={cp}" if etp == tp else f"cp × tp = {cp} × {tp}"
        yield Problem(f"{EP}={ep} must hold whole groups of {whole}", (look.dialect.spell(EP, ep * cp * tp),), key=EP)


def _deepep(look: Look) -> Iterator[Problem]:
    key = "parallelism.expert_parallel_comm_backend"
    if look(key) != "deepep" or look.case is None or not look.case.is_moe:
        return
    if _degree(look, EP) == 1:
        yield Problem("DeepEP needs expert parallelism", (look.dialect.spell(key, "standard"),), key=key)
    elif _degree(look, ETP) > 1:
        yield Problem("DeepEP does not cut experts over tensor ranks", (look.dialect.spell(ETP, 1),), key=key)


def _dualpipe(look: Look) -> Problem | None:
    overlapped = look("parallelism.pipeline_parallel_expert_parallel_overlap") is not False
    if str(look(SCHEDULE)).lower() != "dualpipev" or not overlapped or min(_degree(look, PP), _degree(look, EP)) == 1:
        return None
    if look(MODE) == "none" or _today(look):
        return None
    fix = (
        look.dialect.spell(MODE, "none"),
        look.dialect.spell("parallelism.pipeline_parallel_expert_parallel_overlap", False),
    )
    return Problem("DualPipeV overlaps expert exchanges only without recompute", fix, key=SCHEDULE)


def _varlen_context(look: Look) -> Problem | None:
    if _degree(look, CP) == 1:
        return None
    if _today(look):
        preset = PRESETS.get(str(look("module")), {}).get(str(look("config")))
        if look("parallelism.spmd_backend", "spmd_types") != "spmd_types":
            return Problem("context parallelism needs the spmd_types backend", key="parallelism.spmd_backend")
        if preset is not None and preset.kernel != "flex":
            return Problem(f"context parallelism needs FlexAttention, and {look('config')} has {preset.kernel}", key=CP)
        return None
    if not str(look(FLAVOR)).endswith(("_varlen", "_varlen_attn")):
        return None
    return Problem(
        "varlen attention does not run over context ranks",
        (look.dialect.spell(FLAVOR, plain(str(look(FLAVOR)))),),
        key=CP,
    )


def _no_balancer(look: Look) -> Problem | None:
    key = "parallelism.context_parallel_load_balancer"
    if not look.says(key) or look(key) in ("headtail", "ptrr", None):
        return None
    return Problem(f"{key}={look(key)!r}: headtail, ptrr, or left out", (look.dialect.spell(key, "headtail"),))


def _type_checked(look: Look) -> Problem | None:
    key = "debug.spmd_typechecking"
    if look(key) is not True:
        return None
    if _degree(look, PP) > 1:
        return Problem("type checking does not run with a pipeline", ("--debug.no_spmd_typechecking",), key=key)
    preset = PRESETS.get(str(look("module")), {}).get(str(look("config")))
    if look(MODE) == "selective" and preset is not None and preset.kernel == "flex":
        fix = ("--debug.no_spmd_typechecking", "activation-checkpoint:full")
        return Problem("type checking does not run with selective recompute and FlexAttention", fix, key=key)
    return None


def _batch_invariant(look: Look) -> Problem | None:
    key = "debug.batch_invariant"
    return (
        Problem("batch invariance is for inference", ("--debug.no_batch_invariant",), key=key)
        if look(key) is True
        else None
    )


def _beyond_positions(look: Look) -> Problem | None:
    model = look.parsed.model
    length = look.recipe.data.seq_length
    if not _today(look) or model is None or not model.max_seq_length or length <= model.max_seq_length:
        return None
    message = f"{CONTEXT}={length} is longer than the {model.max_seq_length} positions of the model"
    return Problem(message, (look.dialect.spell(CONTEXT, model.max_seq_length),), key=CONTEXT)


def _decay_cut(look: Look) -> Problem | None:
    ratio, steps, warmup = look("lr_scheduler.decay_ratio"), look("training.steps"), look("lr_scheduler.warmup_steps")
    if isinstance(ratio, bool) or not all(isinstance(v, int | float) for v in (ratio, steps, warmup)):
        return None
    total = look("lr_scheduler.total_steps") or steps
    if not isinstance(total, int) or not ratio >= 0 or warmup >= total:
        return None
    if warmup + round(total * min(ratio, 1)) <= total:
        return None
    return Problem(
        f"{warmup} warm-up steps and a decay over {ratio:g} of {total} steps do not fit; the decay is cut short",
        (look.dialect.spell("lr_scheduler.decay_ratio", round(1 - warmup / total, 4)),),
    )


def _copies_alone(look: Look) -> Problem | None:
    others = [axis for axis, key in (("tp", TP), ("pp", PP), ("cp", CP), ("ep", EP)) if _degree(look, key) > 1]
    if _today(look) or _degree(look, REPLICATE) == 1 or look(SHARD) != 1 or not others:
        return None
    return Problem(
        f"copies without sharding are DDP, which 0.2.0 and 0.2.1 refuse next to {', '.join(others)}",
        (look.dialect.spell(SHARD, -1),),
        key=REPLICATE,
    )


def _estimated(look: Look) -> Problem | None:
    key = "memory_estimation.enable"
    used = [axis for axis, name in (("tp", TP), ("pp", PP), ("cp", CP), ("ep", EP)) if _degree(look, name) > 1]
    used += ["compile"] if look("compile.enable") is True else []
    if look(key) is not True or not used:
        return None
    return Problem(f"their estimate of memory knows FSDP and HSDP only, not {', '.join(used)}", key=key)


def _no_micro_batches(look: Look) -> Problem | None:
    key = "parallelism.num_pp_microbatches"
    value = look(key)
    return Problem(f"{key}={value} must be above 0", key=key) if isinstance(value, int) and value <= 0 else None


def _rule(name: str, severity: Any, keys: tuple[str, ...], broken: Any, symptom: str, cause: str) -> ForeignRule:
    return ForeignRule(f"torchtitan.{name}", severity, keys, broken, symptom=symptom, cause=cause)


RULES = (
    _rule(
        "model-name",
        "error",
        (NAME, FLAVOR),
        _unknown_model,
        "KeyError or a list of the models there are",
        "models are looked up by name and flavor in a table of the program",
    ),
    _rule(
        "dataset-name",
        "error",
        ("training.dataset",),
        _unknown_data,
        "ValueError that lists the data sets there are",
        "data sets are looked up by name; a path alone does not say how to read one",
    ),
    _rule(
        "optimizer-name",
        "error",
        ("optimizer.name",),
        _unknown_optimizer,
        "NotImplementedError that names the optimizer",
        "optimizers are looked up by their exact name",
    ),
    _rule(
        "schedule-file",
        "error",
        (SCHEDULE,),
        _schedule_without_file,
        "the schedule is built without actions and fails",
        "the general schedules take their order from a file",
    ),
    _rule(
        "stage-count",
        "error",
        ("parallelism.pipeline_parallel_layers_per_stage",),
        _uneven_chunks,
        "ValueError about virtual stages and the pipeline degree",
        "every rank runs the same number of chunks",
    ),
    _rule(
        "pipeline-underfilled",
        "warning",
        (LOCAL, MICRO),
        _microbatch_too_large,
        "a warning that micro batches are fewer than stages; slow steps",
        "accumulation runs one pipeline after the other, each with the micro batches of one local batch",
    ),
    _rule(
        "global-batch",
        "error",
        ("training.global_batch_size",),
        _batch_not_divided,
        "an assertion on the global batch size",
        "a step is a whole number of local batches on every rank",
    ),
    _rule(
        "tokens-per-step",
        "error",
        (STEP,),
        _step_not_divided,
        "ValueError on num_tokens_per_train_step",
        "a step is a whole number of micro batches on every rank",
    ),
    _rule(
        "tokens-per-microbatch",
        "error",
        (TOKENS,),
        _tokens_not_divided,
        "ValueError on the tokens of a micro batch",
        "sequence and context parallelism cut the tokens into equal parts",
    ),
    _rule(
        "memory-budget",
        "error",
        (MODE,),
        _budget_uncompiled,
        "ValueError: the model must be compiled",
        "the compiler decides what to recompute within the budget",
    ),
    _rule(
        "recompute-option",
        "error",
        (OPTION,),
        _recompute_option,
        "ValueError: invalid selective AC option",
        "selective recompute is by operation or by every nth layer",
    ),
    _rule(
        "budget-unread",
        "warning",
        ("activation_checkpoint.memory_budget",),
        _budget_unread,
        "nothing changes",
        "the budget belongs to another mode",
    ),
    _rule(
        "float8-emulation",
        "error",
        ("quantize.linear.float8.emulate",),
        _emulated,
        "fails in the first compiled step",
        "emulation runs in plain Python for tests",
    ),
    _rule(
        "float8-gather",
        "error",
        ("quantize.linear.float8.enable_fsdp_float8_all_gather",),
        _recipe_and_gather,
        "an assertion while the converter is built",
        "a recipe name fixes everything, the gather included",
    ),
    _rule(
        "quantize-unread",
        "warning",
        ("model.converters",),
        _quantize_unread,
        "trains in bf16",
        "the tables under quantize say how; model.converters says whether",
    ),
    _rule(
        "one-checkpoint",
        "error",
        ("checkpoint.keep_latest_k",),
        _one_checkpoint,
        "ValueError about checkpoint replicas",
        "the newest checkpoint may still be being written",
    ),
    _rule(
        "weights-only",
        "error",
        ("checkpoint.last_save_model_only", "checkpoint.initial_load_model_only"),
        _more_than_weights,
        "ValueError while checkpointing is set up",
        "safetensors hold tensors only",
    ),
    _rule(
        "early-step",
        "error",
        ("optimizer.early_step_in_backward",),
        _early_step,
        "NotImplementedError",
        "gradients must live until all stages or experts are done",
    ),
    _rule(
        "early-step-unclipped",
        "warning",
        ("optimizer.early_step_in_backward",),
        _early_step_unclipped,
        "the gradient norm is logged as 0",
        "each gradient is freed as soon as its parameter was updated",
    ),
    _rule(
        "expert-mesh",
        "error",
        (ETP, EP),
        _expert_mesh,
        "an assertion on ep, etp, tp and cp",
        "experts borrow whole context and tensor groups",
    ),
    _rule(
        "deepep",
        "error",
        ("parallelism.expert_parallel_comm_backend",),
        _deepep,
        "ValueError or NotImplementedError",
        "its kernels exchange tokens between expert ranks only",
    ),
    _rule(
        "dualpipe-recompute",
        "error",
        (SCHEDULE,),
        _dualpipe,
        "NotImplementedError",
        "recompute would run the exchanges a second time out of order",
    ),
    _rule(
        "context-attention",
        "error",
        (CP,),
        _varlen_context,
        "NotImplementedError or ValueError",
        "only some attention kernels can merge partial results of context ranks",
    ),
    _rule(
        "load-balancer",
        "error",
        ("parallelism.context_parallel_load_balancer",),
        _no_balancer,
        "ValueError",
        "the name is looked up",
    ),
    _rule(
        "type-checking",
        "error",
        ("debug.spmd_typechecking",),
        _type_checked,
        "ValueError",
        "the checker does not follow pipelines, nor recompute around FlexAttention",
    ),
    _rule(
        "batch-invariant",
        "error",
        ("debug.batch_invariant",),
        _batch_invariant,
        "ValueError",
        "pretraining has no batch-invariant mode",
    ),
    _rule(
        "beyond-positions",
        "error",
        (CONTEXT,),
        _beyond_positions,
        "ValueError on the length of the rotary table",
        "positions are read from a table",
    ),
    _rule(
        "decay-cut",
        "warning",
        ("lr_scheduler.decay_ratio",),
        _decay_cut,
        "a warning, and a steeper decay than asked for",
        "warm-up, plateau and decay must fit into the steps",
    ),
    _rule(
        "copies-alone",
        "warning",
        (REPLICATE,),
        _copies_alone,
        "RuntimeError: DDP with more than one dimension",
        "plain copies have no place for other axes",
    ),
    _rule(
        "estimate",
        "warning",
        ("memory_estimation.enable",),
        _estimated,
        "the estimate stops or is of another layout",
        "it tracks FSDP only",
    ),
    _rule(
        "pp-microbatches",
        "error",
        ("parallelism.num_pp_microbatches",),
        _no_micro_batches,
        "ValueError",
        "a pipeline needs at least one micro batch",
    ),
)
