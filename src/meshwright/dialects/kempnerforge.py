"""KempnerForge: TOML files, and the command that starts one with settings on top."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.dialects.contents import open_file
from meshwright.dialects.dialect import Asked, Content, Dialect, ForeignRule, Look, Parsed, Problem
from meshwright.dialects.mapping import nested, relevant, to_settings, without_defaults
from meshwright.dialects.shapes import from_sizes
from meshwright.dialects.types import Program, Said, Settings, Written
from meshwright.errors import InputError
from meshwright.models import Attention, Dense, ModelSpec, MoE
from meshwright.recipes.foreign import words
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.dialects.shell import Launched

VERSION = "commit 5666d0d, 2026-06-30"
NAMES = "kempnerforge"
SECTIONS = frozenset(key.split(".")[0] for key in words(NAMES)) | {"vision_encoder", "adapter", "vlm", "video"}
OPEN = ("vision_encoder.", "adapter.", "vlm.", "video.", "data.datasets", "data.phases", "data.anneal_weights")
OPEN_NAMES = ("metrics.wandb_", "data.hf_", "eval.hf_", "checkpoint.dyn_ckpt_window")
"""Keys that are a list of their own, or of parts that are not read here."""


def _recognises(content: Content) -> int:
    if content.format == "toml":
        marks = {"model.dim", "model.n_layers", "train.seq_len", "train.batch_size", "train.max_steps"}
        return 3 if marks & content.settings.keys() else 0
    return 3 if any(_starts(one) for one in content.launched) else 0


def _starts(one: Launched) -> bool:
    name = str(one.program.value)
    return Path(name).name == "train.py" and bool(one.args) and str(one.args[0].value).endswith(".toml")


def _parse(content: Content) -> Parsed:
    if content.format == "toml":
        return _parsed(content.settings, content, Asked())
    one = next(one for one in content.launched if _starts(one))
    named = one.args[0]
    path = (content.folder or Path()) / str(named.value)
    if named.unresolved or content.folder is None or not path.is_file():
        raise InputError("the config that the script starts is not there", field="file", value=str(named.value))
    said = {**open_file(path).settings, **dict(_arguments(one.args[1:]))}
    return _parsed(said, content, _asked(one), one.env)


def _parsed(settings: Settings, content: Content, asked: Asked, env: Settings | None = None) -> Parsed:
    model = _model(settings)
    files = tuple(dict.fromkeys([content.path, *(said.file for said in settings.values())]))
    # Sequence parallelism is not asked for: it comes with tensor parallelism, where their plan has it.
    plain = model is not None and model.moe is None and not model.tied
    cut = _value(settings, "distributed.tp") > 1 and _value(settings, "distributed.pp") == 1
    own = {"layout.sp": bool(plain and cut), "precision.master": "bf16", "precision.moments": "bf16"}
    return Parsed(
        settings=settings,
        name=Path(content.path).stem,
        model=model,
        asked=asked,
        env=env or {},
        files=files,
        own=own,
    )


def _arguments(args: tuple[Said, ...]) -> Iterator[tuple[str, Said]]:
    """`--section.key=value`, or `--section.key` alone for true."""
    for said in args:
        key, equals, text = str(said.value).lstrip("-").partition("=")
        value: Any = True
        if equals:
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                value = text
        yield key, msgspec.structs.replace(said, value=value)


def _asked(one: Launched) -> Asked:
    nodes, per_node = (_number(said) for said in (one.nodes, one.gpus_per_node))
    return Asked(nodes=nodes, gpus_per_node=per_node, gpu=one.gpu, said=one.gpus_per_node)


def _number(said: Said | None) -> int | None:
    return said.value if said is not None and not said.unresolved and isinstance(said.value, int) else None


def _value(settings: Settings, key: str) -> Any:
    """The value of a key, or their default where it is unsaid or not of that kind."""
    default = words(NAMES)[key].default
    said = settings.get(key)
    if said is None or said.unresolved:
        return default
    wanted = (int, float) if isinstance(default, int | float) and not isinstance(default, bool) else object
    return said.value if isinstance(said.value, wanted) or default is None else default


def _model(settings: Settings) -> ModelSpec | None:
    """The model of these sizes; None where they make none, which the rules of the sizes then tell."""
    sizes = {key: _value(settings, f"model.{key}") for key in SIZES}
    heads, dim = sizes["n_heads"], sizes["dim"]
    ffn = sizes["ffn_hidden_dim"] or _ffn(dim, sizes["ffn_dim_multiplier"])
    common = {
        "hidden_size": dim,
        "num_hidden_layers": sizes["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["n_kv_heads"] or heads,
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["max_seq_len"],
        "tie_word_embeddings": sizes["tie_embeddings"],
    }
    experts = sizes["num_experts"]
    try:
        if not experts:
            return from_sizes("qwen3" if sizes["qk_norm"] else "llama", intermediate_size=ffn, **common)
        width = round(ffn * sizes["moe_expert_ffn_multiplier"])
        if sizes["moe_frequency"] == 1:
            return from_sizes(
                "mixtral",
                intermediate_size=width,
                num_local_experts=experts,
                num_experts_per_tok=sizes["moe_top_k"],
                **common,
            )
        return from_sizes(
            "qwen3_moe",
            intermediate_size=ffn,
            moe_intermediate_size=width,
            num_experts=experts,
            num_experts_per_tok=sizes["moe_top_k"],
            decoder_sparse_step=sizes["moe_frequency"],
            head_dim=dim // heads,
            **common,
        )
    except (InputError, TypeError, ZeroDivisionError, OverflowError, ValueError):
        return None


SIZES = (
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim_multiplier", "ffn_hidden_dim", "max_seq_len",
    "tie_embeddings", "qk_norm", "num_experts", "moe_top_k", "moe_frequency", "moe_expert_ffn_multiplier",
)  # fmt: skip


def _ffn(dim: int, multiplier: float) -> int:
    return 256 * ceil(int(4 * dim * 2 / 3 * multiplier) / 256)


def _data_ranks(recipe: Recipe, on: Cluster) -> int:
    """Ranks that read different samples; expert parallelism has ranks of its own here, which read the same."""
    layout = recipe.layout
    rest = max(1, on.world // (layout.tp * layout.pp * layout.cp * layout.ep * layout.dp_replicate))
    return layout.dp_replicate * (layout.dp_shard if layout.dp_shard > 0 else rest)


def _complete(recipe: Recipe, parsed: Parsed, on: Cluster) -> Recipe:
    accumulation = _value(parsed.settings, "train.grad_accum_steps")
    batch = recipe.layout.micro_batch_size * max(1, int(accumulation)) * _data_ranks(recipe, on)
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))


def _spell(key: str, value: Any) -> str:
    text = {True: "true", False: "false", None: '""'}.get(value) if value is None or isinstance(value, bool) else None
    if text is None:
        text = f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
    return f"{key} = {text}"


def _no_table(look: Look) -> Iterator[Problem]:
    """Sizes that the sections refuse by themselves."""
    dim, heads, kv = look("model.dim"), look("model.n_heads"), look("model.n_kv_heads")
    numbers = [value for value in (dim, heads, kv) if value is not None]
    if not all(isinstance(value, int) and value > 0 for value in numbers):
        yield Problem("model sizes are whole numbers above 0")
    elif dim % heads:
        yield Problem(f"dim={dim} is not divisible by n_heads={heads}", key="model.n_heads")
    elif kv and heads % kv:
        yield Problem(f"n_heads={heads} is not divisible by n_kv_heads={kv}", key="model.n_kv_heads")


def _too_long(look: Look) -> Problem | None:
    length, longest = look("train.seq_len"), look("model.max_seq_len")
    if not (isinstance(length, int) and isinstance(longest, int)) or length <= longest:
        return None
    return Problem(
        f"seq_len={length} is longer than model.max_seq_len={longest}, the length of the rotary table",
        (_spell("model.max_seq_len", length),),
    )


def _no_data_to_evaluate(look: Look) -> Problem | None:
    named = look("eval.dataset_path") or any(key.startswith("eval.hf_dataset_name") for key in look.under("eval"))
    if look("eval.enabled") is not True or named:
        return None
    return Problem(
        "evaluation is on and has neither eval.dataset_path nor eval.hf_dataset_name",
        (_spell("eval.enabled", False),),
        key="eval.enabled",
    )


RANGES: Mapping[str, tuple[float, float, bool]] = {
    "train.batch_size": (0, float("inf"), True),
    "train.seq_len": (0, float("inf"), True),
    "train.max_steps": (0, float("inf"), True),
    "train.grad_accum_steps": (0, float("inf"), True),
    "train.grad_clip_norm": (0, float("inf"), True),
    "scheduler.min_lr_ratio": (0, 1, False),
    "scheduler.rex_alpha": (0, float("inf"), True),
    "checkpoint.interval": (0, float("inf"), True),
    "metrics.log_interval": (0, float("inf"), True),
    "eval.interval": (0, float("inf"), True),
    "eval.steps": (0, float("inf"), True),
    "data.mix_temperature": (0, float("inf"), True),
    "model.moe_expert_ffn_multiplier": (0, float("inf"), True),
    "model.moe_frequency": (0, float("inf"), True),
}
"""Least, most, and whether the least itself is refused."""


def _out_of_range(look: Look) -> Iterator[Problem]:
    for key, (least, most, above) in RANGES.items():
        value = look(key)
        if not look.says(key) or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value > most or value < least or (above and value == least):
            wanted = f"above {least:g}" if above else f"from {least:g} to {most:g}"
            yield Problem(f"{key}={value} must be {wanted}", (_spell(key, words(NAMES)[key].default),), key=key)


def _profile_ends_first(look: Look) -> Problem | None:
    start, end = look("profiling.start"), look("profiling.end")
    if not (isinstance(start, int) and isinstance(end, int)) or end > start:
        return None
    return Problem(
        f"profiling.end={end} must come after profiling.start={start}", (_spell("profiling.end", start + 3),)
    )


def _annealed_and_phased(look: Look) -> Problem | None:
    if not (look.under("data.phases") and look("data.anneal_start_step")):
        return None
    return Problem("data.phases and data.anneal_start_step exclude each other", key="data.anneal_start_step")


def _needs_section(look: Look) -> Iterator[Problem]:
    for section, needed in (("vlm", "vision_encoder"), ("video", "vlm")):
        if look.under(section) and not look.under(needed):
            yield Problem(f"[{section}] needs [{needed}]", key=look.under(section)[0])


def _vision_in_stages(look: Look) -> Problem | None:
    if not look.under("vlm") or look("distributed.pp") in (None, 1):
        return None
    return Problem("models that see have no pipeline here", (_spell("distributed.pp", 1),), key="distributed.pp")


RULES = (
    ForeignRule(
        "kempnerforge.sizes",
        "error",
        ("model.dim", "model.n_heads", "model.n_kv_heads"),
        _no_table,
        symptom="ValueError while the config is read",
        cause="the model section checks its own sizes before anything else runs",
    ),
    ForeignRule(
        "kempnerforge.longer-than-rotary-table",
        "error",
        ("train.seq_len", "model.max_seq_len"),
        _too_long,
        symptom="ValueError from validate",
        cause="positions are read from a table of max_seq_len entries",
    ),
    ForeignRule(
        "kempnerforge.nothing-to-evaluate",
        "error",
        ("eval.enabled",),
        _no_data_to_evaluate,
        symptom="ValueError from validate",
        cause="evaluation has no data set of its own to fall back on",
    ),
    ForeignRule(
        "kempnerforge.out-of-range",
        "error",
        tuple(RANGES),
        _out_of_range,
        symptom="ValueError while the section is read",
        cause="each section checks its own numbers",
    ),
    ForeignRule(
        "kempnerforge.profile-ends-first",
        "error",
        ("profiling.end", "profiling.start"),
        _profile_ends_first,
        symptom="ValueError while the section is read",
        cause="the last profiled step must come after the first",
    ),
    ForeignRule(
        "kempnerforge.annealed-and-phased",
        "error",
        ("data.anneal_start_step",),
        _annealed_and_phased,
        symptom="ValueError while the data section is read",
        cause="annealing is one kind of phase; only one of the two may be asked for",
    ),
    ForeignRule(
        "kempnerforge.section-missing",
        "error",
        (),
        _needs_section,
        symptom="ValueError while the config is read",
        cause="a part of a model that sees builds on another part",
    ),
    ForeignRule(
        "kempnerforge.vision-in-stages",
        "error",
        ("distributed.pp",),
        _vision_in_stages,
        symptom="ValueError from validate",
        cause="the stages cannot hold the vision encoder",
    ),
)
KEEP = (
    "train.batch_size", "train.seq_len", "train.max_steps", "train.grad_accum_steps", "train.mixed_precision",
    "train.activation_checkpointing", "train.compile_model", "optimizer.name", "optimizer.lr", "scheduler.name",
    "scheduler.warmup_steps", "scheduler.min_lr_ratio", "distributed.dp_shard", "distributed.tp", "distributed.pp",
    "distributed.ep",
)  # fmt: skip


def _write(recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    if recipe.goal != "pretrain":
        raise InputError("KempnerForge pretrains; it has no fine-tuning", field="goal", value=recipe.goal)
    sizes = _sizes(model)
    fields = [key for key in relevant(recipe, model) if key not in FOLLOWS]
    settings, unsaid = to_settings(DIALECT, recipe, fields)
    ranks = recipe.layout.micro_batch_size * _data_ranks(recipe, on)
    if recipe.train.global_batch_size % ranks:
        raise InputError(
            f"is not a multiple of {ranks}: micro batch × data ranks there",
            field="train.global_batch_size",
            value=recipe.train.global_batch_size,
        )
    settings = {**settings, "train.grad_accum_steps": recipe.train.global_batch_size // ranks}
    sizes["max_seq_len"] = max(recipe.data.seq_length, model.max_seq_length or 0)
    tables = nested({f"model.{key}": value for key, value in sizes.items()})
    tables |= nested(without_defaults(DIALECT, settings, KEEP))
    name = f"{recipe.name or 'recipe'}.toml"
    return Written(
        dialect="kempnerforge",
        files={name: _text(tables, recipe)},
        program=Program(words=("scripts/train.py", name)),
        unsaid=unsaid,
    )


FOLLOWS = ("train.global_batch_size", "layout.sp", "precision.master", "precision.moments")
"""Fields that are not said there: they follow from others, or have one value."""


def _sizes(model: ModelSpec) -> dict[str, Any]:
    """The model section; models that KempnerForge cannot build are refused."""
    layers, mixer, ffn = model.layers, model.layers[0].mixer if model.layers else None, model.layers[-1].ffn
    same = all(layer.mixer == mixer for layer in layers)
    if model.kind != "causal_lm" or not same or not isinstance(mixer, Attention) or mixer.window or mixer.qkv_bias:
        raise InputError("KempnerForge builds plain Llama-like models only", field="model", value=model.name)
    plain = mixer.q_width == model.hidden and not (mixer.out_bias or mixer.output_gate or mixer.sinks)
    if not plain or model.activation != "silu" or model.learned_positions or not isinstance(ffn, Dense | MoE):
        raise InputError("KempnerForge builds plain Llama-like models only", field="model", value=model.name)
    sizes: dict[str, Any] = {
        "dim": model.hidden,
        "n_layers": model.num_layers,
        "n_heads": mixer.heads,
        "n_kv_heads": mixer.kv_heads,
        "vocab_size": model.vocab,
        "ffn_hidden_dim": ffn.width,
        "tie_embeddings": model.tied,
        "qk_norm": mixer.qk_norm != "none",
    }
    if isinstance(ffn, MoE):
        sizes |= {"num_experts": ffn.experts, "moe_top_k": ffn.topk}
        dense = next((layer.ffn for layer in layers if isinstance(layer.ffn, Dense)), None)
        if dense is not None:
            sizes |= {
                "moe_frequency": next(i for i, layer in enumerate(layers) if isinstance(layer.ffn, MoE)) + 1,
                "ffn_hidden_dim": dense.width,
                "moe_expert_ffn_multiplier": ffn.width / dense.width,
            }
    said = {f"model.{key}": Said(value, 0, "") for key, value in sizes.items()}
    built = _model(said)
    if built is None or built.params.total != model.params.total:
        raise InputError("KempnerForge cannot build this model", field="model", value=model.name)
    return sizes


def _text(tables: dict[str, Any], recipe: Recipe) -> str:
    import tomlkit

    head = f"# {recipe.name} for KempnerForge ({VERSION}), written by meshwright export\n\n"
    return head + tomlkit.dumps(tables)


DIALECT = Dialect(
    name="kempnerforge",
    title="KempnerForge",
    version=VERSION,
    engine="kempnerforge",
    forms=("TOML files", "the command `torchrun … scripts/train.py FILE.toml --section.key=value`"),
    recognises=_recognises,
    parse=_parse,
    spell=_spell,
    rules=RULES,
    complete=_complete,
    write=_write,
    known=lambda key: key.startswith((*OPEN, *OPEN_NAMES)),
)
