"""What Megatron-LM must be told, and the model that its flags build."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import is_open, number_of, on, text_of
from meshwright.frameworks.megatron_lm.arguments import spell

REQUIRED = {
    "micro_batch_size": 1,
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
}


def missing(ctx: RuleContext) -> Iterator[Problem]:
    if is_open(ctx) or ctx.is_set("use_checkpoint_args") or not (ctx.is_set("num_layers") or ctx.is_set("hidden_size")):
        return
    for key, usual in REQUIRED.items():
        if (
            ctx.is_set(key)
            or ctx.is_set(f"encoder_{key}")
            or (key == "micro_batch_size" and ctx.is_set("batch_size"))
            or (key == "num_layers" and ctx.is_set("hybrid_layer_pattern"))
        ):
            continue
        value = number_of(ctx, "seq_length") or usual if key == "max_position_embeddings" else usual
        yield Problem(f"{spell(key, True)} is not given and has no default", (spell(key, value or "N"),), key=key)


def no_length(ctx: RuleContext) -> Problem | None:
    known = any(
        map(ctx.is_set, ("train_iters", "train_samples", "skip_train", "perform_rl_step", "use_checkpoint_args"))
    )
    if known or is_open(ctx) or not ctx.is_set("micro_batch_size") or not ctx.is_set("num_layers"):
        return None
    return Problem("neither --train-iters nor --train-samples says how long to train", ("--train-iters N",))


ITEMS = {"iters": "iterations", "samples": "samples"}
SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def two_clocks(ctx: RuleContext) -> Iterator[Problem]:
    """Lengths are counted in iterations or in samples, all of them in the same."""
    samples = [key for key in SAMPLES if ctx.is_set(key) and text_of(ctx, key) not in ("0", "None")]
    iterations = [key for key in ITERATIONS if ctx.is_set(key) and text_of(ctx, key) not in ("0", "None")]
    clock = "train_iters" if ctx.is_set("train_iters") else "train_samples" if ctx.is_set("train_samples") else ""
    if clock == "train_iters":
        for key in samples:
            yield Problem(f"{spell(key, True)} does not go with --train-iters", (spell(key, None),), key=key)
    elif clock == "train_samples":
        for key in iterations:
            yield Problem(f"{spell(key, True)} does not go with --train-samples", (spell(key, None),), key=key)


def two_warmups(ctx: RuleContext) -> Problem | None:
    others = [key for key in ("lr_warmup_iters", "lr_warmup_samples") if text_of(ctx, key) not in ("", "0")]
    if not ctx.is_set("lr_warmup_fraction") or not others:
        return None
    return Problem(
        f"--lr-warmup-fraction and {spell(others[0], True)} both say how long the warm-up is",
        (spell("lr_warmup_fraction", None),),
    )


def warmup_too_long(ctx: RuleContext) -> Iterator[Problem]:
    """The warm-up ends before the decay does, whichever clock they are counted by."""
    for clock in ("iters", "samples"):
        warmup, decay = f"lr_warmup_{clock}", f"lr_decay_{clock}"
        end = number_of(ctx, decay) or number_of(ctx, f"train_{clock}")
        if end and number_of(ctx, warmup) >= end:
            yield Problem(
                f"{spell(warmup, number_of(ctx, warmup))} is not below the {end} {ITEMS[clock]} of the decay",
                (spell(warmup, end // 10),),
                key=warmup,
            )


def never_saved(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("save") or ctx.is_set("save_interval") or is_open(ctx):
        return None
    return Problem("--save is given and --save-interval is not", ("--save-interval 1000",), key="save")


def kept_between_saves(ctx: RuleContext) -> Problem | None:
    every, kept = number_of(ctx, "save_interval"), number_of(ctx, "save_retain_interval")
    if not every or not kept or kept % every == 0:
        return None
    return Problem(
        f"--save-retain-interval {kept} is not a multiple of --save-interval {every}",
        (spell("save_retain_interval", every * max(1, kept // every)),),
        key="save_retain_interval",
    )


SOURCES = ("mock_data", "data_path", "train_data_path")


def two_sources(ctx: RuleContext) -> Problem | None:
    said = [key for key in SOURCES if ctx.is_set(key)]
    if len(said) < 2:
        return None
    names = " and ".join(spell(key, True) for key in said)
    return Problem(f"{names} both say what is trained on", (spell(said[0], None),), key=said[0])


def wsd_without_end(ctx: RuleContext) -> Problem | None:
    said = ctx.is_set("lr_wsd_decay_iters") or ctx.is_set("lr_wsd_decay_samples")
    if text_of(ctx, "lr_decay_style") != "WSD" or said or is_open(ctx):
        return None
    return Problem("WSD needs the length of its decay", (spell("lr_wsd_decay_iters", "N"),), key="lr_decay_style")


def no_vocabulary(ctx: RuleContext) -> Problem | None:
    said = any(map(ctx.is_set, ("vocab_size", "padded_vocab_size")))
    if not text_of(ctx, "tokenizer_type").startswith("Null") or said or is_open(ctx):
        return None
    return Problem(
        "a NullTokenizer has no vocabulary of its own: --vocab-size says it", ("--vocab-size N",), key="tokenizer_type"
    )


def position_table(ctx: RuleContext) -> Problem | None:
    length, table = number_of(ctx, "seq_length"), number_of(ctx, "max_position_embeddings")
    if not length or not table or table >= length:
        return None
    return Problem(
        f"--max-position-embeddings {table} is below --seq-length {length}",
        (spell("max_position_embeddings", length),),
        key="max_position_embeddings",
    )


def head_width(ctx: RuleContext) -> Problem | None:
    hidden, heads = number_of(ctx, "hidden_size"), number_of(ctx, "num_attention_heads")
    if not hidden or not heads or ctx.is_set("kv_channels") or hidden % heads == 0:
        return None
    return Problem(
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}",
        (spell("kv_channels", "N"),),
        key="num_attention_heads",
    )


def groups_unread(ctx: RuleContext) -> Problem | None:
    heads = number_of(ctx, "num_attention_heads")
    if not ctx.is_set("num_query_groups") or ctx.is_set("group_query_attention") or is_open(ctx):
        return None
    if ctx.is_set("multi_latent_attention") or number_of(ctx, "num_query_groups") == heads:
        return None
    return Problem(
        "--num-query-groups is read only with --group-query-attention: every head keeps its own keys and values",
        ("--group-query-attention",),
    )


LLAMA = {
    "normalization": "--normalization RMSNorm",
    "swiglu": "--swiglu",
    "position_embedding_type": "--position-embedding-type rope",
    "disable_bias_linear": "--disable-bias-linear",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
}


def llama_by_name(ctx: RuleContext) -> Problem | None:
    """A model that is called Llama and built as GPT-2."""
    if "llama" not in ctx.parsed.name.lower() or is_open(ctx) or ctx.is_set("use_checkpoint_args"):
        return None
    rotary = ctx.is_set("use_rotary_position_embeddings") or ctx.is_set("multi_latent_attention")
    missing = [key for key in LLAMA if not ctx.is_set(key) and not (key == "position_embedding_type" and rotary)]
    if not ctx.is_set("num_layers") or len(missing) < 3:
        return None
    grouped = () if ctx.is_set("group_query_attention") else ("--group-query-attention --num-query-groups N (Llama 3)",)
    return Problem(
        f"it calls itself {ctx.parsed.name} and builds a GPT-2 style model (layer norms, GELU, learnt positions, "
        "biases, tied embedding)",
        (*(LLAMA[key] for key in missing), *grouped),
        key="num_layers",
    )


def two_activations(ctx: RuleContext) -> Problem | None:
    said = [key for key in ("swiglu", "squared_relu", "quick_geglu") if on(ctx, key)]
    if len(said) < 2:
        return None
    return Problem(f"{' and '.join(spell(key, True) for key in said)} exclude each other", (spell(said[1], None),))
