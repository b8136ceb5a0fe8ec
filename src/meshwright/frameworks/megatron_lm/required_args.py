"""Rules for required flags, schedules, data and the model size flags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial

from meshwright.frameworks.common import ALL_ARGUMENTS
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext, rule_of
from meshwright.frameworks.megatron_lm.accessors import get_int, get_text, has_unread_args, is_on
from meshwright.frameworks.megatron_lm.arguments import (
    DEFAULT_TOKENIZER,
    FROM_CHECKPOINT,
    HYBRID_SPEC,
    KEY_MAP,
    UNREAD_ARGS,
    format_flag,
)
from meshwright.frameworks.megatron_lm.tokenizers import SENTENCEPIECE, SENTENCEPIECE_TOKENIZER
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.megatron_lm_composite_keys import DATA_LISTS

SWEPT = ("micro_batch_size",)  # that users pass to a script
ASSERTED = "AssertionError in argument validation"
"""What a user sees of a constraint that the argument parser asserts."""
FROM_ELSEWHERE = ("use_checkpoint_args", "retro_project_dir")
"""Flags with which required arguments come from a checkpoint or a Retro project."""
REQUIRED = {
    "micro_batch_size": 1,
    "num_layers": None,
    "hidden_size": None,
    "num_attention_heads": None,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
}


def missing(ctx: RuleContext) -> Iterator[Problem]:
    given = ctx.parsed.settings.get(UNREAD_ARGS)
    open_to_user = given is not None and str(given.value) in ALL_ARGUMENTS
    if (
        (has_unread_args(ctx) and not open_to_user)
        or any(map(ctx.is_set, FROM_ELSEWHERE))
        or not (ctx.is_set("num_layers") or ctx.is_set("hidden_size"))
    ):
        return
    for key, default in REQUIRED.items():
        if (
            ctx.is_set(key)
            or ctx.is_set(f"encoder_{key}")
            or key in ctx.parsed.possible_keys
            or (key == "micro_batch_size" and ctx.is_set("batch_size"))
            or (key == "num_layers" and ctx.is_set("hybrid_layer_pattern"))
        ):
            continue
        value = get_int(ctx, "seq_length") or default if key == "max_position_embeddings" else default
        flag, fix = format_flag(key, True), (format_flag(key, value or "N"),)
        if open_to_user and key in SWEPT:
            continue
        if open_to_user:
            message = f"{flag} is required, has no default, and is not in the script: its arguments must have it"
            yield Problem(message, fix, key=key, severity="warning")
        else:
            yield Problem(f"{flag} is required and has no default", fix, key=key)


def no_initial_weights(ctx: RuleContext) -> Problem | None:
    """Fine-tuning that saves where it loads starts from random weights, unless a checkpoint is there already."""
    if not is_on(ctx, "sft") or has_unread_args(ctx) or ctx.is_set("pretrained_checkpoint"):
        return None
    load, save = (ctx.parsed.settings.get(key) for key in ("load", "save"))
    if load is not None and (is_on(ctx, "finetune") or save is None or load.value != save.value):
        return None
    where = f" unless {load.value} already contains a checkpoint" if load is not None else ""
    message = f"--sft without --pretrained-checkpoint trains from random weights{where}"
    return Problem(message, ("--pretrained-checkpoint /path/to/converted/checkpoint",), key="sft")


NOT_LOADED = {
    "finetune": "every restart begins at step 0, without the optimizer state",
    "no_load_optim": "every restart loses the optimizer state",
    "no_load_rng": "a restart loses the random state",
}
"""What a restart does not load from the folder that the run saves to, by the flag."""


def state_not_loaded(ctx: RuleContext) -> Problem | None:
    """A restart resumes from --load, if it is the folder of --save, without what these flags leave out."""
    load, save = (ctx.parsed.settings.get(key) for key in ("load", "save"))
    found = [key for key in NOT_LOADED if is_on(ctx, key)]
    if load is None or save is None or load.value != save.value or not found:
        return None
    flags = " ".join(format_flag(key, True) for key in found)
    weights = "" if ctx.is_set("pretrained_checkpoint") else " and name initial weights with --pretrained-checkpoint"
    remove = f"remove {'them' if found[1:] else 'it'}{weights}"
    message = f"{flags}, with --load the folder of --save: {NOT_LOADED[found[0]]}; {remove}"
    return Problem(message, (f"without {flags}",), key=found[0])


def no_length(ctx: RuleContext) -> Problem | None:
    has_length = any(
        map(ctx.is_set, ("train_iters", "train_samples", "skip_train", "perform_rl_step", "epochs", *FROM_ELSEWHERE))
    )
    if (
        has_length
        or has_unread_args(ctx, "train_iters", "train_samples")
        or not ctx.is_set("micro_batch_size")
        or not ctx.is_set("num_layers")
    ):
        return None
    unit = "samples" if any(map(ctx.is_set, SAMPLES)) else "iters"
    return Problem(
        "neither --train-iters nor --train-samples is set",
        (format_flag(f"train_{unit}", get_int(ctx, f"lr_decay_{unit}") or "N"),),
    )


def no_learning_rate(ctx: RuleContext) -> Problem | None:
    if ctx.is_set("lr") or has_unread_args(ctx, "lr") or not _trains(ctx):
        return None
    return Problem("--lr is not set, and has no default", ("--lr 3e-4",), key="lr")


def _trains(ctx: RuleContext) -> bool:
    """Return whether the arguments are those of a training that is described in full."""
    model = ctx.is_set("num_layers") or ctx.is_set("hybrid_layer_pattern")
    return model and ctx.is_set("micro_batch_size") and not ctx.is_set("skip_train")


OTHER_BUILDERS = ("export_", "modelopt_", "flextron")
"""Flags of programs that build a hybrid model without --spec."""


def no_layer_spec(ctx: RuleContext) -> Problem | None:
    pattern = next((key for key in ("hybrid_layer_pattern", "hybrid_override_pattern") if ctx.is_set(key)), "")
    other = get_text(ctx, "transformer_impl") == "inference_optimized"
    modelopt = any(key.startswith(OTHER_BUILDERS) for key in ctx.parsed.settings)
    if not pattern or other or modelopt or ctx.is_set("spec") or has_unread_args(ctx, "spec"):
        return None
    return Problem("a hybrid model needs --spec", (format_flag("spec", HYBRID_SPEC),), key=pattern)


UNITS = {"iters": "iterations", "samples": "samples"}
SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")


def mixed_units(ctx: RuleContext) -> Iterator[Problem]:
    """All lengths must be in iterations or all in samples."""
    samples = [key for key in SAMPLES if ctx.is_set(key) and get_text(ctx, key) not in ("0", "None")]
    iterations = [key for key in ITERATIONS if ctx.is_set(key) and get_text(ctx, key) not in ("0", "None")]
    unit = "train_iters" if ctx.is_set("train_iters") else "train_samples" if ctx.is_set("train_samples") else ""
    others = {"train_iters": samples, "train_samples": iterations}.get(unit, [])
    for key in others:
        message = f"{format_flag(key, True)} cannot be combined with {format_flag(unit, True)}"
        yield Problem(message, tuple(in_other_unit(ctx, key)), key=key)


def in_other_unit(ctx: RuleContext, key: str) -> Iterator[str]:
    """Yield the fix of a length in the wrong unit: the flag goes, and the same length is stated in the other unit."""
    batch = get_int(ctx, "global_batch_size")
    pairs = [*zip(SAMPLES, ITERATIONS, strict=True), *zip(ITERATIONS, SAMPLES, strict=True)]
    other, length = dict(pairs)[key], get_int(ctx, key)
    if batch and length and not ctx.is_set(other):
        yield format_flag(other, max(1, length // batch) if key in SAMPLES else length * batch)
    yield format_flag(key, None)


def two_warmups(ctx: RuleContext) -> Problem | None:
    others = [key for key in ("lr_warmup_iters", "lr_warmup_samples") if get_text(ctx, key) not in ("", "0")]
    if not ctx.is_set("lr_warmup_fraction") or not others:
        return None
    return Problem(
        f"--lr-warmup-fraction and {format_flag(others[0], True)} both set the warm-up length",
        (format_flag("lr_warmup_fraction", None),),
    )


def warmup_too_long(ctx: RuleContext) -> Iterator[Problem]:
    """The warm-up must end before the decay does, in either unit."""
    for unit in ("iters", "samples"):
        warmup, decay = f"lr_warmup_{unit}", f"lr_decay_{unit}"
        end = get_int(ctx, decay) or get_int(ctx, f"train_{unit}")
        if end and get_int(ctx, warmup) >= end:
            yield Problem(
                f"{format_flag(warmup, get_int(ctx, warmup))} must be less than the {end} {UNITS[unit]} of the decay",
                (format_flag(warmup, end // 10),),
                key=warmup,
            )
    share = get_text(ctx, "lr_warmup_fraction")
    if re.fullmatch(r"\d+(\.\d*)?", share) and float(share) >= 1:
        message = f"{format_flag('lr_warmup_fraction', share)} must be less than 1: it is a share of the decay"
        yield Problem(message, (format_flag("lr_warmup_fraction", 0.1),), key="lr_warmup_fraction")


def empty_split(ctx: RuleContext) -> Problem | None:
    shares = [float(one) for one in re.findall(r"\d+\.?\d*", get_text(ctx, "split"))]
    if not shares or sum(shares) > 0:
        return None
    return Problem(f"--split {get_text(ctx, 'split')} leaves no sample for training", ("--split 99,1,0",), key="split")


def no_save_interval(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("save") or get_text(ctx, "save_interval") != "0":
        return None
    return Problem("--save-interval 0 is no interval", ("--save-interval 1000",), key="save_interval")


def save_without_interval(ctx: RuleContext) -> Problem | None:
    if not ctx.is_set("save") or ctx.is_set("save_interval") or has_unread_args(ctx, "save_interval"):
        return None
    return Problem("--save needs --save-interval", ("--save-interval 1000",), key="save")


def retain_interval(ctx: RuleContext) -> Problem | None:
    every, kept = get_int(ctx, "save_interval"), get_int(ctx, "save_retain_interval")
    if not every or not kept or kept % every == 0:
        return None
    return Problem(
        f"--save-retain-interval {kept} is not a multiple of --save-interval {every}",
        (format_flag("save_retain_interval", every * max(1, kept // every)),),
        key="save_retain_interval",
    )


SOURCES = ("mock_data", "data_path", "train_data_path", *DATA_LISTS.values())


def several_sources(ctx: RuleContext) -> Problem | None:
    sources = [key for key in SOURCES if ctx.is_set(key)]
    if len(sources) < 2:
        return None
    names = " and ".join(format_flag(key, True) for key in sources)
    return Problem(f"{names} are exclusive: choose one data source", (format_flag(sources[0], None),), key=sources[0])


PRETRAINING = ("pretrain_gpt", "pretrain_hybrid", "pretrain_mamba", "pretrain_bert", "pretrain_t5")
"""Programs that read indexed datasets, and generate mock data only with --mock-data."""
OTHER_SOURCES = ("perform_rl_step", "finetune_hf_dataset", "finetune_data_files", "fim_data")


OWN_SOURCE = re.compile(r"data(set|_path|$)|split_paths|mixture|blend|corpus")
"""Flags of forks that name the data, such as --train-weighted-split-paths-path."""


def no_data(ctx: RuleContext) -> Problem | None:
    known = config_keys(KEY_MAP)
    of_fork = any(OWN_SOURCE.search(key) for key in ctx.parsed.settings if key not in known)
    given = of_fork or any(map(ctx.is_set, (*SOURCES, *OTHER_SOURCES)))
    if given or ctx.parsed.entry not in PRETRAINING or has_unread_args(ctx, *SOURCES) or not _trains(ctx):
        return None
    message = "no data source is set; --mock-data trains on generated tokens"
    return Problem(message, ("--data-path PREFIX",), key="data_path")


def wsd_without_decay(ctx: RuleContext) -> Problem | None:
    has_decay = ctx.is_set("lr_wsd_decay_iters") or ctx.is_set("lr_wsd_decay_samples")
    if get_text(ctx, "lr_decay_style") != "WSD" or has_decay or has_unread_args(ctx):
        return None
    unit = "samples" if ctx.is_set("train_samples") else "iters"
    end = get_int(ctx, f"lr_decay_{unit}") or get_int(ctx, f"train_{unit}")
    return Problem(
        f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}",
        (format_flag(f"lr_wsd_decay_{unit}", max(1, end // 5) if end else "N"),),
        key="lr_decay_style",
    )


def no_vocab_size(ctx: RuleContext) -> Problem | None:
    has_size = any(map(ctx.is_set, ("vocab_size", "padded_vocab_size")))
    if not get_text(ctx, "tokenizer_type").startswith("Null") or has_size or has_unread_args(ctx):
        return None
    return Problem("NullTokenizer needs --vocab-size", ("--vocab-size N",), key="tokenizer_type")


TOKENIZER_MODELS = (
    "HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer", "TikTokenizer", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "Llama2Tokenizer", "Llama3Tokenizer",
)  # fmt: skip
"""Tokenizers that are built from --tokenizer-model."""
TOKENIZER_FILES = {DEFAULT_TOKENIZER: ("vocab_file", "merge_file"), "BertWordPieceCase": ("vocab_file",)}


def no_tokenizer_type(ctx: RuleContext) -> Problem | None:
    """Without a type the training scripts build GPT-2's tokenizer, whatever vocabulary or model is named."""
    if ctx.is_set("tokenizer_type") or has_unread_args(ctx) or any(map(ctx.is_set, FROM_CHECKPOINT)):
        return None
    named = next((key for key in ("tokenizer_model", "vocab_size") if ctx.is_set(key)), "")
    if not named or ctx.is_set("padded_vocab_size"):
        return None
    model = get_text(ctx, "tokenizer_model")
    fix = (
        (SENTENCEPIECE_TOKENIZER if model.endswith(SENTENCEPIECE) else "HuggingFaceTokenizer")
        if model
        else "NullTokenizer"
    )
    unused = format_flag(named, get_text(ctx, named) or get_int(ctx, named) or "N")
    message = f"without --tokenizer-type Megatron-LM uses {DEFAULT_TOKENIZER} and ignores {unused}"
    return Problem(message, (format_flag("tokenizer_type", fix),), key=named)


def tokenizer_format(ctx: RuleContext) -> Problem | None:
    """A SentencePiece file is no folder of a Hugging Face tokenizer, and no id on the hub."""
    kind, model = get_text(ctx, "tokenizer_type"), get_text(ctx, "tokenizer_model")
    if kind not in ("HuggingFaceTokenizer", "SFTTokenizer") or not model.endswith(SENTENCEPIECE):
        return None
    message = f"{kind} reads a folder or hub id of a Hugging Face tokenizer, and {model} is a SentencePiece file"
    folder = format_flag("tokenizer_model", "FOLDER")
    fix = folder if kind == "SFTTokenizer" else format_flag("tokenizer_type", SENTENCEPIECE_TOKENIZER)
    return Problem(message, (fix,), key="tokenizer_type")


def no_tokenizer_files(ctx: RuleContext) -> Problem | None:
    """A tokenizer needs its model or its vocabulary, unless a checkpoint names it or the script is partly unread."""
    kind = get_text(ctx, "tokenizer_type")
    if has_unread_args(ctx) or any(map(ctx.is_set, FROM_CHECKPOINT)):
        return None
    if kind in TOKENIZER_MODELS and not ctx.is_set("tokenizer_model"):
        return Problem(f"{kind} needs --tokenizer-model", ("--tokenizer-model PATH",), key="tokenizer_type")
    missing = [key for key in TOKENIZER_FILES.get(kind, ()) if not ctx.is_set(key)]
    if not missing:
        return None
    flags = [format_flag(key, "PATH") for key in missing]
    message = f"{kind} without {' and '.join(format_flag(key, True) for key in missing)} downloads its vocabulary"
    return Problem(f"{message}; earlier releases stop", (" ".join(flags),), key="tokenizer_type", severity="warning")


def position_embeddings(ctx: RuleContext) -> Problem | None:
    length, positions = get_int(ctx, "seq_length"), get_int(ctx, "max_position_embeddings")
    if not length or positions is None or positions >= length:
        return None
    return Problem(
        f"--max-position-embeddings {positions} is less than --seq-length {length}",
        (format_flag("max_position_embeddings", length),),
        key="max_position_embeddings",
    )


def no_positions(ctx: RuleContext) -> Problem | None:
    """Megatron-LM accepts --no-position-embedding only with RoPE, where it has no effect."""
    kind = get_text(ctx, "position_embedding_type") or "learned_absolute"
    if not is_on(ctx, "no_position_embedding") or kind == "rope" or is_on(ctx, "use_rotary_position_embeddings"):
        return None
    fix = (format_flag("no_position_embedding", None), *(() if kind == "none" else ("--position-embedding-type none",)))
    return Problem("--no-position-embedding is deprecated: use --position-embedding-type", fix)


def head_dim(ctx: RuleContext) -> Problem | None:
    hidden, heads = get_int(ctx, "hidden_size"), get_int(ctx, "num_attention_heads")
    if not hidden or not heads or ctx.is_set("kv_channels") or hidden % heads == 0:
        return None
    return Problem(
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}",
        (format_flag("kv_channels", max(8, round(hidden / heads / 8) * 8)),),
        key="num_attention_heads",
    )


def uneven_query_groups(ctx: RuleContext) -> Problem | None:
    heads, groups = get_int(ctx, "num_attention_heads"), get_int(ctx, "num_query_groups")
    if not heads or not groups or not ctx.is_set("group_query_attention") or ctx.is_set("multi_latent_attention"):
        return None
    if heads % groups == 0:
        return None
    return Problem(
        f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}",
        (format_flag("num_query_groups", math.gcd(heads, groups)),),
        key="num_query_groups",
    )


def query_groups_ignored(ctx: RuleContext) -> Problem | None:
    heads = get_int(ctx, "num_attention_heads")
    if not ctx.is_set("num_query_groups") or ctx.is_set("group_query_attention") or has_unread_args(ctx):
        return None
    if ctx.is_set("multi_latent_attention") or get_int(ctx, "num_query_groups") == heads:
        return None
    return Problem(
        "--num-query-groups is ignored without --group-query-attention: attention is multi-head",
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
    """A model named Llama that the flags build as GPT-2."""
    if "llama" not in ctx.parsed.name.lower() or has_unread_args(ctx) or ctx.is_set("use_checkpoint_args"):
        return None
    rotary = ctx.is_set("use_rotary_position_embeddings") or ctx.is_set("multi_latent_attention")
    missing = [key for key in LLAMA if not ctx.is_set(key) and not (key == "position_embedding_type" and rotary)]
    if not ctx.is_set("num_layers") or len(missing) < 3:
        return None
    grouped = () if ctx.is_set("group_query_attention") else ("--group-query-attention --num-query-groups N (Llama 3)",)
    return Problem(
        f"{ctx.parsed.name} builds a GPT-2 style model, not a Llama (LayerNorm, GELU, learned positions, "
        "biases, tied embeddings)",
        (*(LLAMA[key] for key in missing), *grouped),
        key="num_layers",
    )


def two_activations(ctx: RuleContext) -> Problem | None:
    activations = [key for key in ("swiglu", "squared_relu", "quick_geglu") if is_on(ctx, key)]
    if len(activations) < 2:
        return None
    return Problem(
        f"{' and '.join(format_flag(key, True) for key in activations)} are exclusive",
        (format_flag(activations[1], None),),
    )


def schedule_rules(framework: str) -> tuple[FrameworkRule, ...]:
    """Return the rules on lengths, shares and intervals, which Megatron-LM and Megatron-DeepSpeed assert alike."""
    rule = partial(rule_of, framework)
    return (
        rule(
            "iterations-and-samples",
            " ".join((*SAMPLES, *ITERATIONS)),
            mixed_units,
            "AssertionError: expected iteration-based (or sample-based) training",
            "the whole schedule uses one unit, iterations or samples",
        ),
        rule(
            "two-warm-ups",
            "lr_warmup_fraction",
            two_warmups,
            "AssertionError: can only specify one of lr-warmup-fraction and lr-warmup-iters",
            "both set the warm-up length",
        ),
        rule(
            "warm-up-too-long",
            "lr_warmup_iters lr_warmup_samples lr_warmup_fraction",
            warmup_too_long,
            "AssertionError without a message while the scheduler is built",
            "the learning rate must reach its peak before the decay ends",
            supersedes=("learning_rate.warmup-too-long", "learning_rate.decay-inside-warmup"),
        ),
        rule(
            "empty-split",
            "split",
            empty_split,
            "AssertionError while the dataset is built",
            "the shares of training, validation and test are divided by their sum",
        ),
        rule("save-without-interval", "save", save_without_interval, ASSERTED, "the save interval has no default"),
    )
