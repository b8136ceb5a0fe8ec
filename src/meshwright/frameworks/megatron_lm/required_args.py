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


def missing(look: RuleContext) -> Iterator[Problem]:
    if is_open(look) or look.says("use_checkpoint_args") or not (look.says("num_layers") or look.says("hidden_size")):
        return
    for key, usual in REQUIRED.items():
        if (
            look.says(key)
            or look.says(f"encoder_{key}")
            or (key == "micro_batch_size" and look.says("batch_size"))
            or (key == "num_layers" and look.says("hybrid_layer_pattern"))
        ):
            continue
        value = number_of(look, "seq_length") or usual if key == "max_position_embeddings" else usual
        yield Problem(f"{spell(key, True)} is not given and has no default", (spell(key, value or "N"),), key=key)


def no_length(look: RuleContext) -> Problem | None:
    known = any(
        map(look.says, ("train_iters", "train_samples", "skip_train", "perform_rl_step", "use_checkpoint_args"))
    )
    if known or is_open(look) or not look.says("micro_batch_size") or not look.says("num_layers"):
        return None
    return Problem("neither --train-iters nor --train-samples says how long to train", ("--train-iters N",))


ITEMS = {"iters": "iterations", "samples": "samples"}
SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def two_clocks(look: RuleContext) -> Iterator[Problem]:
    """Lengths are counted in iterations or in samples, all of them in the same."""
    samples = [key for key in SAMPLES if look.says(key) and text_of(look, key) not in ("0", "None")]
    iterations = [key for key in ITERATIONS if look.says(key) and text_of(look, key) not in ("0", "None")]
    clock = "train_iters" if look.says("train_iters") else "train_samples" if look.says("train_samples") else ""
    if clock == "train_iters":
        for key in samples:
            yield Problem(f"{spell(key, True)} does not go with --train-iters", (spell(key, None),), key=key)
    elif clock == "train_samples":
        for key in iterations:
            yield Problem(f"{spell(key, True)} does not go with --train-samples", (spell(key, None),), key=key)


def two_warmups(look: RuleContext) -> Problem | None:
    others = [key for key in ("lr_warmup_iters", "lr_warmup_samples") if text_of(look, key) not in ("", "0")]
    if not look.says("lr_warmup_fraction") or not others:
        return None
    return Problem(
        f"--lr-warmup-fraction and {spell(others[0], True)} both say how long the warm-up is",
        (spell("lr_warmup_fraction", None),),
    )


def warmup_too_long(look: RuleContext) -> Iterator[Problem]:
    """The warm-up ends before the decay does, whichever clock they are counted by."""
    for clock in ("iters", "samples"):
        warmup, decay = f"lr_warmup_{clock}", f"lr_decay_{clock}"
        end = number_of(look, decay) or number_of(look, f"train_{clock}")
        if end and number_of(look, warmup) >= end:
            yield Problem(
                f"{spell(warmup, number_of(look, warmup))} is not below the {end} {ITEMS[clock]} of the decay",
                (spell(warmup, end // 10),),
                key=warmup,
            )


def never_saved(look: RuleContext) -> Problem | None:
    if not look.says("save") or look.says("save_interval") or is_open(look):
        return None
    return Problem("--save is given and --save-interval is not", ("--save-interval 1000",), key="save")


def kept_between_saves(look: RuleContext) -> Problem | None:
    every, kept = number_of(look, "save_interval"), number_of(look, "save_retain_interval")
    if not every or not kept or kept % every == 0:
        return None
    return Problem(
        f"--save-retain-interval {kept} is not a multiple of --save-interval {every}",
        (spell("save_retain_interval", every * max(1, kept // every)),),
        key="save_retain_interval",
    )


SOURCES = ("mock_data", "data_path", "train_data_path")


def two_sources(look: RuleContext) -> Problem | None:
    said = [key for key in SOURCES if look.says(key)]
    if len(said) < 2:
        return None
    names = " and ".join(spell(key, True) for key in said)
    return Problem(f"{names} both say what is trained on", (spell(said[0], None),), key=said[0])


def wsd_without_end(look: RuleContext) -> Problem | None:
    said = look.says("lr_wsd_decay_iters") or look.says("lr_wsd_decay_samples")
    if text_of(look, "lr_decay_style") != "WSD" or said or is_open(look):
        return None
    return Problem("WSD needs the length of its decay", (spell("lr_wsd_decay_iters", "N"),), key="lr_decay_style")


def no_vocabulary(look: RuleContext) -> Problem | None:
    said = any(map(look.says, ("vocab_size", "padded_vocab_size")))
    if not text_of(look, "tokenizer_type").startswith("Null") or said or is_open(look):
        return None
    return Problem(
        "a NullTokenizer has no vocabulary of its own: --vocab-size says it", ("--vocab-size N",), key="tokenizer_type"
    )


def position_table(look: RuleContext) -> Problem | None:
    length, table = number_of(look, "seq_length"), number_of(look, "max_position_embeddings")
    if not length or not table or table >= length:
        return None
    return Problem(
        f"--max-position-embeddings {table} is below --seq-length {length}",
        (spell("max_position_embeddings", length),),
        key="max_position_embeddings",
    )


def head_width(look: RuleContext) -> Problem | None:
    hidden, heads = number_of(look, "hidden_size"), number_of(look, "num_attention_heads")
    if not hidden or not heads or look.says("kv_channels") or hidden % heads == 0:
        return None
    return Problem(
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}",
        (spell("kv_channels", "N"),),
        key="num_attention_heads",
    )


def groups_unread(look: RuleContext) -> Problem | None:
    heads = number_of(look, "num_attention_heads")
    if not look.says("num_query_groups") or look.says("group_query_attention") or is_open(look):
        return None
    if look.says("multi_latent_attention") or number_of(look, "num_query_groups") == heads:
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


def llama_by_name(look: RuleContext) -> Problem | None:
    """A model that is called Llama and built as GPT-2."""
    if "llama" not in look.parsed.name.lower() or is_open(look) or look.says("use_checkpoint_args"):
        return None
    rotary = look.says("use_rotary_position_embeddings") or look.says("multi_latent_attention")
    missing = [key for key in LLAMA if not look.says(key) and not (key == "position_embedding_type" and rotary)]
    if not look.says("num_layers") or len(missing) < 3:
        return None
    grouped = () if look.says("group_query_attention") else ("--group-query-attention --num-query-groups N (Llama 3)",)
    return Problem(
        f"it calls itself {look.parsed.name} and builds a GPT-2 style model (layer norms, GELU, learnt positions, "
        "biases, tied embedding)",
        (*(LLAMA[key] for key in missing), *grouped),
        key="num_layers",
    )


def two_activations(look: RuleContext) -> Problem | None:
    said = [key for key in ("swiglu", "squared_relu", "quick_geglu") if on(look, key)]
    if len(said) < 2:
        return None
    return Problem(f"{' and '.join(spell(key, True) for key in said)} exclude each other", (spell(said[1], None),))
