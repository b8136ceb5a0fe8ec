"""Data, tokenizers and the weights that fine-tuning starts from."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.parsed_config import value
from meshwright.frameworks.megatron_bridge.rules.common import number, recipe_key, rule, shipped
from meshwright.recipes.key_maps.megatron_bridge_composite_keys import DATASETS, PRETRAIN_DATASETS, SFT_DATASETS


def _dataset_of_benchmark(ctx: RuleContext) -> Problem | None:
    row = shipped(ctx)
    if row is None or not row.benchmark or not ctx.is_set("--dataset"):
        return None
    return Problem("benchmark recipes keep their own data and refuse --dataset", (), key="--dataset")


def _dataset_of_goal(ctx: RuleContext) -> Problem | None:
    name, row = str(ctx.get("--dataset", "")), shipped(ctx)
    if name not in DATASETS or (row is not None and row.benchmark):
        return None
    goal = ctx.recipe.goal
    fit = PRETRAIN_DATASETS if goal == "pretrain" else SFT_DATASETS
    if name in fit:
        return None
    other = "mock" if goal == "pretrain" else "squad"
    return Problem(f"--dataset {name} is not for {goal}", (spell("--dataset", other),), key="--dataset")


def _no_checkpoint(ctx: RuleContext) -> Problem | None:
    row, goal = shipped(ctx), ctx.recipe.goal
    started = row is not None or ctx.parsed.name in ("_sft_common", "_peft_common")
    if goal == "pretrain" or not started or (row is not None and (row.benchmark or row.raises)):
        return None
    settings = ctx.parsed.settings
    enough = ("checkpoint.pretrained_checkpoint", "checkpoint.load")[: 1 if goal == "peft" else 2]
    given = [key for key in enough if key in settings]
    if any(settings[key].unresolved or settings[key].value for key in given):
        return None
    return Problem(
        f"{goal} starts from no weights: checkpoint.pretrained_checkpoint is not set",
        ("checkpoint.pretrained_checkpoint=/path/to/converted/checkpoint",),
        key="checkpoint.pretrained_checkpoint" if given else recipe_key(ctx),
    )


def _null_vocabulary(ctx: RuleContext) -> Problem | None:
    row = shipped(ctx)
    vocabulary = row.null_vocabulary if row else None
    model = ctx.case.model if ctx.case else None
    if row is None or vocabulary is None or model is None:
        return None
    settings = ctx.parsed.settings
    wanted = number(ctx, "model.vocab_size") or model.vocab
    kind = str(value(settings, "tokenizer.tokenizer_type", "NullTokenizer"))
    size = value(settings, "tokenizer.vocab_size", vocabulary)
    off = value(settings, "tokenizer.use_tokenizer_vocab_size", True) is False
    open_ones = [key for key in ctx.keys_under("tokenizer") if settings[key].unresolved]
    if kind != "NullTokenizer" or off or size == wanted or open_ones or not isinstance(size, int):
        return None
    outside = ctx.recipe.data.dataset != "mock" and size < wanted
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
        key=recipe_key(ctx),
        severity="error" if outside else "warning",
    )


def _packed_twice(ctx: RuleContext) -> Iterator[Problem]:
    settings, row = ctx.parsed.settings, shipped(ctx)
    in_batch = value(settings, "dataset.enable_in_batch_packing", bool(row and row.packs_in_batch))
    offline = ctx.recipe.data.packing
    if in_batch is True and offline and ctx.is_set("dataset.enable_offline_packing"):
        yield Problem(
            "samples are packed ahead of time or inside a batch, not both",
            (spell("dataset.enable_in_batch_packing", False),),
            key="dataset.enable_offline_packing",
        )
    elif in_batch is True and ctx.recipe.layout.micro_batch_size == 1 and _said_packing(ctx):
        yield Problem(
            "packing inside a batch needs more than one sample in it: train.micro_batch_size is 1",
            (spell("train.micro_batch_size", 2), spell("dataset.enable_in_batch_packing", False)),
            key="train.micro_batch_size" if ctx.is_set("train.micro_batch_size") else "dataset.enable_in_batch_packing",
        )


def _said_packing(ctx: RuleContext) -> bool:
    return ctx.is_set("dataset.enable_in_batch_packing") or ctx.is_set("train.micro_batch_size")


def _packed_borders(ctx: RuleContext) -> Problem | None:
    """Graphs that capture packed attention need a fixed number of borders."""
    kernels, settings = ctx.recipe.kernels, ctx.parsed.settings
    captured = kernels.cuda_graphs == "transformer_engine" and (
        not kernels.cuda_graph_scope or "attn" in kernels.cuda_graph_scope
    )
    whole = kernels.cuda_graphs in ("full_iteration", "local")
    key = "dataset.offline_packing_specs.pad_cu_seqlens"
    chosen = any(ctx.is_set(one) for one in ("model.cuda_graph_impl", "model.cuda_graph_scope", key))
    if not (ctx.recipe.data.packing and (captured or whole) and chosen) or value(settings, key) is True:
        return None
    return Problem("graphs of packed attention need padded borders", (spell(key, True),), key="model.cuda_graph_impl")


def _energon_batch(ctx: RuleContext) -> Problem | None:
    inner, outer = number(ctx, "dataset.micro_batch_size"), ctx.recipe.layout.micro_batch_size
    if ctx.recipe.data.dataset != "energon" and str(ctx.get("--dataset", "")) != "energon":
        return None
    row = shipped(ctx)
    before = row.recipe().layout.micro_batch_size if row else outer
    if (before if inner is None else inner) == outer:
        return None
    key = "dataset.micro_batch_size"
    return Problem(
        f"Energon data has a micro batch of its own: it must be {outer} too",
        (spell(key, outer),),
        key=key if inner is not None else "train.micro_batch_size",
    )


RULES = (
    rule(
        "benchmark-data", "error", ("--dataset",), _dataset_of_benchmark,
        "the runner refuses --dataset",
        "benchmark recipes own their data set",
    ),
    rule(
        "data-of-another-goal", "error", ("--dataset",), _dataset_of_goal,
        "the runner refuses the data set for this mode",
        "made-up and indexed data are for pretraining, presets of conversations for fine-tuning",
    ),
    rule(
        "no-checkpoint", "error", ("checkpoint.pretrained_checkpoint",), _no_checkpoint,
        "an assertion that a pretrained checkpoint is needed",
        "no fine-tuning recipe names weights: they are converted first and then named",
    ),
    rule(
        "null-vocabulary", "warning", ("--recipe", "recipe"), _null_vocabulary,
        "parameter counts differ from the published model, and tokens of real data are out of range",
        "a placeholder tokenizer decides the size of the embedding",
    ),
    rule(
        "packed-twice", "error", ("dataset.enable_offline_packing", "dataset.enable_in_batch_packing"), _packed_twice,
        "ValueError from validate",
        "packing ahead of time makes samples of one each; packing in a batch needs several",
    ),
    rule(
        "packed-borders", "error", ("model.cuda_graph_impl",), _packed_borders,
        "ValueError from validate: packed attention graphs need padded cu_seqlens",
        "a captured kernel cannot take another number of documents",
    ),
    rule(
        "energon-batch", "error", ("dataset.micro_batch_size", "train.micro_batch_size"), _energon_batch,
        "ValueError from validate: both micro batches must match",
        "the loader builds batches itself, by its own setting",
    ),
)  # fmt: skip
