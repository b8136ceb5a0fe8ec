"""What Megatron-Bridge refuses, ignores or replaces, beyond what our own rules see."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from meshwright.dialects.dialect import ForeignRule, Look, Problem
from meshwright.dialects.megatron_bridge import keys, precision, upstream
from meshwright.dialects.megatron_bridge.runner import least_gpus
from meshwright.dialects.megatron_bridge.says import value
from meshwright.dialects.megatron_bridge.spelling import spell
from meshwright.errors import closest
from meshwright.recipes.foreign.megatron_bridge import FINE_TUNING_SETS, PRETRAINING_SETS, SETS

RAISES_PEFT = "qwen3_next_80b_a3b_peft_config"


def _row(look: Look) -> upstream.Upstream | None:
    return upstream.find(look.parsed.name)


def _command(look: Look) -> bool:
    """Whether the runner starts it, which puts some things right by itself."""
    return look.says("--recipe")


def _recipe_key(look: Look) -> str:
    return "--recipe" if _command(look) else "recipe"


def _number(look: Look, key: str) -> int | None:
    found = value(look.parsed.settings, key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


# The recipe and its flags.


def _unknown_recipe(look: Look) -> Problem | None:
    key = _recipe_key(look)
    said = look.parsed.settings.get(key)
    if said is None or said.unresolved or str(said.value).startswith("_") or upstream.find(str(said.value)):
        return None
    name = str(said.value)
    near = closest(name, upstream.names(), 2)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = tuple(spell("--recipe", one) if _command(look) else f"{one}()" for one in near)
    return Problem(f"Megatron-Bridge has no recipe {name}{hint}", fix, key=key)


def _refused_recipe(look: Look) -> Problem | None:
    row = _row(look)
    if row is None or not row.raises:
        return None
    other = next(iter(closest(row.name.replace("peft", "sft"), [n for n in upstream.names() if "_sft_" in n], 1)), "")
    fix = (spell("--recipe", other),) if other else ()
    return Problem(f"{look.parsed.name} exists and raises NotImplementedError", fix, key=_recipe_key(look))


def _no_recipe(look: Look) -> Iterator[Problem]:
    if look.says("--recipe") and look.says("--model"):
        yield Problem("--recipe and --model exclude each other", key="--model")
    said = look.parsed.settings.get("--recipe")
    if said is not None and not said.unresolved and not str(said.value).endswith("_config"):
        mode = look.parsed.settings.get("--mode")
        if mode is None and upstream.find(f"{said.value}_pretrain_config"):
            yield Problem("--model needs --mode", ("--mode pretrain", "--mode sft", "--mode lora"), key="--recipe")


def _unknown_flag(look: Look) -> Iterator[Problem]:
    accepted = {*keys.RUNNER.values(), "--deterministic"}
    for key in look.parsed.settings:
        if key.startswith("-") and key not in accepted:
            instead = keys.INSTEAD.get(key)
            near = closest(key, [*keys.FLAGS, *keys.RUNNER], 1) if instead is None and key.startswith("--") else []
            fix = (instead,) if instead else tuple(near)
            word = key if key.startswith("--") or len(key) < 5 else key[1:]
            yield Problem(f"the runner refuses {word}" + (f"; say {fix[0]}" if fix else ""), fix, key=key)


def _dropped(look: Look) -> Iterator[Problem]:
    for key in look.parsed.settings:
        if key.startswith("+"):
            near = [name for name in closest(key[1:], _names(), 1) if _alike(name, key[1:])]
            fix = (spell(near[0], look(key)),) if near else ()
            yield Problem(f"{key} is accepted and dropped: there is no {key[1:]}", fix, key=key)


def _alike(one: str, other: str) -> bool:
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) >= keys.ALIKE


def _names() -> list[str]:
    sections = [*keys.SECTIONS, "model", "dataset"]
    return [f"{section}.{name}" for section in sections for name in keys.fields(section)]


def _length_replaced(look: Look) -> Problem | None:
    data, effective = _number(look, "dataset.seq_length"), look.recipe.data.seq_length
    if not (_command(look) or look.says("recipe") or data is not None):
        return None
    for key in ("model.seq_length", "dataset.sequence_length"):
        said = _number(look, key)
        if said is None or said == effective:
            continue
        fix = (spell("dataset.seq_length", said),)
        if _command(look) or key != "model.seq_length":
            return Problem(f"{key}={said} is overwritten by dataset.seq_length={effective}", fix, key=key)
        return Problem(f"{key}={said} and dataset.seq_length={effective} must be the same", fix, key=key)
    return None


# Data and checkpoints.


def _dataset_of_benchmark(look: Look) -> Problem | None:
    row = _row(look)
    if row is None or not row.benchmark or not look.says("--dataset"):
        return None
    return Problem("benchmark recipes keep their own data and refuse --dataset", (), key="--dataset")


def _dataset_of_goal(look: Look) -> Problem | None:
    name, row = str(look("--dataset", "")), _row(look)
    if name not in SETS or (row is not None and row.benchmark):
        return None
    goal = look.recipe.goal
    fit = PRETRAINING_SETS if goal == "pretrain" else FINE_TUNING_SETS
    if name in fit:
        return None
    other = "mock" if goal == "pretrain" else "squad"
    return Problem(f"--dataset {name} is not for {goal}", (spell("--dataset", other),), key="--dataset")


def _no_checkpoint(look: Look) -> Problem | None:
    row, goal = _row(look), look.recipe.goal
    started = row is not None or look.parsed.name in ("_sft_common", "_peft_common")
    if goal == "pretrain" or not started or (row is not None and (row.benchmark or row.raises)):
        return None
    settings = look.parsed.settings
    enough = ("checkpoint.pretrained_checkpoint", "checkpoint.load")[: 1 if goal == "peft" else 2]
    given = [key for key in enough if key in settings]
    if any(settings[key].unresolved or settings[key].value for key in given):
        return None
    return Problem(
        f"{goal} starts from no weights: checkpoint.pretrained_checkpoint is not set",
        ("checkpoint.pretrained_checkpoint=/path/to/converted/checkpoint",),
        key="checkpoint.pretrained_checkpoint" if given else _recipe_key(look),
    )


def _null_vocabulary(look: Look) -> Problem | None:
    row = _row(look)
    vocabulary = row.null_vocabulary if row else None
    model = look.case.model if look.case else None
    if row is None or vocabulary is None or model is None:
        return None
    settings = look.parsed.settings
    wanted = _number(look, "model.vocab_size") or model.vocab
    kind = str(value(settings, "tokenizer.tokenizer_type", "NullTokenizer"))
    size = value(settings, "tokenizer.vocab_size", vocabulary)
    off = value(settings, "tokenizer.use_tokenizer_vocab_size", True) is False
    open_ones = [key for key in look.under("tokenizer") if settings[key].unresolved]
    if kind != "NullTokenizer" or off or size == wanted or open_ones or not isinstance(size, int):
        return None
    outside = look.recipe.data.dataset != "mock" and size < wanted
    return Problem(
        f"the recipe's NullTokenizer makes the vocabulary {size} instead of the model's {wanted}"
        + (": tokens of real data lie outside" if outside else ""),
        (
            " ".join(
                (
                    spell("tokenizer.tokenizer_type", "HuggingFaceTokenizer"),
                    spell("tokenizer.tokenizer_model", row.model),
                )
            ),
            spell("tokenizer.use_tokenizer_vocab_size", False),
        ),
        key=_recipe_key(look),
        severity="error" if outside else "warning",
    )


def _packed_twice(look: Look) -> Iterator[Problem]:
    settings, row = look.parsed.settings, _row(look)
    in_batch = value(settings, "dataset.enable_in_batch_packing", bool(row and row.packs_in_batch))
    offline = look.recipe.data.packing
    if in_batch is True and offline and look.says("dataset.enable_offline_packing"):
        yield Problem(
            "samples are packed ahead of time or inside a batch, not both",
            (spell("dataset.enable_in_batch_packing", False),),
            key="dataset.enable_offline_packing",
        )
    elif in_batch is True and look.recipe.layout.micro_batch_size == 1 and _said_packing(look):
        yield Problem(
            "packing inside a batch needs more than one sample in it: train.micro_batch_size is 1",
            (spell("train.micro_batch_size", 2), spell("dataset.enable_in_batch_packing", False)),
            key="train.micro_batch_size" if look.says("train.micro_batch_size") else "dataset.enable_in_batch_packing",
        )


def _said_packing(look: Look) -> bool:
    return look.says("dataset.enable_in_batch_packing") or look.says("train.micro_batch_size")


def _packed_borders(look: Look) -> Problem | None:
    """Graphs that capture packed attention need a fixed number of borders."""
    kernels, settings = look.recipe.kernels, look.parsed.settings
    captured = kernels.cuda_graphs == "transformer_engine" and (
        not kernels.cuda_graph_scope or "attn" in kernels.cuda_graph_scope
    )
    whole = kernels.cuda_graphs in ("full_iteration", "local")
    key = "dataset.offline_packing_specs.pad_cu_seqlens"
    chosen = any(look.says(one) for one in ("model.cuda_graph_impl", "model.cuda_graph_scope", key))
    if not (look.recipe.data.packing and (captured or whole) and chosen) or value(settings, key) is True:
        return None
    return Problem("graphs of packed attention need padded borders", (spell(key, True),), key="model.cuda_graph_impl")


def _energon_batch(look: Look) -> Problem | None:
    inner, outer = _number(look, "dataset.micro_batch_size"), look.recipe.layout.micro_batch_size
    if look.recipe.data.dataset != "energon" and str(look("--dataset", "")) != "energon":
        return None
    row = _row(look)
    before = row.recipe().layout.micro_batch_size if row else outer
    if (before if inner is None else inner) == outer:
        return None
    key = "dataset.micro_batch_size"
    return Problem(
        f"Energon data has a micro batch of its own: it must be {outer} too",
        (spell(key, outer),),
        key=key if inner is not None else "train.micro_batch_size",
    )


# Formats.


def _precision_inside_name(look: Look) -> Iterator[Problem]:
    row = _row(look)
    if row is None or not row.precision_is_a_name or not _command(look) or look.says("mixed_precision"):
        return
    for key in look.under("mixed_precision"):
        if "." in key:
            yield Problem(
                f"mixed_precision is one word in {look.parsed.name}: there is no {key} to set",
                (spell("mixed_precision", "bf16_mixed"),),
                key=key,
            )


def _precision_overwrites(look: Look) -> Iterator[Problem]:
    settings = look.parsed.settings
    if value(settings, "mixed_precision", "") is None or not (_command(look) or look.says("recipe")):
        return  # a saved config lists what was there before and after
    formats = look.recipe.precision
    wanted: dict[str, Any] = {
        "grad_reduce_in_fp32": formats.reduce == "fp32",
        "fp8_param_gather": formats.fp8_gather,
        "first_last_layers_bf16": formats.first_last_bf16,
        "bf16": formats.compute == "bf16",
        "fp16": formats.compute == "fp16",
        "fp8": formats.matmul.startswith(("fp8", "mxfp8")),
        "fp4": formats.matmul == "nvfp4",
    }
    if formats.matmul in precision.RECIPES:
        wanted["fp8_recipe"] = precision.RECIPES[formats.matmul]
    row = _row(look)
    inside = row is not None and not row.precision_is_a_name and not look.says("mixed_precision")
    for key, name in precision.OVERWRITTEN.items():
        if key not in settings or settings[key].unresolved or name not in wanted or not _known_start(look):
            continue
        said, taken = settings[key].value, wanted[name]
        same = bool(said) == taken if isinstance(taken, bool) else str(said) == taken
        if not same:
            fix = (spell(f"mixed_precision.{name}", said),) if inside or not _command(look) else _named(name, said)
            yield Problem(f"{key}={_text(said)} is overwritten by mixed_precision", fix, key=key)


def _known_start(look: Look) -> bool:
    """Whether the precision that wins is known: that of a recipe, or one that is said."""
    return _row(look) is not None or bool(look.under("mixed_precision"))


def _named(name: str, said: Any) -> tuple[str, ...]:
    """The word for mixed_precision that has a field this way."""
    if name == "fp8_recipe" and (matmul := precision.SCALINGS.get(str(said))):
        return tuple(
            spell("mixed_precision", one)
            for one, formats in precision.PRESETS.items()
            if formats.matmul == matmul and formats.compute == "bf16" and one.startswith("bf16")
        )
    if name == "fp8" and said:
        return (spell("mixed_precision", "bf16_with_fp8_current_scaling_mixed"),)
    return ()


def _text(said: Any) -> str:
    return spell("x", said)[2:]


def _two_formats(look: Look) -> Iterator[Problem]:
    for first, second in (("fp8", "fp4"), ("bf16", "fp16")):
        for section in ("mixed_precision", "model", "optimizer"):
            keys_ = f"{section}.{first}", f"{section}.{second}"
            if all(value(look.parsed.settings, key) for key in keys_):
                yield Problem(f"{keys_[0]} and {keys_[1]} exclude each other", (spell(keys_[1], None),), key=keys_[1])


def _mxfp8_buffer(look: Look) -> Problem | None:
    settings, key = look.parsed.settings, "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
    formats = look.recipe.precision
    if formats.matmul != "mxfp8" or not formats.fp8_gather or look.recipe.layout.strategy == "megatron_fsdp":
        return None
    row = _row(look)
    before = row.recipe().precision if row else None
    switched = any(look.says(f"mixed_precision.{name}") for name in ("fp8_recipe", "fp8_param_gather", "fp8_param"))
    ready = before is not None and before.matmul == "mxfp8" and before.fp8_gather
    if value(settings, key) is True or (key not in settings and (ready or not switched)):
        return None
    return Problem("8-bit parameters in mxfp8 are gathered through the gradient buffer", (spell(key, True),), key=key)


DTYPES = ("optimizer.main_grads_dtype", "optimizer.main_params_dtype", "optimizer.exp_avg_dtype")


def _needs_precision_aware(look: Look) -> Iterator[Problem]:
    row, key = _row(look), "optimizer.use_precision_aware_optimizer"
    before = row.recipe().precision if row else None
    ready = before is not None and "bf16" in (before.moments, before.master)
    if value(look.parsed.settings, key, ready) is True or (
        row is not None and not row.precision_is_a_name and key not in look.parsed.settings and ready
    ):
        return
    for dtype in DTYPES:
        said = str(value(look.parsed.settings, dtype, ""))
        if said and "float32" not in said and said not in ("fp32", "None"):
            yield Problem(f"{dtype}={said} needs the precision-aware optimizer", (spell(key, True),), key=dtype)


# Sharding and saving.


def _fsdp_checkpoints(look: Look) -> Problem | None:
    settings, row, key = look.parsed.settings, _row(look), "checkpoint.ckpt_format"
    fsdp = look.recipe.layout.strategy == "megatron_fsdp"
    default = "fsdp_dtensor" if row is not None and "fsdp_dtensor" in row.marks else "torch_dist"
    kind = str(value(settings, key, default))
    saves = [value(settings, one, None if row is not None and row.benchmark else "there") for one in SAVED]
    if not any(saves) or (key in settings and settings[key].unresolved):
        return None
    if fsdp and kind != "fsdp_dtensor":
        place = key if key in settings else "ddp.use_megatron_fsdp" if look.says("ddp.use_megatron_fsdp") else ""
        place = place or ("dist.use_megatron_fsdp" if look.says("dist.use_megatron_fsdp") else _recipe_key(look))
        return Problem(
            f"Megatron-FSDP saves as fsdp_dtensor only, not {kind}", (spell(key, "fsdp_dtensor"),), key=place
        )
    if not fsdp and kind == "fsdp_dtensor":
        return Problem("fsdp_dtensor is for Megatron-FSDP only", (spell(key, "torch_dist"),), key=key)
    return None


SAVED = ("checkpoint.save", "checkpoint.load")


def _fsdp_connections(look: Look) -> Problem | None:
    said = look.parsed.env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if look.recipe.layout.strategy != "megatron_fsdp" or said is None or str(said.value) != "1":
        return None
    return Problem(
        "Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("unset CUDA_DEVICE_MAX_CONNECTIONS",),
        key="CUDA_DEVICE_MAX_CONNECTIONS",
    )


def _fsdp_mapping(look: Look) -> Problem | None:
    if look.recipe.layout.strategy != "megatron_fsdp" or look("dist.use_tp_pp_dp_mapping") is not True:
        return None
    return Problem(
        "Megatron-FSDP keeps the usual order of ranks", (spell("dist.use_tp_pp_dp_mapping", False),),
        key="dist.use_tp_pp_dp_mapping",
    )  # fmt: skip


def _second_fsdp(look: Look) -> Iterator[Problem]:
    """The second version of Megatron-FSDP is for data-parallel runs in bf16 without checkpoints."""
    if look.recipe.layout.strategy != "megatron_fsdp" or look("ddp.megatron_fsdp_version") != 2:
        return
    layout, key = look.recipe.layout, "ddp.megatron_fsdp_version"
    wrong = [name for name in ("tp", "pp", "cp") if getattr(layout, name) > 1]
    wrong += ["vp"] if layout.vp > 1 else []
    wrong += ["8-bit or 4-bit formats"] if look.recipe.precision.matmul != "same" else []
    wrong += ["fp16"] if look.recipe.precision.compute != "bf16" else []
    row = _row(look)
    saves = [value(look.parsed.settings, one, None if row and row.benchmark else "there") for one in SAVED]
    wrong += ["checkpoints"] if any(saves) else []
    if wrong:
        yield Problem(f"version 2 of Megatron-FSDP has no {', '.join(wrong)}", (spell(key, 1),), key=key)


def _async_format(look: Look) -> Problem | None:
    kind = look("checkpoint.ckpt_format")
    if not look.recipe.checkpoint.async_save or kind in (None, "torch_dist", "fsdp_dtensor"):
        return None
    if not look.says("checkpoint.async_save"):
        return None
    return Problem(
        f"checkpoints of the format {kind} are not written in the background",
        (spell("checkpoint.ckpt_format", "torch_dist"), spell("checkpoint.async_save", False)),
        key="checkpoint.async_save",
    )


def _async_nowhere(look: Look) -> Problem | None:
    row, settings = _row(look), look.parsed.settings
    nowhere = value(settings, "checkpoint.save", None if row is not None and row.benchmark else "there") is None
    if look("checkpoint.async_save") is not True or not nowhere:
        return None
    return Problem(
        "async_save needs checkpoint.save", (spell("checkpoint.async_save", False),), key="checkpoint.async_save"
    )


def _kept(look: Look) -> Iterator[Problem]:
    retain, every = _number(look, "checkpoint.save_retain_interval"), look.recipe.checkpoint.save_every
    if retain is None:
        return
    key = "checkpoint.save_retain_interval"
    if look("checkpoint.most_recent_k", -1) not in (None, -1):
        yield Problem(
            "save_retain_interval and most_recent_k exclude each other",
            (spell("checkpoint.most_recent_k", -1),),
            key=key,
        )
    if every and retain % every:
        yield Problem(f"{retain} is not a multiple of save_interval={every}", (spell(key, every),), key=key)


def _hf_beside_fsdp(look: Look) -> Problem | None:
    key = "checkpoint.also_save_hf_checkpoint"
    if look(key) is not True or look("checkpoint.ckpt_format") != "fsdp_dtensor":
        return None
    return Problem("a Hugging Face copy is not written beside fsdp_dtensor", (spell(key, False),), key=key)


# Recompute, pipeline, lengths and schedule.


def _half_recompute(look: Look) -> Problem | None:
    settings = look.parsed.settings
    names = ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers")
    if not any(name in settings for name in names) or any(n in settings and settings[n].unresolved for n in names):
        return None
    row = _row(look)
    before = row.recipe().layout if row else None
    full = before is not None and before.recompute == "full"
    granularity = value(settings, names[0], before.recompute if before else None)
    method = value(settings, names[1], "there" if full else None)
    number = value(settings, names[2], 1 if full else None)
    place = next(name for name in names if name in settings)
    if granularity == "full" and not (method and number):
        missing = " and ".join(name for name, said in zip(names[1:], (method, number), strict=True) if not said)
        fix = " ".join((spell(names[1], "uniform"), spell(names[2], 1)))
        return Problem(f"full recompute needs {missing}", (fix,), key=place)
    if granularity == "selective" and (method or number):
        fix = " ".join((spell(names[1], None), spell(names[2], None)))
        return Problem("selective recompute takes neither recompute_method nor recompute_num_layers", (fix,), key=place)
    return None


def _two_splits(look: Look) -> Problem | None:
    settings = look.parsed.settings
    drawn = value(settings, "model.pipeline_model_parallel_layout")
    ends = [f"model.num_layers_in_{place}_pipeline_stage" for place in ("first", "last")]
    ends = [key for key in ends if value(settings, key)]
    if not drawn or not ends:
        return None
    return Problem(
        "the stages are drawn and their layers are counted; say one of the two", (spell(ends[0], None),), key=ends[0]
    )


def _hierarchy(look: Look) -> Problem | None:
    key = "model.hierarchical_context_parallel_sizes"
    sizes, cp = value(look.parsed.settings, key), look.recipe.layout.cp
    if not isinstance(sizes, list) or not all(isinstance(one, int) for one in sizes) or prod(sizes) == cp:
        return None
    return Problem(f"{key} multiply to {prod(sizes)}, context_parallel_size is {cp}", (), key=key)


def _rings(look: Look) -> Problem | None:
    rings, model = value(look.parsed.settings, "model.cp_comm_type"), look.case.model if look.case else None
    if not isinstance(rings, list) or model is None or look.recipe.layout.cp == 1:
        return None
    layers = look.recipe.architecture.layers or model.num_layers
    if len(rings) == layers:
        return None
    return Problem(f"cp_comm_type lists {len(rings)} layers of {layers}", (), key="model.cp_comm_type")


def _two_lengths(look: Look) -> Iterator[Problem]:
    settings = look.parsed.settings
    for key in ("train.train_samples", "train.num_epochs"):
        if value(settings, key) and value(settings, "train.train_iters", "recipe") is not None:
            yield Problem(f"{key} and train.train_iters exclude each other", ("train.train_iters=null",), key=key)
    if value(settings, "train.num_epochs") and look.recipe.goal == "pretrain":
        yield Problem("epochs are counted on fine-tuning data only", (), key="train.num_epochs")


def _schedule_units(look: Look) -> Iterator[Problem]:
    settings, row = look.parsed.settings, _row(look)
    warmup = value(settings, "scheduler.lr_warmup_iters", row.recipe().schedule.warmup_steps if row else 0)
    samples = [key for key in SAMPLES if value(settings, key)]
    decay = value(settings, "scheduler.lr_decay_iters")
    if samples and (warmup or decay):
        yield Problem(
            f"{samples[0]} counts samples, the rest of the schedule iterations",
            ("scheduler.lr_warmup_iters=0",),
            key=samples[0],
        )
    fraction = "scheduler.lr_warmup_fraction"
    if value(settings, fraction) and warmup:
        yield Problem(
            f"the warm-up is given as a fraction and as {warmup} iterations",
            ("scheduler.lr_warmup_iters=0",),
            key=fraction,
        )
    most, steps = _number(look, "scheduler.max_steps"), look.recipe.train.steps
    if most is not None and most < steps:
        yield Problem(
            f"scheduler.max_steps={most} is less than train_iters={steps}",
            (spell("scheduler.max_steps", steps),),
            key="scheduler.max_steps",
        )


SAMPLES = ("scheduler.lr_decay_samples", "scheduler.lr_warmup_samples", "scheduler.lr_wsd_decay_samples")


def _warmup_capped(look: Look) -> Problem | None:
    row, settings = _row(look), look.parsed.settings
    decay = _number(look, "scheduler.lr_decay_iters")
    warmup = value(settings, "scheduler.lr_warmup_iters", row.recipe().schedule.warmup_steps if row else 0)
    if not decay or not isinstance(warmup, int) or warmup < decay:
        return None
    key = "scheduler.lr_warmup_iters"
    return Problem(
        f"the warm-up of {warmup} iterations is cut: the decay ends at {decay}",
        (spell(key, max(decay // 10, 1)),),
        key=key if look.says(key) else "scheduler.lr_decay_iters",
    )


def _evaluation_twice(look: Look) -> Iterator[Problem]:
    for name in ("eval_interval", "eval_iters"):
        older, newer = (value(look.parsed.settings, f"{section}.{name}") for section in ("train", "validation"))
        if older is not None and newer is not None and older != newer and _command(look):
            yield Problem(
                f"train.{name}={older} wins over validation.{name}={newer}",
                (spell(f"train.{name}", None),),
                key=f"validation.{name}",
            )


def _full_validation(look: Look) -> Iterator[Problem]:
    for key in ("validation.full_validation", "dataset.full_validation"):
        if look(key) is True:
            yield Problem(f"{key} is refused: evaluation is as long as eval_iters", (spell(key, False),), key=key)


def _evaluation_batch(look: Look) -> Problem | None:
    key = "validation.eval_global_batch_size"
    batch = _number(look, key)
    if batch is None or look.cluster is None:
        return None
    layout = look.recipe.layout
    micro = _number(look, "validation.eval_micro_batch_size") or layout.micro_batch_size
    ranks = look.cluster.world // (layout.tp * layout.pp * layout.cp) or 1
    if batch % (micro * ranks) == 0:
        return None
    return Problem(
        f"{key}={batch} is not a multiple of micro batch × data ranks = {micro} × {ranks}",
        (spell(key, micro * ranks),),
        key=key,
    )


def _averaged_per_token(look: Look) -> Problem | None:
    """The loss per token cannot be averaged inside the collective."""
    settings, key = look.parsed.settings, "ddp.average_in_collective"
    tokens = value(settings, "model.calculate_per_token_loss")
    row = _row(look)
    pretraining = row is not None and row.goal == "pretrain" and not row.recipe().train.per_token_loss
    averaged = value(settings, key, pretraining and not (row is not None and row.benchmark))
    if tokens is not True or averaged is not True:
        return None
    return Problem("a loss per token is not averaged in the collective", (spell(key, False),), key=key)


def _unused_backend(look: Look) -> Problem | None:
    key = "model.moe_flex_dispatcher_backend"
    if not (_command(look) or look.says("recipe")) or value(look.parsed.settings, key) is None:
        return None
    if look.recipe.moe.dispatcher not in ("alltoall", "allgather"):
        return None
    return Problem(
        f"{key} is only read by the flex dispatcher",
        (spell("model.moe_token_dispatcher_type", "flex"),),
        key=key,
    )


def _deterministic(look: Look) -> Problem | None:
    key = "model.deterministic_mode"
    if look(key) is not True or look.says("--deterministic"):
        return None
    missing = []
    if "NCCL_ALGO" not in look.parsed.env and not look.says("env_vars.NCCL_ALGO"):
        missing.append("NCCL_ALGO in the environment")
    if look("model.cross_entropy_loss_fusion", True) is not False:
        missing.append("model.cross_entropy_loss_fusion=false")
    if not missing:
        return None
    fix = ("--deterministic",) if _command(look) else ("model.cross_entropy_loss_fusion=false", "NCCL_ALGO=Ring")
    return Problem(f"deterministic_mode needs {' and '.join(missing)}", fix, key=key)


# GPUs that the name speaks of.


def _name_against_launcher(look: Look) -> Problem | None:
    encoded, asked, row = upstream.gpus_in(look.parsed.name), look.parsed.asked, _row(look)
    if row is None or row.benchmark or encoded is None or asked.count is None or asked.said is None:
        return None  # a benchmark's batch is scaled by the runner
    if asked.said is look.parsed.settings.get(_recipe_key(look)) or asked.count % encoded[0] == 0:
        return None
    if asked.count % least_gpus(look.recipe) and least_gpus(look.recipe) > asked.count:
        return None  # our own rule says that the layout does not fit
    return Problem(
        f"the name says {encoded[0]} GPUs, the launcher starts {asked.count}",
        (spell("--recipe", _alias(row)),) if row.aliases else (),
        key="--recipe",
    )


def _alias(row: upstream.Upstream) -> str:
    return row.aliases[0]


def _batch_does_not_scale(look: Look) -> Problem | None:
    row, asked = _row(look), look.parsed.asked
    if row is None or not row.benchmark or not row.gpus or asked.count is None or look.says("train.global_batch_size"):
        return None
    batch = row.recipe().train.global_batch_size
    if batch * asked.count % row.gpus == 0:
        return None
    return Problem(
        f"{batch} samples for {row.gpus} GPUs are no whole number on {asked.count}",
        (spell("train.global_batch_size", max(batch * asked.count // row.gpus, 1)),),
        key="--recipe",
    )


def _rule(name: str, severity: Any, keys_: tuple[str, ...], broken: Any, symptom: str, cause: str) -> ForeignRule:
    return ForeignRule(f"megatron-bridge.{name}", severity, keys_, broken, symptom=symptom, cause=cause)


RULES = (
    _rule(
        "unknown-recipe", "error", ("--recipe", "recipe"), _unknown_recipe,
        "the recipe is not found, before anything is built",
        "recipes are functions: the name must be one that the packages export, to the letter",
    ),
    _rule(
        "refused-recipe", "error", ("--recipe", "recipe"), _refused_recipe,
        "NotImplementedError as soon as the recipe is built",
        "the function is there as a place holder",
    ),
    _rule(
        "recipe-or-model", "error", ("--model", "--recipe"), _no_recipe,
        "the runner prints its usage and ends",
        "a run is chosen by one complete recipe, or by a model and a mode",
    ),
    _rule(
        "unknown-flag", "error", (), _unknown_flag,
        "the runner prints its usage and ends",
        "it takes a short list of flags; everything else is a trailing KEY=VALUE",
    ),
    _rule(
        "dropped-key", "warning", (), _dropped,
        "nothing: the run goes on without it",
        "+ adds the key to a copy of the config, and only known fields are copied back",
    ),
    _rule(
        "length-replaced", "error", ("model.seq_length",), _length_replaced,
        "the run trains on the recipe's length; without the runner, an assertion that both lengths match",
        "after all overrides the length of the data is copied into the model",
    ),
    _rule(
        "benchmark-data", "error", ("--dataset",), _dataset_of_benchmark,
        "the runner refuses --dataset",
        "benchmark recipes own their data set",
    ),
    _rule(
        "data-of-another-goal", "error", ("--dataset",), _dataset_of_goal,
        "the runner refuses the data set for this mode",
        "made-up and indexed data are for pretraining, presets of conversations for fine-tuning",
    ),
    _rule(
        "no-checkpoint", "error", ("checkpoint.pretrained_checkpoint",), _no_checkpoint,
        "an assertion that a pretrained checkpoint is needed",
        "no fine-tuning recipe names weights: they are converted first and then named",
    ),
    _rule(
        "null-vocabulary", "warning", ("--recipe", "recipe"), _null_vocabulary,
        "parameter counts differ from the published model, and tokens of real data are out of range",
        "a placeholder tokenizer decides the size of the embedding",
    ),
    _rule(
        "packed-twice", "error", ("dataset.enable_offline_packing", "dataset.enable_in_batch_packing"), _packed_twice,
        "ValueError from validate",
        "packing ahead of time makes samples of one each; packing in a batch needs several",
    ),
    _rule(
        "packed-borders", "error", ("model.cuda_graph_impl",), _packed_borders,
        "ValueError from validate: packed attention graphs need padded cu_seqlens",
        "a captured kernel cannot take another number of documents",
    ),
    _rule(
        "energon-batch", "error", ("dataset.micro_batch_size", "train.micro_batch_size"), _energon_batch,
        "ValueError from validate: both micro batches must match",
        "the loader builds batches itself, by its own setting",
    ),
    _rule(
        "precision-is-a-word", "error", (), _precision_inside_name,
        "could not override mixed_precision",
        "recipes hold either the name of a precision or an object with fields",
    ),
    _rule(
        "precision-overwrites", "warning", tuple(precision.OVERWRITTEN), _precision_overwrites,
        "a line in the debug log, and the other value in use",
        "mixed_precision is applied to model, optimizer and ddp after all overrides",
    ),
    _rule(
        "two-formats", "error", (), _two_formats,
        "ValueError or an assertion before the model is built",
        "one format at a time",
    ),
    _rule(
        "mxfp8-buffer", "error", ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",), _mxfp8_buffer,
        "an assertion from mixed_precision",
        "parameters in mxfp8 have no contiguous buffer of their own",
    ),
    _rule(
        "precision-aware", "error", DTYPES, _needs_precision_aware,
        "an assertion from the optimizer's config",
        "only the precision-aware optimizer keeps its state in other formats",
    ),
    _rule(
        "fsdp-checkpoints", "error", ("checkpoint.ckpt_format",), _fsdp_checkpoints,
        "an assertion about the checkpoint format",
        "shards of Megatron-FSDP are saved as they are; its recipes still ask for torch_dist",
    ),
    _rule(
        "fsdp-connections", "error", ("CUDA_DEVICE_MAX_CONNECTIONS",), _fsdp_connections,
        "an assertion about CUDA_DEVICE_MAX_CONNECTIONS",
        "one connection would run gathers and matrix products one after the other",
    ),
    _rule(
        "fsdp-order", "error", ("dist.use_tp_pp_dp_mapping",), _fsdp_mapping,
        "an assertion from validate",
        "its device mesh expects data ranks inside pipeline ranks",
    ),
    _rule(
        "fsdp-second-version", "error", ("ddp.megatron_fsdp_version",), _second_fsdp,
        "ValueError from validate",
        "the second version is an experiment for data-parallel runs",
    ),
    _rule(
        "async-format", "error", ("checkpoint.async_save",), _async_format,
        "an assertion about async_save",
        "only distributed formats are written in the background",
    ),
    _rule(
        "async-nowhere", "error", ("checkpoint.async_save",), _async_nowhere,
        "an assertion that save is set",
        "there is no folder to save to",
    ),
    _rule(
        "kept-checkpoints", "error", ("checkpoint.save_retain_interval",), _kept,
        "ValueError from the checkpoint section",
        "old checkpoints are thinned out in one way only",
    ),
    _rule(
        "hf-beside-fsdp", "error", ("checkpoint.also_save_hf_checkpoint",), _hf_beside_fsdp,
        "ValueError from the checkpoint section",
        "weights are exported from torch_dist checkpoints only",
    ),
    _rule(
        "half-recompute", "error", ("model.recompute_granularity",), _half_recompute,
        "ValueError when the model's config is finished",
        "full recompute is told how and how much, selective recompute which modules",
    ),
    _rule(
        "two-splits", "error", ("model.pipeline_model_parallel_layout",), _two_splits,
        "ValueError when the model's config is finished",
        "either the stages are drawn or their layers are counted",
    ),
    _rule(
        "hierarchy", "error", ("model.hierarchical_context_parallel_sizes",), _hierarchy,
        "an assertion that the sizes multiply to the context-parallel size",
        "each rank has one place in every level",
    ),
    _rule(
        "rings", "error", ("model.cp_comm_type",), _rings,
        "an assertion about the length of cp_comm_type",
        "a list has one entry per layer",
    ),
    _rule(
        "two-lengths", "error", ("train.train_samples", "train.num_epochs"), _two_lengths,
        "an assertion that only one of them is set",
        "every recipe sets train_iters; another measure of the run needs it gone",
    ),
    _rule(
        "schedule-units", "error", ("scheduler.lr_warmup_fraction", *SAMPLES), _schedule_units,
        "an assertion from the scheduler section",
        "a schedule counts iterations or samples, and recipes bring a warm-up in iterations",
    ),
    _rule(
        "warmup-capped", "warning", ("scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"), _warmup_capped,
        "a warning, and a warm-up that ends one sample before the decay",
        "the warm-up was made for a longer run",
    ),
    _rule(
        "evaluation-twice", "warning", ("validation.eval_iters", "validation.eval_interval"), _evaluation_twice,
        "a deprecation warning, and the older value in use",
        "the fields moved from train to validation, and the old ones are copied over",
    ),
    _rule(
        "full-validation", "error", ("validation.full_validation",), _full_validation,
        "ValueError from validate",
        "evaluation runs a fixed number of batches",
    ),
    _rule(
        "evaluation-batch", "error", ("validation.eval_global_batch_size",), _evaluation_batch,
        "an assertion about eval_global_batch_size",
        "every data rank evaluates the same whole number of micro batches",
    ),
    _rule(
        "averaged-per-token", "error", ("ddp.average_in_collective",), _averaged_per_token,
        "an assertion: cannot average in collective when calculating per-token loss",
        "ranks have different numbers of tokens, and pretraining recipes average over ranks",
    ),
    _rule(
        "unused-backend", "warning", ("model.moe_flex_dispatcher_backend",), _unused_backend,
        "the other dispatcher runs",
        "a backend belongs to the flex dispatcher",
    ),
    _rule(
        "deterministic", "error", ("model.deterministic_mode",), _deterministic,
        "an assertion about NCCL_ALGO or the fused cross-entropy",
        "repeatable sums need one algorithm, and the fused loss is not repeatable",
    ),
    _rule(
        "name-against-launcher", "warning", ("--recipe",), _name_against_launcher,
        "runs, with another batch per GPU than the recipe was made for",
        "the number in a recipe's name is the number of GPUs its layout and batch were chosen for",
    ),
    _rule(
        "batch-does-not-scale", "error", ("--recipe",), _batch_does_not_scale,
        "the runner refuses to scale the global batch",
        "benchmarks keep their samples per GPU on any number of GPUs",
    ),
)  # fmt: skip
