"""Finds the recipe and the GPUs that a log is about, as the estimate needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import ceil, gcd, isclose, prod
from statistics import median
from typing import Any, NamedTuple

import msgspec

from meshwright import clusters, frameworks, models
from meshwright.clusters import Cluster
from meshwright.doctor.check_logged import implied_length
from meshwright.doctor.formats.printed_config import config_content
from meshwright.doctor.run import ENGINE, FieldDifference, Run
from meshwright.errors import InputError
from meshwright.frameworks.schedule_units import length_keys, with_lengths
from meshwright.frameworks.to_recipe import ImportedRecipe, complete
from meshwright.frameworks.to_recipe import import_recipe as read_framework
from meshwright.models import ModelSpec
from meshwright.planner import Question, case_of, plan_fixed
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import composite_keys, config_keys
from meshwright.recipes.types import Goal, Recipe, field_value, recipe_fields

NO_GPUS = "the log does not name the GPUs"
CLOSE = 0.02  # error of a batch size that is computed from tokens per second and step times
ROUNDED = 1e-4  # relative error of a number that a log prints
ANY_BATCH = 32  # samples up to which every number is usual
ODD_PARTS = (1, 3, 5, 7, 9, 15)  # of usual batch sizes: 1024 = 1 × 2^10, 384 = 3 × 2^7
LEAST_STEPS = 5
SAME_BLOCKS = 0.05  # relative difference of block parameters of one model: with and without prediction heads
FP32_BYTES = 4
VOCABULARY = "architecture.vocab"
NAME_IT = "add --recipe NAME, or --model FOLDER with its config.json"


def case_of_run(
    run: Run, gpus: str | Cluster | None = None, overrides: tuple[str, ...] = ()
) -> tuple[Case | None, str]:
    """Return the case of a run from its log and a note; None and what is missing if the log is not enough."""
    if run.header.recipe is not None:
        recipe = override.apply(run.header.recipe, overrides)
        requested = _cluster(run, gpus) if gpus else None
        with suppress(InputError):  # a model from a folder on another machine, or a GPU of another version
            return case_of(
                recipe, model_of(recipe), requested or clusters.cluster(run.header.gpus or recipe.cluster)
            ), ""
        missing = f"{recipe.model} on {gpus or run.header.gpus or recipe.cluster}"
        return None, f"no estimate: {missing} is not known here; add --recipe NAME{_gpus_option(run, gpus)}"
    cluster = _cluster(run, gpus)
    if run.header.states_settings:
        return _from_settings(run, cluster, overrides)
    if run.header.recipe_name and index.is_known(run.header.recipe_name):
        recipe = override.apply(index.load(run.header.recipe_name), overrides)
        note = "the log names its recipe but not its overrides: the estimate is for the recipe as shipped"
        if cluster is None:
            return None, _no_gpus(run)
        return case_of(recipe, model_of(recipe), cluster), note
    if run.header.model and cluster is not None:
        return _from_name(run, cluster, overrides)
    if cluster is None and (run.header.model or run.header.recipe_name):
        return None, _no_gpus(run)
    return None, _no_recipe(run, gpus)


def _no_recipe(run: Run, gpus: str | Cluster | None) -> str:
    return f"no estimate: the log does not name the model; add --recipe NAME{_gpus_option(run, gpus)}"


def _gpus_option(run: Run, gpus: str | Cluster | None) -> str:
    """Return the option that is missing besides the recipe: none if the GPUs are typed or in the log."""
    return "" if gpus else run.header.gpus_option


def logged_model(run: Run) -> ModelSpec | None:
    """Return the model that the log itself names or describes; None if it has none that is known here."""
    header = run.header
    with suppress(InputError):  # a folder of another machine, or arguments that do not describe a model
        if header.recipe is not None:
            return None if header.tiny else model_of(header.recipe)
        if header.states_settings:
            return _read_settings(run, ()).model
        if header.recipe_name and index.is_known(header.recipe_name):
            return model_of(index.load(header.recipe_name))
        if header.model:
            return models.find(header.model)
    return None


def contradicting_model(run: Run, other: ModelSpec) -> str:
    """Return how a model contradicts the one that the log names; empty if it does not."""
    logged = logged_model(run)
    whole = not missing_arguments(run)  # otherwise the width of its blocks may be a default
    if logged is None or same_model(logged, other, whole):
        return ""
    named = "" if run.header.states_settings else f"{logged.name}, "
    return f"{run.file} is of {named}{described(logged)}, not of {other.name}, {described(other)}"


def same_model(one: ModelSpec, other: ModelSpec, whole: bool = True) -> bool:
    """Return whether two models have the same blocks; `whole`: the width of both is known too."""
    blocks = (_block_parameters(one), _block_parameters(other))
    return _shape(one) == _shape(other) and (not whole or isclose(*blocks, rel_tol=SAME_BLOCKS))


def _shape(model: ModelSpec) -> tuple[int, int]:
    return model.num_layers, model.hidden


def _block_parameters(model: ModelSpec) -> int:
    """Return the parameters without the vocabulary's, which logs state padded or not at all."""
    return model.params.total - model.params.embedding - model.params.head


def described(model: ModelSpec) -> str:
    return f"a model of {model.num_layers} layers and {model.params.total / 1e9:.2f} B parameters"


def logged_overrides(run: Run, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Return what a log states as overrides, followed by the user's, which take precedence.

    The highest logged learning rate is only a guess of the peak: it does not replace that of the user's file.
    """
    stated = {**_stated_arguments(run), **run.header.overrides}
    if not {"optimizer.lr"} & {*stated, *run.header.file_fields} and (rate := run.peak_rate):
        stated["optimizer.lr"] = rate
    if vocab := _logged_vocabulary(run):
        stated[VOCABULARY] = vocab
    keys = _keys(extra)
    return (*(format_override(key, value) for key, value in stated.items() if key not in keys), *extra)


def _logged_vocabulary(run: Run) -> int | None:
    """Return the vocabulary of an argument dump for a script that leaves it to the tokenizer; None if it states one."""
    flags = {one.split()[0] for one in run.header.arguments}
    if not run.header.settings or {"vocab_size", "padded_vocab_size"} & {*run.header.settings}:
        return None
    model = logged_model(run) if {"--padded-vocab-size", "--vocab-size"} & flags else None
    return None if model is None else model.vocab


def stated_fields(run: Run, extra: tuple[str, ...]) -> frozenset[str] | None:
    """Return the recipe fields that a log or the user states; None if the log has its whole recipe."""
    if run.header.recipe is not None or run.header.recipe_name:
        return None
    rate = {"optimizer.lr"} if run.peak_rate else set[str]()
    return frozenset({*_stated_arguments(run), *run.header.overrides, *_keys(extra), *rate})


def assumptions(run: Run, case: Case, extra: tuple[str, ...], reduced: str | None = None) -> Iterator[str]:
    """Yield what the estimate takes from the recipe because the log does not state it.

    `reduced` are the recipe's own degrees, if the GPUs cannot hold them.
    """
    keys, layout = _keys(extra) | run.header.file_fields, case.recipe.layout
    if run.header.arguments and (missing := missing_arguments(run)):
        yield f"{LACKS} {', '.join(missing)}: the estimate assumes the recipe's; overrides change it"
    if run.header.states_settings or run.header.recipe is not None:
        return
    if not keys & {"data.seq_length"} and not _states_length(run):
        yield (
            f"the log does not state the sequence length: the estimate assumes {case.seq_length}; "
            "data.seq_length=N changes it"
        )
    model_ranks = case.world // run.header.data_ranks if run.header.data_ranks else None
    if model_ranks not in (None, layout.tp * layout.pp):
        ranks = run.header.data_ranks
        of_batch = run.kind == "transformers"
        shown = "batch sizes are those of" if of_batch else "tokens per second per GPU are divided by"
        yield (
            f"the log's {shown} {ranks} rank{'s' * (ranks != 1)} (dp × cp), so tp × pp "
            f"is {model_ranks} on {case.world} GPUs; the estimate assumes tp={layout.tp}, pp={layout.pp}: layout.tp "
            "and layout.pp change it"
        )
    elif not run.header.states_layout and not (run.header.file or keys & {f"layout.{name}" for name in DEGREES}):
        degrees = ", ".join(f"{name}={getattr(layout, name)}" for name in DEGREES)
        whose = "the recipe's " if reduced is None else ""
        if run.kind == "transformers" and {*(getattr(layout, name) for name in DEGREES)} == {1}:
            degrees, whose = f"data parallelism over {case.world} GPU{'s' * (case.world != 1)} ({case.strategy})", ""
        why = (
            ""
            if reduced is None
            else f", because the recipe's {reduced} do not divide {case.world} GPU{'s' * (case.world != 1)}"
        )
        yield f"the log does not state the layout: the estimate assumes {whose}{degrees}{why}; overrides change it"
    stated = keys | run.header.overrides.keys()
    if "train.global_batch_size" not in stated and run.kind != "megatron":
        batch = case.recipe.train.global_batch_size
        found = inferred_batch(run, case.world, case.recipe.data.seq_length)
        if found is not None and found.plausible == batch:
            yield (
                f"the log does not state the global batch size: {batch} is assumed, computed from "
                f"{source_of_batch(run, case.world)} ({found.samples:.4g} samples)"
            )
            return
        source = source_of_batch(run, case.world)
        unusual = f" ({source} fit {found.samples:.4g}, no usual number)" if found else ""
        unknown = f"the log does not state the global batch size: it is unknown{unusual}"
        timed = any(one.seconds for one in run.steps)
        tokens = any(one.tokens_per_s or one.all_tokens_per_s for one in run.steps)
        if tokens or not timed or run.header.logged_tokens(case.world):
            yield f"{unknown}; the estimate assumes {batch}, the recipe's; train.global_batch_size=N changes it"
        else:
            yield (
                f"{unknown}, and the step time is not compared with an estimate; train.global_batch_size=N compares "
                f"it (the recipe has {batch})"
            )


def unstated_layout(run: Run, case: Case, extra: tuple[str, ...]) -> str:
    """Return what is assumed besides the degrees in Megatron's line of them; empty if the log or a file states more."""
    layout, stated = case.recipe.layout, _keys(extra) | run.header.overrides.keys()
    if run.kind != "megatron" or not run.header.states_layout or run.header.states_settings or run.header.file:
        return ""
    names = ("cp", "micro_batch_size", *(("vp",) if layout.pp > 1 else ()), "recompute")
    assumed = [f"layout.{name}={getattr(layout, name)}" for name in names if f"layout.{name}" not in stated]
    return f"the log does not state {' '.join(assumed)}: the estimate assumes it; overrides change it" * bool(assumed)


def file_differences(run: Run, recipe: Recipe, extra: tuple[str, ...]) -> tuple[FieldDifference, ...]:
    """Return the settings whose values in a log and in the user's file differ, of all that both of them state.

    `recipe` is the file's, and a setting in `extra` is the user's own.
    """
    logged = {key: value for key, value in _logged_values(run).items() if key not in _keys(extra)}
    stated = [key for key in (*COMPARED, *recipe_fields()) if key in run.header.file_fields or key in COMPARED]
    if "layout.micro_batch_size" not in run.header.file_fields and "layout.micro_batch_size" in logged:
        stated = [key for key in stated if key != "train.global_batch_size"]  # the file's is made of an assumed one
    pairs = [(key, logged[key], field_value(recipe, key)) for key in dict.fromkeys(stated) if key in logged]
    return tuple(FieldDifference(*pair) for pair in pairs if pair[2] is not None and not _equal(*pair[1:]))


def text_of_differences(run: Run) -> str:
    """Return the settings that a log and the user's file state differently, as one clause; empty if there are none."""
    found, file = run.header.file_differences, run.header.file
    logged = ", ".join(format_override(one.name, one.logged) for one in found)
    theirs = ", ".join(format_override(one.name, one.stated) for one in found)
    return f"the log contradicts {file}: {logged} in the log, {theirs} in {file}" if found else ""


def _logged_values(run: Run) -> dict[str, Any]:
    """Return the values of our fields that a log states; its own recipe in a log of ours."""
    header = run.header
    if header.recipe is not None:
        own = header.recipe
        return {} if header.tiny else {key: field_value(own, key) for key in recipe_fields() if key not in MODEL}
    steps = {"train.steps": header.total_steps} if header.total_steps and run.kind != "transformers" else {}
    length = {"data.seq_length": header.seq_length} if header.seq_length else {}
    return {**steps, **length, **_stated_arguments(run, with_unset=bool(header.framework)), **header.overrides}


def _equal(logged: Any, stated: Any) -> bool:
    """Return whether two values are the same; numbers may be rounded in a log, and -1 means the rest of the GPUs."""
    if isinstance(logged, (int, float)) and isinstance(stated, (int, float)):
        return stated == -1 or isclose(logged, stated, rel_tol=ROUNDED)
    return bool(logged == stated)


def closest_recipe(case: Case) -> str:
    """Return the name of the recipe that a case is built of if it is one of another model; else empty."""
    name = case.recipe.name
    return name if index.is_known(name) and model_of(index.load(name)).name != case.model.name else ""


def recipe_of(case: Case) -> str:
    """Return the name of the recipe that a case is built of; empty if the model has none and a similar one is used."""
    return "" if closest_recipe(case) else case.recipe.name


DATA_PARALLEL: Mapping[str, Any] = {
    "layout.tp": 1,
    "layout.sp": False,
    "layout.pp": 1,
    "layout.vp": 1,
    "layout.pp_schedule": "1f1b",
    "layout.stage_layers": (),
    "layout.cp": 1,
    "layout.ep": 1,
}


def trainer_layout(run: Run, case: Case, stated: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides that make a layout data parallel, for a log of the Trainer without its file; else none."""
    if run.kind != "transformers" or run.header.file:
        return ()
    values = {key: value for key, value in DATA_PARALLEL.items() if key not in _keys(stated)}
    return tuple(format_override(key, value) for key, value in values.items() if field_value(case.recipe, key) != value)


def degrees_that_divide(case: Case, stated: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides that reduce a recipe's degrees to ones that divide the GPUs, unless log or user state them."""
    layout, left, keys = case.recipe.layout, int(case.world), _keys(stated)
    if left % (layout.tp * layout.pp * layout.cp) == 0:
        return ()
    found: dict[str, Any] = {}
    for name in ("tp", "pp", "cp", "ep"):
        degree = getattr(layout, name)
        most = degree if f"layout.{name}" in keys else gcd(degree, left)
        found |= {f"layout.{name}": most} if most != degree else {}
        left = left // most if name != "ep" else left
    if found.get("layout.tp") == 1:
        found["layout.sp"] = False
    if found.get("layout.pp") == 1:
        found |= {"layout.vp": 1, "layout.pp_schedule": "1f1b", "layout.stage_layers": ()}
    return tuple(format_override(key, value) for key, value in found.items() if key not in keys)


ADAPTERS = 0.5  # of a model's parameters: fewer trainable ones are those of adapters


def logged_goal(run: Run, target: str) -> tuple[Goal | None, str]:
    """Return the goal that a log implies for the model that the user names, and a note; None if it implies none.

    A log with far fewer trainable parameters than the model has is of adapters: with FSDP1 the Trainer counts those of
    one rank's shards. The front ends of the Trainer fine-tune.
    """
    trained, ranks = run.header.trainable_parameters, run.header.data_ranks or run.header.world or 1
    if run.header.file or index.is_known(target):
        return None, ""
    if trained is None:
        name = run.header.front_end
        note = f"the log is of {name}, which fine-tunes: --goal sft is assumed; --goal peft or qlora for adapters"
        return ("sft", note) if name else (None, "")
    with suppress(InputError):  # what the name means is reported by the estimate
        total = models.find(target).params.total
        if trained * ranks < ADAPTERS * total:
            share = f"{trained:,} trainable parameters of {total / 1e9:.3g}B"
            return "peft", f"the log states {share}: adapters are assumed, --goal peft; --goal sft for other training"
    return None, ""


HOW_IT_RUNS = ("layout.", "kernels.", "precision.")
MODEL = frozenset(key for key in recipe_fields() if key.startswith("architecture."))
DEGREES = ("tp", "pp", "cp", "ep")
COMPARED = (*(f"layout.{name}" for name in DEGREES), "train.global_batch_size")


def with_all_gpus(run: Run, case: Case) -> Run:
    """Return the run with the case's number of GPUs, and speeds per GPU, if its log has speeds per data rank only."""
    if not run.header.data_ranks or run.header.world is not None:
        return run
    world = int(case.world)
    steps = tuple(
        msgspec.structs.replace(one, tokens_per_s=one.all_tokens_per_s / world) if one.all_tokens_per_s else one
        for one in run.steps
    )
    return msgspec.structs.replace(run, steps=steps, header=msgspec.structs.replace(run.header, world=world))


def with_implied_length(run: Run, case: Case, extra: tuple[str, ...]) -> tuple[Run, str]:
    """Return the run with the sequence length that its TFLOP/s imply, and a note; unchanged if it is stated."""
    known = _keys(extra) | run.header.file_fields
    if run.header.recipe is not None or "data.seq_length" in known or _states_length(run):
        return run, ""
    found = implied_length(run, case)
    if found is None:
        return run, ""
    header = msgspec.structs.replace(
        run.header, seq_length=found.tokens, overrides={**run.header.overrides, "data.seq_length": found.tokens}
    )
    note = f"the log does not state the sequence length: {found.tokens} is computed from {found.source}"
    return msgspec.structs.replace(run, header=header), note


def with_implied_micro_batch(run: Run, case: Case, extra: tuple[str, ...]) -> tuple[Run, str]:
    """Return the run with the micro batch that a failed allocation of the logits implies, and a note.

    The loss converts logits to fp32: a request there is tokens × vocabulary × 4 bytes. Samples may be shorter than the
    sequence length, so that it is the least number of them. The log's own batch and the user's count more, and so does
    a larger one of the file.
    """
    known = _keys(extra) | run.header.overrides.keys()
    wanted = [one.memory.wanted for one in run.faults if one.memory is not None and one.where == "logits"]
    size = max((one for one in wanted if one), default=0.0)
    layout, vocab = case.recipe.layout, case.model.vocab
    is_split = layout.tp * layout.cp != 1 or not vocab
    if not size or run.header.recipe is not None or "layout.micro_batch_size" in known or is_split:
        return run, ""
    tokens = size * 2**30 / (vocab * FP32_BYTES)
    samples = ceil(tokens / case.recipe.data.seq_length * (1 - CLOSE))
    before = layout.micro_batch_size
    if samples <= before:
        return run, ""
    implied = {"layout.micro_batch_size": samples}
    if "train.global_batch_size" not in known:
        implied["train.global_batch_size"] = case.recipe.train.global_batch_size // before * samples
    header = msgspec.structs.replace(run.header, overrides={**run.header.overrides, **implied})
    note = (
        f"layout.micro_batch_size={samples} is computed from the failed request in the loss: {size:.2f} GiB are "
        f"{round(tokens, -2):,.0f} tokens of {vocab:,} logits in fp32, and samples have up to "
        f"{case.recipe.data.seq_length:,} tokens; layout.micro_batch_size=N changes it"
    )
    return msgspec.structs.replace(run, header=header), note


def _states_length(run: Run) -> bool:
    return run.header.seq_length is not None or "data.seq_length" in run.header.overrides


class InferredBatch(NamedTuple):
    """The samples per step that a log's speeds imply, and the usual batch size that is close to it, if one is."""

    samples: float
    plausible: int | None


def inferred_batch(run: Run, world: int, length: int) -> InferredBatch | None:
    """Return the samples per step that a log's tokens, or tokens per second and step times, imply; None without."""
    if "train.global_batch_size" in run.header.overrides:
        return None
    rates = [(one.all_tokens_per_s or (one.tokens_per_s or 0.0) * world, one.seconds or 0.0) for one in run.steps[1:]]
    tokens = [rate * seconds for rate, seconds in rates if rate and seconds]
    logged = run.header.logged_tokens(world)
    if logged is None and len(tokens) < LEAST_STEPS:
        return None
    samples = (logged or median(tokens)) / length
    return InferredBatch(samples, _usual_batch(samples, _data_ranks(run, world)))


def source_of_batch(run: Run, world: int) -> str:
    """Return which figures of a log imply its batch."""
    tokens = run.header.logged_tokens(world)
    return "tokens per second and step times" if tokens is None else f"{tokens:,} tokens per step"


def _data_ranks(run: Run, world: int) -> int:
    """Return the number of which the batch is a multiple: the data-parallel ranks, if the log states its layout."""
    if not run.header.states_layout:
        return 1
    degrees = [int(run.header.overrides.get(f"layout.{name}", 1)) for name in ("tp", "pp", "cp")]
    return max(1, world // max(1, prod(degrees)))


def _usual_batch(samples: float, multiple_of: int) -> int | None:
    """Return the usual batch size closest to some samples; None if none is within the error of the log's figures."""
    if samples < 1 - CLOSE:
        return None
    nearest = max(1, round(samples))
    usual = {odd << shift for odd in ODD_PARTS for shift in range(24)}
    digits = 10 ** max(0, len(str(nearest)) - 2)
    usual |= {nearest} if nearest <= ANY_BATCH else {round(nearest / digits) * digits}  # 1200, 480
    close = [one for one in usual if one % multiple_of == 0 and abs(samples / one - 1) <= CLOSE]
    return min(close, key=lambda one: abs(samples / one - 1), default=None)


def _stated_arguments(run: Run, *, with_unset: bool = True) -> dict[str, Any]:
    """Return the fields that Megatron's arguments or config set; layout and kernels as a whole, as off is no flag.

    Without `with_unset`, only those of its lines: a recipe of ours has kernels that Megatron has no flag for.
    """
    if not run.header.states_settings:
        return {}
    try:
        imported = _read_settings(run, ())
    except InputError:
        return {}
    settings, keys = imported.parsed.settings, imported.mapped.source_keys
    if run.header.config:
        stated = {key for key in recipe_fields() if key in keys or (with_unset and key.startswith(HOW_IT_RUNS))}
        return {key: field_value(imported.recipe, key) for key in recipe_fields() if key in stated - MODEL}
    recipe, lengths = imported.recipe, length_keys("megatron_lm", settings)
    batch = run.header.overrides.get("train.global_batch_size")
    if "global_batch_size" in settings or batch:
        recipe = override.change(recipe, {"train.global_batch_size": batch})[0] if batch else recipe
        recipe, lengths = with_lengths("megatron_lm", recipe, settings), {}
    stated = {key for key in keys if key not in lengths}
    if missing_arguments(run) or _is_abridged(run):  # what is not in it may be on
        table, off = config_keys("megatron_lm"), {*run.header.off_arguments}
        stated |= {table[name].field for name in off if name in table}
        stated |= {field for one in composite_keys("megatron_lm") if one.keys[0] in off for field in one.fields}
    elif with_unset:
        stated |= {key for key in recipe_fields() if key.startswith(HOW_IT_RUNS)}
    return {key: field_value(recipe, key) for key in recipe_fields() if key in stated and key not in MODEL}


LACKS = "the arguments in the log lack"
MODEL_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads")
DUMPED = (
    *MODEL_ARGUMENTS, "ffn_hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "micro_batch_size", "global_batch_size",
)  # fmt: skip
"""Arguments that every dump of Megatron-LM has: the model's, the layout's and the batch's."""


WHOLE_DUMP = 100  # arguments: Megatron-LM prints each of its several hundred, also those that are off


def missing_arguments(run: Run) -> tuple[str, ...]:
    """Return the arguments that a dump lacks because only a part of it is in the log; empty without a dump."""
    present = _dumped_arguments(run) | ({"global_batch_size"} if run.header.overrides else set())
    return tuple(name for name in DUMPED if name not in present) if run.header.arguments else ()


def _dumped_arguments(run: Run) -> set[str]:
    flags = {one.split()[0].lstrip("-").replace("-", "_") for one in run.header.arguments}
    return flags | {*run.header.off_arguments}


def _is_abridged(run: Run) -> bool:
    """Return whether a dump is an excerpt; only a user's own file then says what the other arguments were."""
    return bool(run.header.framework) and len(_dumped_arguments(run)) < WHOLE_DUMP


def _read_settings(run: Run, overrides: tuple[str, ...]) -> ImportedRecipe:
    """Read the arguments or the config that a log prints as a file of its framework."""
    if run.header.config:
        content = config_content(run.header.config, run.file)
        return read_framework(frameworks.framework("megatron-bridge"), content, overrides=list(overrides))
    megatron = frameworks.framework("megatron-lm")
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    return read_framework(megatron, content, overrides=list(overrides))


def _with_logged_rate(run: Run, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides with the learning rate of the step lines, if neither the arguments nor the user state it."""
    in_log = bool(run.header.config) or any(flag.split()[0] == "--lr" for flag in run.header.arguments)
    stated = in_log or "optimizer.lr" in _keys(overrides)
    rate = None if stated else run.peak_rate
    return (format_override("optimizer.lr", rate), *overrides) if rate else overrides


def _keys(overrides: tuple[str, ...]) -> set[str]:
    given = {text.partition("=")[0].strip() for text in overrides}
    return {override.native_key(key) or key for key in given}


def _no_gpus(run: Run) -> str:
    """Return what is missing: the GPUs, or only their number."""
    gpu = run.header.gpu
    if gpu and not run.header.world:
        return f"no estimate: the log names the GPU ({gpu}) but not how many; add --gpus 8x{gpu}"
    if gpu:
        return f"no estimate: {gpus_unknown(run)}; add --gpus {run.header.world}x{_nearest_gpu(run)}"
    return f"no estimate: {NO_GPUS}; add --gpus {run.header.world or run.header.data_ranks or 8}xH100"


def gpus_unknown(run: Run) -> str:
    """Return why the GPUs of a log are unknown: it does not name them, or they are not in the catalogue."""
    gpu = run.header.gpu
    known = not gpu or clusters.is_known(gpu)
    return NO_GPUS if known else f"the log names the GPU {gpu}, which is not in the catalogue"


def _nearest_gpu(run: Run) -> str:
    """Return the catalogue's GPU with a similar name, of those with at least the memory of the log's GPU if known."""
    try:
        return clusters.cluster(f"1x{run.header.gpu}").gpu.name
    except InputError as error:
        similar = [clusters.gpu(one.partition("x")[2]) for one in error.fix if clusters.is_known(one.partition("x")[2])]
    enough = [one for one in similar if one.memory_gib >= (run.header.capacity_gib or 0.0)]
    return next((one.name for one in (*enough, *similar)), "H100")


def gpus_of(run: Run) -> str | None:
    """Return the GPUs that the log names, if they are known."""
    named = run.header.gpus or (f"{run.header.world}x{run.header.gpu}" if run.header.gpu and run.header.world else "")
    with suppress(InputError):
        return str(clusters.cluster(named)) if named else None
    return None


def _cluster(run: Run, gpus: str | Cluster | None) -> Cluster | None:
    found = gpus or gpus_of(run)
    return clusters.cluster(found) if isinstance(found, str) else found


def _from_settings(run: Run, where: Cluster | None, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Parse the arguments or the config that Megatron prints as a file of its own."""
    if where is None:
        return None, _no_gpus(run)
    try:
        reading = _read_settings(run, _with_logged_rate(run, overrides))
    except InputError as error:
        what = "config" if run.header.config else "arguments"
        return None, f"no estimate: the {what} in the log cannot be parsed ({error.reason}); add --recipe NAME"
    missing = missing_arguments(run)
    if reading.model is None:
        names = ", ".join(one for one in missing if one in MODEL_ARGUMENTS)
        part = f"its arguments lack {names}: use --model NAME, and the others are taken from the log"
        return None, f"no estimate: the log does not describe the model; {part}" if names else _no_recipe(run, where)
    lacks = f"{LACKS} {', '.join(missing)}: Megatron-LM's defaults are assumed; overrides change it"
    recipe = complete(reading, where)
    if run.header.config:  # its name would be that of the log
        recipe = msgspec.structs.replace(recipe, name=reading.model.name)
    return case_of(recipe, reading.model, where, reading.engine), lacks if missing else ""


def _from_name(run: Run, where: Cluster, overrides: tuple[str, ...]) -> tuple[Case | None, str]:
    """Build the case of the model that the log names, with the layout in the log."""
    try:
        model = models.find(run.header.model)
    except InputError:
        return None, f"no estimate: the log's model {run.header.model} is not in the catalog; {NAME_IT}"
    question = Question(model, model.name, where, "pretrain", engine=ENGINE.get(run.kind, "meshwright"))
    note = f"the estimate is for {model.name} with the layout in the log; other settings are those of our recipe"
    return plan_fixed(question, None, logged_overrides(run, overrides)).case, note
