"""Reading KempnerForge: TOML files, and the command that starts one with settings on top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import gpu_request_of, value_or_default
from meshwright.frameworks.framework import Content, GpuRequest, ParsedConfig
from meshwright.frameworks.load import open_file
from meshwright.frameworks.model_match import from_sizes
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

TABLE = "kempnerforge"
MARKS = frozenset(("model.dim", "model.n_layers", "train.seq_len", "train.batch_size", "train.max_steps"))
"""Keys that no other TOML framework has."""
PURE_BF16 = {"precision.master": "bf16", "precision.moments": "bf16", "precision.grads": "bf16"}
"""What its parameters are kept in; there is no key for it."""


def recognises(content: Content) -> int:
    if content.format == "toml":
        return 3 if MARKS & content.settings.keys() else 0
    return 3 if any(_starts(one) for one in content.launches) else 0


def _starts(one: LaunchCommand) -> bool:
    name = str(one.program.value)
    return Path(name).name == "train.py" and bool(one.args) and str(one.args[0].value).endswith(".toml")


def parse(content: Content) -> ParsedConfig:
    if content.format == "toml":
        return _parsed(content.settings, content, GpuRequest())
    one = next((one for one in content.launches if _starts(one)), None)
    if one is None:
        raise InputError("starts no training of KempnerForge", field="file", value=content.path)
    named = one.args[0]
    path = (content.folder or Path()) / str(named.value)
    if named.unresolved or content.folder is None or not path.is_file():
        raise InputError("the config that the script starts is not there", field="file", value=str(named.value))
    setting = {**open_file(path).settings, **dict(_arguments(one.args[1:]))}
    return _parsed(setting, content, gpu_request_of(one), one.env)


def _parsed(settings: Settings, content: Content, asked: GpuRequest, env: Settings | None = None) -> ParsedConfig:
    model = model_of(settings)
    files = tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())]))
    # Sequence parallelism is not asked for: it comes with tensor parallelism, where their plan has it.
    plain = model is not None and model.moe is None and not model.tied
    cut = (
        value_or_default(TABLE, settings, "distributed.tp") > 1
        and value_or_default(TABLE, settings, "distributed.pp") == 1
    )
    own = {"layout.sp": bool(plain and cut), **PURE_BF16}
    return ParsedConfig(
        settings=settings,
        name=Path(content.path).stem,
        model=model,
        gpu_request=asked,
        env=env or {},
        files=files,
        field_values=own,
    )


def _arguments(args: tuple[SourcedValue, ...]) -> Iterator[tuple[str, SourcedValue]]:
    """`--section.key=value`, or `--section.key` alone for true."""
    for setting in args:
        key, equals, text = str(setting.value).lstrip("-").partition("=")
        meant: Any = True
        if equals:
            try:
                meant = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                meant = text
        yield key, msgspec.structs.replace(setting, value=meant)


def model_of(settings: Settings) -> ModelSpec | None:
    """The model of these sizes; None where they make none, which the rules of the sizes then tell."""
    sizes = {key: value_or_default(TABLE, settings, f"model.{key}") for key in SIZES}
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


def data_ranks(recipe: Recipe, on: Cluster) -> int:
    """Ranks that read different samples; expert parallelism has ranks of its own here, which read the same."""
    layout = recipe.layout
    return max(1, on.world // (layout.tp * layout.pp * layout.cp * layout.ep))


def complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    accumulation = value_or_default(TABLE, parsed.settings, "train.grad_accum_steps")
    batch = recipe.layout.micro_batch_size * max(1, int(accumulation)) * data_ranks(recipe, on)
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))
