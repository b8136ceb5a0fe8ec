"""A flavor for a model that torchtitan does not list: a module that registers it in the model of its family."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.model_match import from_sizes, own_numbers
from meshwright.frameworks.torchtitan.models import FAMILIES
from meshwright.models import Attention, Dense, ModelSpec, MoE, find, names, parts
from meshwright.models.numerics import Numerics
from meshwright.recipes.model_changes import numerics_for, sizes
from meshwright.recipes.types import Recipe

MODULE = "own_model"
CUSTOM_IMPORT = "experimental.custom_import"
_HEAD = '"""The flavor {flavor} of {name} in torchtitan 0.2.2, imported by [experimental] custom_import."""\n\n'


class OwnFlavor(msgspec.Struct, frozen=True):
    """A model of torchtitan, and the flavor that the text of a module registers in it."""

    name: str
    flavor: str
    text: str


def with_type(recipe: Recipe, model: ModelSpec) -> ModelSpec:
    """Return the model with the type of the catalogue model that it is in other sizes; a file of flags names none."""
    if model.model_type or recipe.model not in names():
        return model
    return msgspec.structs.replace(model, model_type=find(recipe.model).model_type)


def own_flavor(recipe: Recipe, model: ModelSpec) -> OwnFlavor:
    """Return the flavor of a model in llama3 or qwen3 of torchtitan 0.2.2; raise InputError if neither computes it."""
    changed = bool(sizes(recipe)) or any(True for _ in own_numbers(recipe))
    flavor = re.sub(r"\W+", "_", model.name).strip("_") + ("_own" if changed else "")
    layers = {(layer.mixer, layer.ffn) for layer in model.layers}
    first = model.layers[0]
    mixer, ffn, numbers = first.mixer, first.ffn, numerics_for(recipe)
    if model.model_type in FAMILY and len(layers) > 1:
        kinds = " and ".join(dict.fromkeys(parts.kind_of_layer(layer) for layer in model.layers))
        own = FAMILY[model.model_type]
        raise _impossible(model, f"its {own} repeats one kind of layer, where this model has several ({kinds})")
    if model.model_type not in FAMILY or not isinstance(mixer, Attention) or ffn is None:
        given = model.model_type or "a shape without a Hugging Face model type (--model config.json names one)"
        raise _impossible(model, f"its own flavors can be llama, mistral, qwen3 or qwen3_moe, not {given}")
    problem = next(_unsupported(model, mixer, numbers), "")
    if problem:
        raise _impossible(model, problem)
    if FAMILY[model.model_type] == "llama3":
        text = _llama(flavor, model, mixer, ffn, numbers)
        return OwnFlavor("llama3", flavor, _HEAD.format(flavor=flavor, name="llama3") + text)
    text = _qwen(flavor, model, mixer, ffn, numbers)
    return OwnFlavor("qwen3", flavor, _HEAD.format(flavor=flavor, name="qwen3") + text)


FAMILY = {"llama": "llama3", "mistral": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""torchtitan's model by Hugging Face model type."""


def _impossible(model: ModelSpec, why: str) -> InputError:
    reason = f"torchtitan has no model of this shape ({FAMILIES}), and {why}"
    return InputError(reason, field="model", value=model.name)


def _unsupported(model: ModelSpec, mixer: Attention, numbers: Numerics) -> Iterator[str]:
    """Yield what the model of the family does not compute."""
    own = FAMILY[model.model_type]
    if mixer.qkv_bias or mixer.out_bias:
        yield f"its {own} has no biases in attention"
    if mixer.window or model.activation != "silu":
        yield f"its {own} has full attention and SwiGLU only"
    if own == "llama3" and model.tied:
        yield "its llama3 does not tie the embeddings"
    if own == "llama3" and mixer.heads * mixer.head_dim != model.hidden:
        yield "its llama3 has a head_dim of hidden / heads"
    known = ("", "llama3") if own == "llama3" else ("",)
    if numbers.scaling_type not in known:
        yield f"its {own} has no RoPE scaling of type {numbers.scaling_type}"


def _llama(flavor: str, model: ModelSpec, mixer: Attention, ffn: Any, numbers: Numerics) -> str:
    """Return the module for llama3; its width of the feed-forward block is rounded up to multiple_of."""
    assert isinstance(ffn, Dense)
    derived = int(2 * 4 * model.hidden / 3)
    arguments: dict[str, Any] = {
        "dim": model.hidden, "n_layers": model.num_layers, "n_heads": mixer.heads, "n_kv_heads": mixer.kv_heads,
        "vocab_size": model.vocab, "multiple_of": ffn.width,
    }  # fmt: skip
    if derived > ffn.width:
        arguments["ffn_dim_multiplier"] = int(1000 * ffn.width / derived) / 1000
    arguments |= _numbers(numbers)
    scaling = numbers.rope_scaling or {}
    given = {
        "scaling_factor": float(scaling.get("factor", 1.0)),
        "low_freq_factor": scaling.get("low_freq_factor"),
        "high_freq_factor": scaling.get("high_freq_factor"),
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings"),
    }
    shown = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    return (
        "from torchtitan.models.llama3 import TransformerModelArgs, llama3_args\n"
        "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n\n"
        f'llama3_args["{flavor}"] = TransformerModelArgs(\n{_lines(arguments)}'
        f"    rope_scaling_args=RoPEScalingArgs({shown}),\n"
        f")  # feed-forward width: multiple_of = {ffn.width}\n"
    )


def _qwen(flavor: str, model: ModelSpec, mixer: Attention, ffn: Any, numbers: Numerics) -> str:
    """Return the module for qwen3, dense or with experts in every layer."""
    arguments: dict[str, Any] = {
        "dim": model.hidden, "n_layers": model.num_layers, "n_heads": mixer.heads, "n_kv_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim, "vocab_size": model.vocab, "qk_norm": mixer.qk_norm != "none",
        "enable_weight_tying": model.tied,
    }  # fmt: skip
    arguments |= _numbers(numbers)
    imports, experts = "from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args\n", ""
    if isinstance(ffn, MoE):
        imports = f"from torchtitan.models.moe import MoEArgs\n{imports}"
        arguments |= {"moe_enabled": True, "moe_inter_dim": ffn.width}
        route = numbers.norm_topk_prob is not False
        experts = (
            f"    moe_args=MoEArgs(\n        num_experts={ffn.experts},\n        num_shared_experts=0,\n"
            f'        top_k={ffn.topk},\n        score_func="softmax",\n        route_norm={route},\n'
            "        route_scale=1.0,\n        score_before_experts=False,\n    ),\n"
        )
    else:
        arguments["hidden_dim"] = ffn.width
    return f'{imports}\nqwen3_args["{flavor}"] = Qwen3ModelArgs(\n{_lines(arguments)}{experts})\n'


def _numbers(numbers: Numerics) -> dict[str, Any]:
    """Return the numbers of the config; unset, they are those of its Hugging Face class."""
    return {"norm_eps": numbers.norm_eps or 1e-6, "rope_theta": numbers.rope_theta or 10000.0}


def _lines(arguments: dict[str, Any]) -> str:
    return "".join(f"    {key}={value},\n" for key, value in arguments.items())


class RegisteredFlavor(msgspec.Struct, frozen=True):
    """A flavor that a module registers: its model, and the numbers of it that no size has."""

    model: ModelSpec
    numbers: Mapping[str, float]


REGISTRIES = {"llama3_args": "llama3", "qwen3_args": "qwen3"}


def registered_flavor(text: str, name: str, flavor: str) -> RegisteredFlavor | None:
    """Return the flavor of llama3 or qwen3 that a module registers with literal sizes; None if it does not.

    Nothing is executed: `llama3_args["NAME"] = TransformerModelArgs(dim=4096, …)` is read.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            continue
        key = target.slice.value if isinstance(target.slice, ast.Constant) else None
        if REGISTRIES.get(target.value.id) != name or key != flavor or not isinstance(node.value, ast.Call):
            continue
        return _registered(name, flavor, _literals(node.value))
    return None


def _literals(call: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments with literal values, and those of a call inside as a dictionary."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Call):
            found[str(keyword.arg)] = _literals(keyword.value)
        elif isinstance(keyword.value, ast.Constant):
            found[str(keyword.arg)] = keyword.value.value
    return found


def _registered(name: str, flavor: str, given: Mapping[str, Any]) -> RegisteredFlavor | None:
    """Return the model of torchtitan's arguments; None if a size is missing."""
    heads = given.get("n_heads")
    sizes = {
        "hidden_size": given.get("dim"), "num_hidden_layers": given.get("n_layers"),
        "num_attention_heads": heads, "num_key_value_heads": given.get("n_kv_heads", heads),
        "vocab_size": given.get("vocab_size"), "rope_theta": given.get("rope_theta"),
        "rms_norm_eps": given.get("norm_eps"),
    }  # fmt: skip
    if not all(sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")):
        return None
    kind = "llama" if name == "llama3" else "qwen3_moe" if given.get("moe_enabled") else "qwen3"
    if kind == "llama":
        width = int(2 * 4 * given["dim"] / 3)
        width = int(given.get("ffn_dim_multiplier", 1) * width) if given.get("ffn_dim_multiplier") else width
        step = given.get("multiple_of", 256)
        sizes |= {"intermediate_size": step * -(-width // step), "tie_word_embeddings": False}
    else:
        sizes |= {"head_dim": given.get("head_dim"), "tie_word_embeddings": bool(given.get("enable_weight_tying"))}
        sizes |= {"intermediate_size": given.get("hidden_dim")}
    if kind == "qwen3_moe":
        experts = given.get("moe_args") or {}
        sizes |= {"num_experts": experts.get("num_experts"), "num_experts_per_tok": experts.get("top_k")}
        sizes |= {"moe_intermediate_size": given.get("moe_inter_dim")}
    numbers = {"rope_theta": given.get("rope_theta"), "norm_eps": given.get("norm_eps")}
    try:
        model = from_sizes(kind, flavor, **sizes)
    except InputError:
        return None
    return RegisteredFlavor(model, {key: float(value) for key, value in numbers.items() if value})
