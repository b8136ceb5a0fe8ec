"""Rules for datasets, tokenizers and initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.keys import UNREAD_ARGS
from meshwright.frameworks.megatron_bridge.model_sizes import null_vocabulary
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.megatron_bridge.rules.common import bridge_recipe, get_int, recipe_key, rule
from meshwright.recipes.key_maps.megatron_bridge_composite_keys import DATASETS, PRETRAIN_DATASETS, SFT_DATASETS


def _dataset_of_benchmark(ctx: RuleContext) -> Problem | None:
    row = bridge_recipe(ctx)
    if row is None or not row.benchmark or not ctx.is_set("--dataset"):
        return None
    return Problem("benchmark recipes do not accept --dataset", (), key="--dataset")


def _dataset_of_goal(ctx: RuleContext) -> Problem | None:
    name, row = str(ctx.get("--dataset", "")), bridge_recipe(ctx)
    if name not in DATASETS or (row is not None and row.benchmark):
        return None
    goal = ctx.recipe.goal
    fit = PRETRAIN_DATASETS if goal == "pretrain" else SFT_DATASETS
    if name in fit:
        return None
    other = "mock" if goal == "pretrain" else "squad"
    return Problem(f"--dataset {name} does not support {goal}", (format_override("--dataset", other),), key="--dataset")


def _no_checkpoint(ctx: RuleContext) -> Problem | None:
    row, goal = bridge_recipe(ctx), ctx.recipe.goal
    started = row is not None or ctx.parsed.name in ("_sft_common", "_peft_common")
    if goal == "pretrain" or not started or (row is not None and (row.benchmark or row.raises)):
        return None
    settings = ctx.parsed.settings
    if UNREAD_ARGS in settings:
        return None
    accepted = ("checkpoint.pretrained_checkpoint", "checkpoint.load")[: 1 if goal == "peft" else 2]
    given = [key for key in accepted if key in settings and (settings[key].unresolved or settings[key].value)]
    saves = _saves_there(ctx) if given == ["checkpoint.load"] else ""
    if given and not saves:
        return None
    stated = next((key for key in accepted if key in settings), "")
    return Problem(
        f"{goal} needs initial weights: checkpoint.pretrained_checkpoint is not set{saves}",
        ("checkpoint.pretrained_checkpoint=/path/to/converted/checkpoint",),
        key=("checkpoint.load" if saves else "checkpoint.pretrained_checkpoint") if stated else recipe_key(ctx),
        severity="warning" if saves else None,
    )


def _saves_there(ctx: RuleContext) -> str:
    """Return that the folder to load is the one to save to, which the first start finds empty; else empty."""
    load, save = ctx.parsed.settings["checkpoint.load"], ctx.parsed.settings.get("checkpoint.save")
    if load.unresolved or save is None or save.unresolved or load.value != save.value:
        return ""
    saved = not file_access.closed() and any(Path(str(load.value)).glob("latest*"))
    return "" if saved else ", and checkpoint.load is where this run saves: the first start finds no checkpoint there"


def _null_vocabulary(ctx: RuleContext) -> Problem | None:
    row, settings = bridge_recipe(ctx), ctx.parsed.settings
    size = null_vocabulary(row, settings)
    published = ctx.parsed.model or (ctx.case.model if ctx.case else None)
    if row is None or size is None or published is None:
        return None
    wanted = get_int(ctx, "model.vocab_size") or published.vocab
    if size == wanted:
        return None
    outside = ctx.recipe.data.dataset != "mock" and size < wanted
    return Problem(
        f"the recipe's NullTokenizer sets a vocabulary of {size}, the model has {wanted}"
        + (": token ids of real data are out of range" if outside else ""),
        (
            " ".join(
                (
                    format_override("tokenizer.tokenizer_type", "HuggingFaceTokenizer"),
                    format_override("tokenizer.tokenizer_model", row.model),
                )
            ),
            format_override("tokenizer.use_tokenizer_vocab_size", False),
        ),
        key=recipe_key(ctx),
        severity="error" if outside else "warning",
    )


def _packed_twice(ctx: RuleContext) -> Iterator[Problem]:
    settings, row = ctx.parsed.settings, bridge_recipe(ctx)
    in_batch = get_value(settings, "dataset.enable_in_batch_packing", bool(row and row.packs_in_batch))
    offline = ctx.recipe.data.packing
    if in_batch is True and offline and ctx.is_set("dataset.enable_offline_packing"):
        yield Problem(
            "enable_offline_packing and enable_in_batch_packing are exclusive",
            (format_override("dataset.enable_in_batch_packing", False),),
            key="dataset.enable_offline_packing",
        )
    elif in_batch is True and ctx.recipe.layout.micro_batch_size == 1 and _sets_packing(ctx):
        yield Problem(
            "in-batch packing needs train.micro_batch_size > 1",
            (format_override("train.micro_batch_size", 2), format_override("dataset.enable_in_batch_packing", False)),
            key="train.micro_batch_size" if ctx.is_set("train.micro_batch_size") else "dataset.enable_in_batch_packing",
        )


def _sets_packing(ctx: RuleContext) -> bool:
    return ctx.is_set("dataset.enable_in_batch_packing") or ctx.is_set("train.micro_batch_size")


def _graph_cu_seqlens(ctx: RuleContext) -> Problem | None:
    """CUDA graphs of packed attention need a fixed number of sequences (padded cu_seqlens)."""
    kernels, settings = ctx.recipe.kernels, ctx.parsed.settings
    captured = kernels.cuda_graphs == "transformer_engine" and (
        not kernels.cuda_graph_scope or "attn" in kernels.cuda_graph_scope
    )
    full = kernels.cuda_graphs in ("full_iteration", "local")
    key = "dataset.offline_packing_specs.pad_cu_seqlens"
    chosen = any(ctx.is_set(one) for one in ("model.cuda_graph_impl", "model.cuda_graph_scope", key))
    if not (ctx.recipe.data.packing and (captured or full) and chosen) or get_value(settings, key) is True:
        return None
    return Problem(
        "CUDA graphs of packed attention need padded cu_seqlens",
        (format_override(key, True),),
        key="model.cuda_graph_impl",
    )


def _energon_batch(ctx: RuleContext) -> Problem | None:
    inner, outer = get_int(ctx, "dataset.micro_batch_size"), ctx.recipe.layout.micro_batch_size
    if ctx.recipe.data.dataset != "energon" and str(ctx.get("--dataset", "")) != "energon":
        return None
    row = bridge_recipe(ctx)
    before = row.recipe().layout.micro_batch_size if row else outer
    if (before if inner is None else inner) == outer:
        return None
    key = "dataset.micro_batch_size"
    return Problem(
        f"dataset.micro_batch_size of Energon data must equal train.micro_batch_size={outer}",
        (format_override(key, outer),),
        key=key if inner is not None else "train.micro_batch_size",
    )


RULES = (
    rule(
        "benchmark-data", "error", ("--dataset",), _dataset_of_benchmark,
        "the runner rejects --dataset",
        "benchmark recipes define their own dataset",
    ),
    rule(
        "dataset-goal-mismatch", "error", ("--dataset",), _dataset_of_goal,
        "the runner rejects the dataset for this mode",
        "mock and indexed data are for pretraining, conversation datasets for fine-tuning",
    ),
    rule(
        "no-checkpoint", "error", ("checkpoint.pretrained_checkpoint",), _no_checkpoint,
        "AssertionError: a pretrained checkpoint is required",
        "fine-tuning recipes name no weights: convert a checkpoint and set its path",
    ),
    rule(
        "null-vocabulary", "warning", ("--recipe", "recipe"), _null_vocabulary,
        "the parameter count differs from the published model, and token ids of real data are out of range",
        "a placeholder tokenizer sets the embedding size",
    ),
    rule(
        "packed-twice", "error", ("dataset.enable_offline_packing", "dataset.enable_in_batch_packing"), _packed_twice,
        "ValueError from validate",
        "offline packing produces one sample per batch; in-batch packing needs several",
    ),
    rule(
        "graph-cu-seqlens", "error", ("model.cuda_graph_impl",), _graph_cu_seqlens,
        "ValueError from validate: packed attention graphs need padded cu_seqlens",
        "a captured kernel cannot change its number of sequences",
    ),
    rule(
        "energon-batch", "error", ("dataset.micro_batch_size", "train.micro_batch_size"), _energon_batch,
        "ValueError from validate: both micro batches must match",
        "the Energon loader builds batches with its own setting",
    ),
)  # fmt: skip
