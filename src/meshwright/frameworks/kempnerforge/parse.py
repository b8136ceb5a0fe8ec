"""Parse KempnerForge TOML files, and commands that start one with overrides."""

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

KEY_MAP = "kempnerforge"
UNIQUE_KEYS = frozenset(("model.dim", "model.n_layers", "train.seq_len", "train.batch_size", "train.max_steps"))
"""Keys that no other TOML framework has."""
PURE_BF16 = {"precision.master": "bf16", "precision.moments": "bf16", "precision.grads": "bf16"}
"""KempnerForge keeps parameters, gradients and moments in bf16; there is no key for it."""


def detect(content: Content) -> int:
    if content.format == "toml":
        return 3 if UNIQUE_KEYS & content.settings.keys() else 0
    return 3 if any(_is_training(launch) for launch in content.launches) else 0


def _is_training(launch: LaunchCommand) -> bool:
    name = str(launch.program.value)
    return Path(name).name == "train.py" and bool(launch.args) and str(launch.args[0].value).endswith(".toml")


def parse(content: Content) -> ParsedConfig:
    if content.format == "toml":
        return _parsed(content.settings, content, GpuRequest())
    launch = next((launch for launch in content.launches if _is_training(launch)), None)
    if launch is None:
        raise InputError("starts no KempnerForge training", field="file", value=content.path)
    config = launch.args[0]
    path = (content.folder or Path()) / str(config.value)
    if config.unresolved or content.folder is None or not path.is_file():
        raise InputError("config file referenced by the script not found", field="file", value=str(config.value))
    settings = {**open_file(path).settings, **dict(_parse_overrides(launch.args[1:]))}
    return _parsed(settings, content, gpu_request_of(launch), launch.env)


def _parsed(settings: Settings, content: Content, gpu_request: GpuRequest, env: Settings | None = None) -> ParsedConfig:
    model = model_of(settings)
    files = tuple(dict.fromkeys([content.path, *(setting.file for setting in settings.values())]))
    # Sequence parallelism has no key: it comes with tensor parallelism for dense, untied models without a pipeline.
    plain = model is not None and model.moe is None and not model.tied
    tensor_parallel = (
        value_or_default(KEY_MAP, settings, "distributed.tp") > 1
        and value_or_default(KEY_MAP, settings, "distributed.pp") == 1
    )
    field_values = {"layout.sp": bool(plain and tensor_parallel), **PURE_BF16}
    return ParsedConfig(
        settings=settings,
        name=Path(content.path).stem,
        model=model,
        gpu_request=gpu_request,
        env=env or {},
        files=files,
        field_values=field_values,
    )


def _parse_overrides(args: tuple[SourcedValue, ...]) -> Iterator[tuple[str, SourcedValue]]:
    """Parse `--section.key=value`, or `--section.key` for true."""
    for setting in args:
        key, equals, text = str(setting.value).lstrip("-").partition("=")
        value: Any = True
        if equals:
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                value = text
        yield key, msgspec.structs.replace(setting, value=value)


def model_of(settings: Settings) -> ModelSpec | None:
    """Return the model with these sizes; None if they are invalid, which the size rules report."""
    sizes = {key: value_or_default(KEY_MAP, settings, f"model.{key}") for key in SIZES}
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


def data_ranks(recipe: Recipe, cluster: Cluster) -> int:
    """Return the ranks with different samples; expert-parallel ranks are separate and read the same data."""
    layout = recipe.layout
    return max(1, cluster.world // (layout.tp * layout.pp * layout.cp * layout.ep))


def complete(recipe: Recipe, parsed: ParsedConfig, cluster: Cluster) -> Recipe:
    accumulation = value_or_default(KEY_MAP, parsed.settings, "train.grad_accum_steps")
    batch = recipe.layout.micro_batch_size * max(1, int(accumulation)) * data_ranks(recipe, cluster)
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, global_batch_size=batch))
