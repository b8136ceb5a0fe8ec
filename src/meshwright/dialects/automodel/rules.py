"""What NeMo AutoModel refuses, drops or replaces, where our own rules cannot see it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.dialects.automodel.known import ARGUMENTS, SCHEDULES, TOP
from meshwright.dialects.automodel.parse import is_benchmark, size_of, strategy_of
from meshwright.dialects.automodel.spelling import spell
from meshwright.dialects.dialect import ForeignRule, Look, Problem
from meshwright.errors import closest, some
from meshwright.recipes.foreign.automodel import COMMON, OPTIONS, SIZES
from meshwright.rules.rule import Finding

REFUSED = {
    "ddp": ("tp", "pp", "cp", "ep"),
    "megatron_fsdp": ("pp", "ep"),
}
"""Degrees above 1 that a strategy refuses."""
SCOPES = ("all", "language", "vision", "audio", "multimodal")
NARROW = {"bf16", "bfloat16", "torch.bfloat16"}
TORCH_ADAM = ("torch.optim.adam", "torch.optim.adamw")
STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
IN_NAME = re.compile(r"(?:(?<=[^a-z])|(?<=\d)|^)(tp|pp|cp|ep)(\d+)(?![a-z0-9]*b(?:\b|_))")


def noticed(rule: ForeignRule, look: Look) -> Iterator[Finding]:
    """What a rule finds, at the lines of a file that is still being read."""
    found = rule.broken(look)
    problems: Iterable[Problem] = () if found is None else (found,) if isinstance(found, Problem) else found
    for problem in problems:
        key = problem.key or next((key for key in rule.keys if look.says(key)), "")
        said, files = look.parsed.settings.get(key), look.parsed.files
        yield Finding(
            rule.id,
            problem.severity or rule.severity,
            key,
            problem.message,
            problem.fix,
            file=said.file if said else files[0] if files else "",
            line=said.line if said else 0,
        )


def _size(look: Look, name: str) -> int:
    return size_of(look.parsed.settings, name)


def _whole(look: Look, key: str) -> int | None:
    value = look(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _open(look: Look, *keys: str) -> bool:
    """Whether a value is only known once the job starts."""
    return any(said.unresolved for key in keys if (said := look.parsed.settings.get(key)) is not None)


def _text(look: Look, key: str) -> str:
    value = look(key)
    return value if isinstance(value, str) else ""


def _strategy_unknown(look: Look) -> Problem | None:
    if strategy_of(look.parsed.settings) or _open(look, "distributed.strategy"):
        return None
    name = str(look("distributed.strategy"))
    near = closest(name, tuple(OPTIONS), 1) or ["fsdp2"]
    fix = (spell("distributed.strategy", near[0]),)
    return Problem(f"there is no strategy {name}; there are fsdp2, megatron_fsdp (mfsdp) and ddp", fix)


def _below_one(look: Look) -> Iterator[Problem]:
    for name in (*SIZES, "dp", "dp_replicate"):
        value = look(f"distributed.{name}_size")
        if look.says(f"distributed.{name}_size") and type(value) is int and value < 1:
            meant = "none" if name == "dp" else 1
            yield Problem(
                f"{name}_size={value} is taken as {'unset' if name == 'dp' else 1} without a word",
                (spell(f"distributed.{name}_size", meant),),
                key=f"distributed.{name}_size",
            )


def _pipeline_ignored(look: Look) -> Problem | None:
    said = look.under("distributed.pipeline")
    if not said or _size(look, "pp") > 1 or _open(look, "distributed.pp_size"):
        return None
    if look(said[0]) is None:
        return None
    return Problem("the pipeline block is ignored with pp_size=1", ("remove distributed.pipeline",), key=said[0])


def _pipeline_missing(look: Look) -> Problem | None:
    said = look.under("distributed.pipeline")
    if _size(look, "pp") == 1 or (said and (said != ["distributed.pipeline"] or look(said[0]) is not None)):
        return None
    return Problem(
        f"pp_size={_size(look, 'pp')} needs a pipeline block; an empty one takes the defaults",
        ("distributed.pipeline: {}",),
        key="distributed.pp_size",
    )


def _moe_dropped(look: Look) -> Problem | None:
    said = [key for key in look.under("distributed.moe") if look(key) is not None]
    if not said or _size(look, "ep") > 1 or _open(look, "distributed.ep_size"):
        return None
    return Problem(
        "the moe block is dropped without a word: ep_size=1", (spell("distributed.ep_size", 8),), key=said[0]
    )


def _schedule_raises(look: Look) -> Problem | None:
    key = "distributed.pipeline.pp_schedule"
    if not look.says(key) or _size(look, "pp") == 1 or _open(look, key):
        return None
    name = look(key)
    if name is None:
        if look("distributed.pipeline.pp_schedule_csv") is None:
            return None
        return Problem("a schedule from a CSV file still needs a name in pp_schedule", (spell(key, "1f1b"),), key=key)
    if str(name).lower() in SCHEDULES:
        return None
    meant = {"interleaved_1f1b": "interleaved1f1b", "looped_bfs": "loopedbfs", "zero_bubble": "interleavedzerobubble"}
    instead = meant.get(str(name).lower(), "zbvzerobubble" if str(name).lower() == "v_schedule" else "1f1b")
    return Problem(
        f"torch knows no schedule {name}; the guides that name it are wrong", (spell(key, instead),), key=key
    )


def _compile_ignored(look: Look) -> Problem | None:
    compiles = look("compile.enabled") is True and look("distributed.enable_compile") is not True
    if not compiles or strategy_of(look.parsed.settings) != "fsdp2":
        return None
    return Problem("the compile block is ignored under fsdp2", (spell("distributed.enable_compile", True),))


def _rng_unread(look: Look) -> Problem | None:
    said = look.under("rng")
    if not said:
        return None
    key = "rng.seed" if look.says("rng.seed") else said[0]
    wanted, used = look("rng.seed"), look("seed", 42)
    if wanted is None or wanted == used:
        return Problem(f"no recipe reads the rng block; the run is seeded with seed={used}", (), key=key)
    return Problem(
        f"no recipe reads rng.seed={wanted}: the run is seeded with {used}", (spell("seed", wanted),), key=key
    )


def _block_unread(look: Look) -> Iterator[Problem]:
    blocks: dict[str, str] = {}
    for key in look.parsed.settings:
        top = key.split(".")[0].split("[")[0]
        if top not in TOP and not top.startswith("validation_dataset"):
            blocks.setdefault(top, key)
    for top, key in blocks.items():
        yield _unread(top, key)


MOVED = {
    "slurm": ("there is no slurm block: jobs are submitted with sbatch", ()),
    "autopipeline": ("nothing reads the autopipeline block any more", ("distributed.pipeline: {}",)),
    "parallelizer": ("nothing reads the parallelizer block any more", ("distributed.moe: {}",)),
    "distributed_config": ("nothing reads distributed_config any more", (spell("distributed.strategy", "fsdp2"),)),
    "autocast": ("nothing reads the autocast block any more", (spell("distributed.autocast_dtype", "bfloat16"),)),
}


def _unread(top: str, key: str) -> Problem:
    if top in MOVED:
        message, fix = MOVED[top]
        return Problem(message, fix, key=key)
    near = closest(top, sorted(TOP), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(f"nothing reads {top}{hint}", (f"{near[0]}: …",) if near else (), key=key)


BEFORE = (
    ForeignRule(
        "automodel.strategy-unknown",
        "error",
        ("distributed.strategy",),
        _strategy_unknown,
        symptom="ValueError: unknown strategy, on every rank",
        cause="the section is handed to one of three strategies by this name",
    ),
    ForeignRule(
        "automodel.size-below-one",
        "warning",
        tuple(f"distributed.{name}_size" for name in (*SIZES, "dp", "dp_replicate")),
        _below_one,
        symptom="the run starts with another layout than the file seems to ask for",
        cause="sizes below one are read as one, or as unset, without a message",
    ),
    ForeignRule(
        "automodel.pipeline-ignored",
        "warning",
        ("distributed.pipeline",),
        _pipeline_ignored,
        symptom="a warning in the log; nothing of the block is used",
        cause="the block is read only when there are several stages",
    ),
    ForeignRule(
        "automodel.moe-dropped",
        "warning",
        ("distributed.moe",),
        _moe_dropped,
        symptom="nothing: not even an unknown key is told",
        cause="the block belongs to the parallelizer of experts, which only works with ep_size above 1",
    ),
    ForeignRule(
        "automodel.schedule-raises",
        "error",
        ("distributed.pipeline.pp_schedule",),
        _schedule_raises,
        symptom="an error about the schedule when the stages are built, after the model was loaded",
        cause="names go to torch as they are: case does not matter, underscores do",
    ),
    ForeignRule(
        "automodel.compile-ignored",
        "warning",
        ("compile.enabled",),
        _compile_ignored,
        symptom="the speed of an uncompiled model",
        cause="under fsdp2 layers are compiled one by one, by a switch of the distributed section",
    ),
    ForeignRule(
        "automodel.rng-unread",
        "warning",
        ("rng.seed",),
        _rng_unread,
        symptom="runs with different seeds in this block give the same numbers",
        cause="recipes read the top-level seed, 42 when it is not there",
    ),
    ForeignRule(
        "automodel.block-unread",
        "warning",
        (),
        _block_unread,
        symptom="nothing: unknown blocks at the top pass silently",
        cause="only the sections themselves check their keys",
    ),
)
"""Rules over a file as it is written, before what AutoModel drops is dropped."""


def _not_its_option(look: Look) -> Iterator[Problem]:
    strategy = strategy_of(look.parsed.settings)
    if not strategy:
        return
    of_others = {option for options in OPTIONS.values() for option in options} - {*OPTIONS[strategy], *COMMON}
    told: set[str] = set()
    for key in look.under("distributed"):
        option = key.removeprefix("distributed.").split(".")[0].split("[")[0]
        if option in of_others and option not in told:
            told.add(option)
            owner = next(name for name, options in OPTIONS.items() if option in options)
            yield Problem(
                f"{option} is no option of the {strategy} strategy, whatever its value",
                (spell("distributed.strategy", owner),),
                key=key,
            )


def _strategy_refuses(look: Look) -> Iterator[Problem]:
    strategy = strategy_of(look.parsed.settings)
    names = [name for name in REFUSED.get(strategy, ()) if _size(look, name) > 1]
    if strategy != "fsdp2" and _size(look, "dp_replicate") > 1:
        names.append("dp_replicate")
    if names:
        said = ", ".join(f"{name}_size={_size(look, name)}" for name in names)
        yield Problem(f"the {strategy} strategy refuses {said}", (spell("distributed.strategy", "fsdp2"),))
    if strategy == "megatron_fsdp" and look.recipe.layout.recompute == "selective":
        key = "distributed.activation_checkpointing"
        yield Problem("megatron_fsdp refuses selective activation checkpointing", (spell(key, True),), key=key)


def _checkpointing_skipped(look: Look) -> Problem | None:
    alone = look.case is None and strategy_of(look.parsed.settings) == "megatron_fsdp"  # else our own rule tells
    if not alone or look.recipe.layout.recompute != "full":
        return None
    return Problem("megatron_fsdp skips activation checkpointing", (spell("distributed.strategy", "fsdp2"),))


def _world(look: Look) -> int | None:
    return look.cluster.world if look.cluster is not None else look.parsed.asked.count


def _model_ranks(look: Look) -> int:
    return _size(look, "tp") * _size(look, "cp") * _size(look, "pp")


def _data_ranks(look: Look) -> int | None:
    """Data-parallel ranks, when a file or the number of GPUs tells them."""
    said = _whole(look, "distributed.dp_size")
    if said is not None:
        return said
    world = _world(look)
    return None if world is None or world % _model_ranks(look) else world // _model_ranks(look)


def _mesh(look: Look) -> Problem | None:
    world, ranks = _world(look), _model_ranks(look)
    if world is None or _open(look, *(f"distributed.{name}_size" for name in (*SIZES, "dp"))):
        return None
    said = _whole(look, "distributed.dp_size")
    if said is None:
        if world % ranks == 0:
            return None
        return Problem(f"tp × cp × pp = {ranks} ranks do not divide {world} GPUs", key="distributed.tp_size")
    if said * ranks == world:
        return None
    message = f"dp_size={said} × tp × cp × pp = {said * ranks} ranks, on {world} GPUs"
    outcome = "the others are left out without a word" if said * ranks < world else "there are not as many"
    return Problem(f"{message}: {outcome}", (spell("distributed.dp_size", "none"),), key="distributed.dp_size")


def _expert_mesh(look: Look) -> Problem | None:
    ep, ranks = _size(look, "ep"), _data_ranks(look)
    if ep == 1 or ranks is None or strategy_of(look.parsed.settings) != "fsdp2":
        return None
    borrowed = ranks * _size(look, "cp") * _size(look, "tp")
    if borrowed % ep == 0:
        return None
    fits = max(degree for degree in range(1, ep) if borrowed % degree == 0)
    return Problem(
        f"ep_size={ep} does not divide dp × cp × tp = {borrowed} ranks", (spell("distributed.ep_size", fits),)
    )


def _batch(look: Look) -> Problem | None:
    whole, local = look("step_scheduler.global_batch_size"), look("step_scheduler.local_batch_size")
    ranks = _data_ranks(look) or 1
    if not all(isinstance(value, int) and value > 0 for value in (whole, local)):
        return None
    if (
        _open(look, "step_scheduler.global_batch_size", "step_scheduler.local_batch_size")
        or whole % (local * ranks) == 0
    ):
        return None
    return Problem(
        f"global_batch_size={whole} is not a multiple of local_batch_size × dp = {local} × {ranks}",
        (spell("step_scheduler.global_batch_size", -(-whole // (local * ranks)) * local * ranks),),
        key="step_scheduler.local_batch_size",
    )


def _stages_idle(look: Look) -> Problem | None:
    pp, local = _size(look, "pp"), _whole(look, "step_scheduler.local_batch_size")
    micro = _whole(look, "distributed.pipeline.pp_microbatch_size") or 1
    if pp == 1 or local is None or _open(look, "distributed.pipeline.pp_microbatch_size") or local // micro >= pp:
        return None
    return Problem(
        f"a local batch of {local} makes {local // micro} micro batches of {micro}, fewer than pp_size={pp}",
        (spell("step_scheduler.local_batch_size", pp * micro),),
        key="step_scheduler.local_batch_size",
    )


def _stages_uneven(look: Look) -> Problem | None:
    each, pp = _whole(look, "distributed.pipeline.layers_per_stage"), _size(look, "pp")
    rounding = "distributed.pipeline.round_virtual_stages_to_pp_multiple"
    if look.case is None or each is None or pp == 1 or look(rounding) is not None:
        return None
    stages = -(-int(look.case.layers) // each)
    if stages % pp == 0:
        return None
    return Problem(
        f"layers_per_stage={each} makes {stages} stages, which pp_size={pp} does not divide",
        (spell(rounding, "up"),),
        key="distributed.pipeline.layers_per_stage",
    )


def _stage_format(look: Look) -> Problem | None:
    wide, output = look("distributed.pipeline.dtype"), look("distributed.mp_policy.output_dtype") or "bfloat16"
    if not isinstance(wide, str) or (wide in NARROW) == (str(output) in NARROW):
        return None
    return Problem(
        f"stages send {wide}, while activations are {output}: the receiving buffers do not fit",
        (spell("distributed.pipeline.dtype", output),),
    )


def _async_tensor(look: Look) -> Problem | None:
    asks = look("distributed.enable_async_tensor_parallel") is True and _size(look, "tp") > 1
    if not asks or look("distributed.sequence_parallel") is True:
        return None
    return Problem(
        "asynchronous tensor parallelism needs sequence_parallel", (spell("distributed.sequence_parallel", True),)
    )


def _router_recomputed(look: Look) -> Problem | None:
    if look("distributed.moe.ignore_router_for_ac") is not False or look.recipe.layout.recompute == "none":
        return None
    return Problem(
        "the router is recomputed and may choose other experts the second time",
        (spell("distributed.moe.ignore_router_for_ac", True),),
    )


def _expert_plan(look: Look) -> Iterator[Problem]:
    if look.case is None or not look.case.is_moe or look("model.force_hf") is True:
        return
    fresh = _text(look, "model._target_").endswith("from_config") and look("model.load_base_model") is not True
    if _size(look, "tp") > 1 and fresh:
        yield Problem(
            "tensor parallelism of a mixture of experts needs pretrained weights: from_config is refused",
            (spell("distributed.tp_size", 1),),
            key="distributed.tp_size",
        )
    key = "distributed.moe.wrap_outer_model"
    if look(key) is False and bool(look.case.tied) and look.says(key):
        yield Problem(
            "wrap_outer_model=false is refused where head and embedding are one", (spell(key, True),), key=key
        )


PACKED = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")


def _packs(look: Look) -> bool:
    return any(_whole(look, key) for key in PACKED)


def _context_packed(look: Look) -> Problem | None:
    if _size(look, "cp") == 1 or not _packs(look):
        return None
    kernel, hugging = _text(look, "model.backend.attn"), look("model.force_hf") is True
    if kernel in ("te", "magi", "tilelang") and not hugging:
        return None
    if not kernel and not hugging and (look.case is None or bool(look.case.is_moe)):
        return None  # a model of its own may take te by itself
    why = "a model of transformers packs with cp_size=1 only" if hugging or not kernel else f"{kernel} cannot do it"
    return Problem(f"packing over context ranks: {why}", (spell("packed_sequence.packed_sequence_size", 0),))


def _context_kernel(look: Look) -> Problem | None:
    if _size(look, "cp") == 1:
        return None
    kernel = _text(look, "model.backend.attn")
    case = look.case
    own = case is not None and bool(case.is_moe) and look("model.force_hf") is not True
    plain = case is not None and not case.mamba_heads and not case.delta_v_heads
    if own and plain and kernel in ("sdpa", "flex", "eager"):
        return Problem(
            f"this model's {kernel} attention cannot run over cp_size={_size(look, 'cp')} ranks",
            (spell("model.backend.attn", "te"),),
        )
    asked = _text(look, "model.attn_implementation")
    if not kernel and asked and asked != "sdpa":
        key = "model.attn_implementation"
        return Problem(f"cp_size above 1 replaces {asked} by sdpa", (spell(key, "sdpa"),), key=key, severity="warning")
    return None


def _optimizer_argument(look: Look) -> Iterator[Problem]:
    name = _text(look, "optimizer._target_")
    if name not in ARGUMENTS:
        return
    known = ARGUMENTS[name]
    for key in look.under("optimizer"):
        argument = key.removeprefix("optimizer.").split(".")[0].split("[")[0]
        if argument not in (*known, "_target_", "param_group_overrides"):
            near = closest(argument, known, 1)
            fix = (spell(f"optimizer.{near[0]}", look(key)),) if near else ()
            yield Problem(f"{name} takes no {argument}; it takes {some(known, 6)}", fix, key=key)


def _narrow_moments(look: Look) -> Problem | None:
    stored = str(look("model.torch_dtype") or look("model.dtype") or "").lower()
    told = look.case is not None and look.recipe.goal == "pretrain"  # our own rule says it there
    torch_adam = _text(look, "optimizer._target_").lower() in TORCH_ADAM
    if look.recipe.goal == "peft" or told or not torch_adam or stored not in NARROW:
        return None
    if is_benchmark(look.parsed.settings):
        return None
    key = "model.torch_dtype" if look.says("model.torch_dtype") else "model.dtype"
    return Problem(
        "torch's Adam keeps its moments as the weights are stored, in bf16", (spell(key, "float32"),), key=key
    )


def _experts_replaced(look: Look) -> Problem | None:
    kernel, dispatcher = _text(look, "model.backend.experts"), _text(look, "model.backend.dispatcher")
    if kernel not in ("te", "gmm") or dispatcher != "torch":
        return None
    return Problem(
        f"experts={kernel} needs the deepep or hybridep dispatcher: torch_mm is used instead",
        (spell("model.backend.dispatcher", "deepep"),),
        key="model.backend.experts",
    )


def _te_fp8(look: Look) -> Problem | None:
    asks = [key for key in look.under("model.backend.te_fp8") if look(key) is not None]
    linear, experts = look("model.backend.linear", "te"), look("model.backend.experts")
    if not asks or linear == "te" or experts == "te":
        return None
    return Problem("te_fp8 needs linear or experts of te", (spell("model.backend.linear", "te"),), key=asks[0])


def _warm_up(look: Look) -> Iterator[Problem]:
    if not look.under("lr_scheduler"):
        return
    warm = _whole(look, "lr_scheduler.lr_warmup_steps")
    end = _whole(look, "lr_scheduler.lr_decay_steps") or _whole(look, "step_scheduler.max_steps")
    if warm is not None and end is not None and warm >= end:
        yield Problem(
            f"{warm} warm-up steps, and the decay ends at step {end}",
            (spell("lr_scheduler.lr_warmup_steps", end // 10),),
            key="lr_scheduler.lr_warmup_steps",
        )
    style, key = look("lr_scheduler.lr_decay_style"), "lr_scheduler.lr_decay_style"
    if isinstance(style, str) and style not in STYLES and style.lower() in {name.lower() for name in STYLES}:
        meant = next(name for name in STYLES if name.lower() == style.lower())
        yield Problem(f"there is no decay style {style}: case matters", (spell(key, meant),), key=key)
    elif style == "WSD" and look("lr_scheduler.wsd_decay_steps") is None:
        last = max(1, end // 5) if end else 1000
        yield Problem("WSD needs wsd_decay_steps", (spell("lr_scheduler.wsd_decay_steps", last),), key=key)


def _not_sharded(look: Look) -> Problem | None:
    value = look("distributed.zero_dp_strategy")
    if strategy_of(look.parsed.settings) != "megatron_fsdp" or value == 3 or not isinstance(value, int):
        return None
    return Problem(f"zero_dp_strategy={value} does not shard parameters", (spell("distributed.zero_dp_strategy", 3),))


def _nan_check(look: Look) -> Problem | None:
    key = "distributed.check_for_nan_in_grad"
    if not look.says(key) or look(key) is not True or strategy_of(look.parsed.settings) != "megatron_fsdp":
        return None
    return Problem("nothing is checked any more", (spell("distributed.report_nan_in_param_grad", True),), key=key)


def _packing_unseen(look: Look) -> Problem | None:
    key = "distributed.patch_is_packed_sequence"
    if look(key) is not True or not _packs(look):
        return None
    return Problem("attention is told that nothing is packed, and the data are", (spell(key, False),), key=key)


def _scope(look: Look) -> Problem | None:
    value: Any = look("distributed.activation_checkpointing_scope")
    parts = [str(part).strip().lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    wrong = [part for part in parts if part not in (*SCOPES, "default", "auto", "none", "")]
    if not wrong and not ("all" in parts and len(set(parts)) > 1):
        return None
    key = "distributed.activation_checkpointing_scope"
    message = f"there is no scope {wrong[0]}" if wrong else "the scope all cannot be combined with others"
    return Problem(f"{message}; there are {', '.join(SCOPES)}", (spell(key, "all"),), key=key)


def _name_differs(look: Look) -> Iterator[Problem]:
    for name, degree in IN_NAME.findall(look.parsed.name.lower()):
        key = f"distributed.{name}_size"
        if int(degree) != _size(look, name) and not _open(look, key):
            yield Problem(
                f"the file is named {name}{degree} and says {name}_size={_size(look, name)}",
                (spell(key, int(degree)),),
                key=key,
            )


AFTER = (
    ForeignRule(
        "automodel.pipeline-missing",
        "error",
        ("distributed.pp_size",),
        _pipeline_missing,
        symptom="ValueError before the mesh is built",
        cause="stages without a schedule are taken for a mistake",
    ),
    ForeignRule(
        "automodel.not-its-option",
        "error",
        ("distributed.strategy",),
        _not_its_option,
        symptom="ValueError: unknown options for the strategy",
        cause="all other keys of the section go to the strategy, which knows its own options only",
    ),
    ForeignRule(
        "automodel.strategy-refuses",
        "error",
        ("distributed.strategy",),
        _strategy_refuses,
        symptom="ValueError when the mesh is built",
        cause="plain replicas and Megatron-FSDP have no place for these degrees",
    ),
    ForeignRule(
        "automodel.checkpointing-skipped",
        "warning",
        ("distributed.activation_checkpointing",),
        _checkpointing_skipped,
        symptom="an error line in the log, and the memory of a run without it",
        cause="Megatron-FSDP does not wrap checkpointed layers on several GPUs",
    ),
    ForeignRule(
        "automodel.mesh",
        "error",
        ("distributed.dp_size", "distributed.tp_size"),
        _mesh,
        symptom="ValueError; or, with an explicit dp_size, GPUs that wait outside the mesh",
        cause="an explicit dp_size is taken as it is and never compared with the number of ranks",
    ),
    ForeignRule(
        "automodel.expert-mesh",
        "error",
        ("distributed.ep_size",),
        _expert_mesh,
        symptom="ValueError when the mesh of experts is built",
        cause="experts re-cut all ranks of a stage, those of tp included",
    ),
    ForeignRule(
        "automodel.batch",
        "error",
        ("step_scheduler.local_batch_size", "step_scheduler.global_batch_size"),
        _batch,
        symptom="ValueError from the step scheduler",
        cause="a step is a whole number of local batches on every data-parallel rank",
    ),
    ForeignRule(
        "automodel.stages-idle",
        "error",
        ("step_scheduler.local_batch_size",),
        _stages_idle,
        symptom="an assertion on pp_batch_size and pp_size",
        cause="the local batch, not the global one, is what a pipeline cuts into micro batches",
    ),
    ForeignRule(
        "automodel.stages-uneven",
        "error",
        ("distributed.pipeline.layers_per_stage",),
        _stages_uneven,
        symptom="ValueError when the model is split",
        cause="every rank holds the same number of stages, unless rounding is asked for",
    ),
    ForeignRule(
        "automodel.stage-format",
        "warning",
        ("distributed.pipeline.dtype",),
        _stage_format,
        symptom="a warning, then wrong shapes or numbers between stages",
        cause="stages allocate what they receive by this format; unset, it follows the mixed-precision policy",
    ),
    ForeignRule(
        "automodel.async-tensor-parallel",
        "error",
        ("distributed.enable_async_tensor_parallel",),
        _async_tensor,
        symptom="ValueError in the parallelizer, although the documentation says it is switched on",
        cause="only the gathers of sequence parallelism can be overlapped",
    ),
    ForeignRule(
        "automodel.router-recomputed",
        "warning",
        ("distributed.moe.ignore_router_for_ac",),
        _router_recomputed,
        symptom="a CheckpointError in the backward pass when ties are broken differently",
        cause="guides still show the old default",
    ),
    ForeignRule(
        "automodel.expert-plan",
        "error",
        ("distributed.tp_size", "distributed.moe.wrap_outer_model"),
        _expert_plan,
        symptom="ValueError once the model is built",
        cause="its own mixtures of experts support only part of what the sections can say",
    ),
    ForeignRule(
        "automodel.context-packed",
        "error",
        PACKED,
        _context_packed,
        symptom="ValueError: packed sequences need a context-parallel size of 1",
        cause="only kernels that know where documents end can cut packed ones over ranks",
    ),
    ForeignRule(
        "automodel.context-kernel",
        "error",
        ("model.backend.attn",),
        _context_kernel,
        symptom="an error that names the attention backends for context parallelism",
        cause="models of transformers are moved to sdpa, its own ones need te or magi",
    ),
    ForeignRule(
        "automodel.optimizer-argument",
        "error",
        (),
        _optimizer_argument,
        symptom="TypeError: unexpected keyword argument, after the model was loaded",
        cause="the section goes to the optimizer as it is",
    ),
    ForeignRule(
        "automodel.bf16-moments",
        "warning",
        ("model.torch_dtype", "model.dtype"),
        _narrow_moments,
        symptom="a loss that flattens early",
        cause="there is no second copy in fp32; TE's FusedAdam with master_weights has one",
    ),
    ForeignRule(
        "automodel.experts-replaced",
        "warning",
        ("model.backend.experts",),
        _experts_replaced,
        symptom="one line in the log",
        cause="these kernels expect tokens as DeepEP hands them over",
    ),
    ForeignRule(
        "automodel.te-fp8",
        "error",
        ("model.backend.te_fp8.recipe",),
        _te_fp8,
        symptom="ValueError when the backend is read",
        cause="only layers of Transformer Engine compute in its 8-bit formats",
    ),
    ForeignRule(
        "automodel.learning-rate",
        "error",
        ("lr_scheduler.lr_warmup_steps", "lr_scheduler.lr_decay_style"),
        _warm_up,
        symptom="an assertion without a message, or an exception at the first step after the warm-up",
        cause="the scheduler checks its numbers by assertions and its names exactly",
    ),
    ForeignRule(
        "automodel.not-sharded",
        "warning",
        ("distributed.zero_dp_strategy",),
        _not_sharded,
        symptom="a printed warning, and far more memory per GPU",
        cause="only strategy 3 shards parameters",
    ),
    ForeignRule(
        "automodel.nan-check",
        "warning",
        ("distributed.check_for_nan_in_grad",),
        _nan_check,
        symptom="gradients that are not numbers go unnoticed",
        cause="Megatron-FSDP 0.5.0 took the check out and kept the switch",
    ),
    ForeignRule(
        "automodel.packing-unseen",
        "error",
        ("distributed.patch_is_packed_sequence",),
        _packing_unseen,
        symptom="documents of one sample see each other; the loss looks right",
        cause="the patch saves a synchronisation by answering no whenever transformers asks",
    ),
    ForeignRule(
        "automodel.checkpointing-scope",
        "error",
        ("distributed.activation_checkpointing_scope",),
        _scope,
        symptom="ValueError while the section is read",
        cause="scopes are names of parts of a model, and all is all of them",
    ),
    ForeignRule(
        "automodel.name-differs",
        "warning",
        tuple(f"distributed.{name}_size" for name in SIZES),
        _name_differs,
        symptom="a run of another layout than its name promises",
        cause="the file was copied and only one of the two was changed",
    ),
)

NO_RECIPE = ForeignRule(
    "automodel.no-recipe",
    "error",
    (),
    lambda look: (
        None
        if look.under("recipe")
        else Problem(
            "the automodel command asks for a recipe in the file",
            (spell("recipe", "TrainFinetuneRecipeForNextTokenPrediction"),),
        )
    ),
    symptom="the command ends with a list of examples",
    cause="the class that trains is named in the file, not on the command line",
)
OLD_COMMAND = ForeignRule(
    "automodel.old-command",
    "error",
    (),
    lambda look: Problem("the command takes the file first, without finetune or llm", ("automodel FILE.yaml",)),
    symptom="the command looks for a file of the name finetune",
    cause="guides still show the command of 2025",
)
"""Both hold for the command only: a recipe's own script needs no name."""
