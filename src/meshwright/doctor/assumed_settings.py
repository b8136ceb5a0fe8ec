"""Settings that an estimate assumes because the log does not state them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import gcd
from typing import Any

from meshwright import costs, models
from meshwright.doctor.implied_settings import inferred_batch, source_of_batch
from meshwright.doctor.logged_settings import DEGREES, LACKS, missing_arguments, overridden_keys, states_length
from meshwright.doctor.run import Run
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Goal, field_value


def impossible_goal(run: Run, case: Case) -> str:
    """Return that GPUs which took steps cannot hold the state of all weights, so that adapters ran; else empty."""
    parts, capacity = case.cached(costs.estimate).memory, case.cluster.gpu.memory_gib
    state = float(parts.weights + parts.optimizer)
    if case.goal == "peft" or not run.steps or not run.header.on_gpu or case.recipe.layout.offload != "none":
        return ""
    if state <= capacity:
        return ""
    return (
        f"training all weights needs {state:,.0f} GiB of weights and optimizer state per GPU, and the run took steps "
        f"in {capacity:,.0f} GiB"
    )


def assumptions(run: Run, case: Case, extra: tuple[str, ...], reduced: str | None = None) -> Iterator[str]:
    """Yield what the estimate takes from the recipe because the log does not state it.

    `reduced` are the recipe's own degrees, if the GPUs cannot hold them.
    """
    keys, layout = overridden_keys(extra) | run.header.file_fields, case.recipe.layout
    if run.header.arguments and (missing := missing_arguments(run)):
        yield f"{LACKS} {', '.join(missing)}: the estimate assumes the recipe's; overrides change it"
    if run.header.states_settings or run.header.recipe is not None:
        return
    if not keys & {"data.seq_length"} and not states_length(run):
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
    layout, stated = case.recipe.layout, overridden_keys(extra) | run.header.overrides.keys()
    if run.kind != "megatron" or not run.header.states_layout or run.header.states_settings or run.header.file:
        return ""
    names = ("cp", "micro_batch_size", *(("vp",) if layout.pp > 1 else ()), "recompute")
    assumed = [f"layout.{name}={getattr(layout, name)}" for name in names if f"layout.{name}" not in stated]
    return f"the log does not state {' '.join(assumed)}: the estimate assumes it; overrides change it" * bool(assumed)


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
    values = {key: value for key, value in DATA_PARALLEL.items() if key not in overridden_keys(stated)}
    return tuple(format_override(key, value) for key, value in values.items() if field_value(case.recipe, key) != value)


def degrees_that_divide(case: Case, stated: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides that reduce a recipe's degrees to ones that divide the GPUs, unless log or user state them."""
    layout, left, keys = case.recipe.layout, int(case.world), overridden_keys(stated)
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


TRAIN_ADAPTERS = ("unsloth",)  # front ends whose examples all do
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
        if name in TRAIN_ADAPTERS:
            return "peft", f"the log is of {name}: adapters are assumed, --goal peft; --goal qlora for 4-bit weights"
        note = f"the log is of {name}, which fine-tunes: --goal sft is assumed; --goal peft or qlora for adapters"
        return ("sft", note) if name else (None, "")
    with suppress(InputError):  # what the name means is reported by the estimate
        total = models.find(target).params.total
        if trained * ranks < ADAPTERS * total:
            share = f"{trained:,} trainable parameters of {total / 1e9:.3g}B"
            return "peft", f"the log states {share}: adapters are assumed, --goal peft; --goal sft for other training"
    return None, ""
