"""Inspects a transformers architecture without data: `python -m meshwright.engine.architecture` reads a config.json.

The config comes from stdin and the description goes to stdout, both as JSON. The adviser runs it as a process of its
own (models/inspection.py): it never imports torch itself, and a config that needs too much time or memory ends there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.models.reader import decode_float
from meshwright.models.readers.fields import SHAPE_KEYS

MEMORY_BYTES = 24 << 30  # of address space, most of which torch only reserves
TRACED_TOKENS = (64, 128)
TRACED_LAYERS = 16
TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "top_k")
NOT_TEXT = re.compile(r"(^|\.)(vision|visual|audio|image|speech)|_tower|_encoder")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "index_topk")
# Keys that transformers ignores in every class: prediction heads, which it does not build, and those of other uses.
_OTHER = frozenset(
    ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "moe_layer_freq", "use_cache")
)
SCAN = ("A_log", "dt_bias", "dt_proj", "x_proj", "time_decay", "rg_lru", "recurrent_gate_weight")


def describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers builds from a config: sizes, and the parameters of every different layer by part."""
    import torch

    config = _config(values)
    text = config.get_text_config()
    with torch.device("meta"):
        model = _model(config, values)
    body = layer_list(model)
    seen: set[int] = set()
    rows: list[dict[str, Any]] = []
    for place, layer in enumerate(model.get_submodule(body)):
        rows.append(_layer(layer, place, text, seen))
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is None or head.weight is embedding
    rest = [p for p in model.parameters() if id(p) not in seen and p is not embedding]
    if not tied:
        rest = [p for p in rest if p is not head.weight and p is not head.bias]
    return {
        "class": type(model).__name__,
        "ignored": _ignored(values, config),
        "transformers": _version(),
        "hidden": int(embedding.shape[1]),
        "vocab": int(embedding.shape[0]),
        "tied": bool(tied),
        "head_bias": bool(not tied and head.bias is not None),
        "head": 0 if tied else int(head.weight.numel()),
        "positions": _first(text, POSITIONS) or 0,
        "activation": str(_first(text, ("hidden_act", "hidden_activation", "activation_function")) or "silu"),
        "rest": sum(p.numel() for p in rest),
        "other_encoders": any(NOT_TEXT.search(name) for name, _ in model.named_modules()),
        "total": sum(p.numel() for p in model.parameters()),
        "layers": rows,
        "flops": _traced_flops(model, int(embedding.shape[0]), len(rows)),
    }


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _config(values: Mapping[str, Any]) -> Any:
    """Return the config of a model_type, or of the class in architectures; remote code is never run."""
    import transformers
    from transformers import CONFIG_MAPPING

    kept = {k: v for k, v in values.items() if k not in ("auto_map", "quantization_config", "trust_remote_code")}
    model_type = str(kept.get("model_type"))
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type](**{k: v for k, v in kept.items() if k != "model_type"})
    for name in kept.get("architectures") or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        config_class = getattr(found, "config_class", None)
        if config_class is not None:
            return config_class(**{k: v for k, v in kept.items() if k != "model_type"})
    raise LookupError(f"transformers {transformers.__version__} has no model type {model_type!r}")


def _ignored(values: Mapping[str, Any], config: Any) -> list[str]:
    """Return the keys of the file that change shapes and that the built model does not follow."""
    text = config.get_text_config()
    section = next((key for key in values if text is not config and getattr(config, key, None) is text), None)
    given = values if section is None else values[section]
    if text is not config and section is None:  # the sizes of the file are outside the section that has the decoder
        sizes = [k for k, v in values.items() if _is_size(v) and v and "token" not in k and k not in _OTHER]
        return [key for key in sizes if _first(text, (key,)) != values[key]]
    different = [k for k in SHAPE_KEYS if _is_size(given.get(k)) and _first(text, (k,)) not in (None, given[k])]
    known = {field.name for field in dataclasses.fields(text)} if dataclasses.is_dataclass(text) else set(SHAPE_KEYS)
    known |= set(getattr(text, "attribute_map", ()))
    unknown = [k for k in SHAPE_KEYS if given.get(k) and k not in known and k not in _OTHER]
    return different + [key for key in unknown if not _has_influence(text, given, key)]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _has_influence(text: Any, given: Mapping[str, Any], key: str) -> bool:
    """Return whether the config class reads a key that it does not declare."""
    kept = {k: v for k, v in given.items() if k not in ("model_type", "auto_map", "quantization_config")}
    try:
        one, other = type(text)(**kept), type(text)(**{k: v for k, v in kept.items() if k != key})
    except Exception:  # the class needs the key
        return True
    return bool({k: v for k, v in one.to_dict().items() if k != key} != other.to_dict())


def _model(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the model of a config: with its encoder of images, if the file has one or names the class that has it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    encodes = getattr(config, "is_decoder", True) is False and "gpt" not in config.model_type  # GPT-NeoX sets it too
    if getattr(config, "is_encoder_decoder", False) or encodes:
        raise LookupError(f"{config.model_type} is not a decoder")
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if type(config) in AutoModelForImageTextToText._model_mapping:
        whole: Any = AutoModelForImageTextToText._model_mapping[type(config)]
        named = values.get("architectures")
        if values.get("vision_config") or (isinstance(named, list) and whole.__name__ in named):
            autos.reverse()
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto.from_config(config, attn_implementation="eager")
    raise LookupError(f"{config.model_type} is not a causal language model in transformers")


def layer_list(model: Any) -> str:
    """Return the path of the decoder layers: the outermost module list with the most parameters."""
    from torch import nn

    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{known}.") for known in sizes)
        if isinstance(module, nn.ModuleList) and len(module) and not inside and not NOT_TEXT.search(name):
            sizes[name] = sum(p.numel() for p in module.parameters())
    if not sizes:
        raise LookupError("no list of layers was found")
    return max(sizes, key=lambda name: sizes[name])


def _layer(layer: Any, place: int, text: Any, seen: set[int]) -> dict[str, Any]:
    """Return the parameters of one layer by part; a parameter that several layers share counts in the first."""
    own = [(n, p) for n, p in layer.named_parameters() if id(p) not in seen]
    seen.update(id(p) for _, p in own)
    experts = _experts(own)
    routed = {name for name, _ in own if experts and experts["pattern"].search(name)}
    plain = [(n, p) for n, p in own if n not in routed]
    matrices, vectors = _split(layer, plain)
    kinds = getattr(text, "layer_types", None)
    listed = isinstance(kinds, (list, tuple)) and place < len(kinds)
    return {
        "type": str(kinds[place]) if listed and kinds is not None else "",
        "matrices": [[n, *map(int, p.shape)] for n, p in matrices],
        "vectors": sum(p.numel() for _, p in vectors),
        "scan": any(word in n for n, _ in own for word in SCAN),
        "conv": any("conv" in n for n, _ in own),
        "attention": _attention(layer),
        "experts": {k: v for k, v in experts.items() if k != "pattern"} if experts else None,
        "topk": _first(text, TOPK),
    }


def _split(layer: Any, named: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return matmul weights and all other parameters: norms, biases, convolutions, tables."""
    matrices: list[tuple[str, Any]] = []
    vectors: list[tuple[str, Any]] = []
    for name, parameter in named:
        owner = layer.get_submodule(name.rpartition(".")[0])
        leaf = ".".join(name.split(".")[-2:])
        is_table = any(word in leaf for word in ("conv1d", "conv_weight", "embed", "A_log", "norm"))
        is_linear = "Conv" not in _kind(owner) or _kind(owner) == "Conv1D"  # GPT-2's Conv1D is a linear
        chosen = matrices if parameter.dim() >= 2 and is_linear and not is_table else vectors
        chosen.append((name, parameter))
    return matrices, vectors


def _kind(module: Any) -> str:
    return type(module).__name__


def _experts(named: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the routed experts: parameters with a leading dimension of experts, or equal numbered modules."""
    fused = [(n, p) for n, p in named if "expert" in n and "shared" not in n and p.dim() >= 2]
    numbered = re.compile(r"experts\.(\d+)\.")
    counted = {int(found[1]) for n, _ in named if (found := numbered.search(n)) and "shared" not in n}
    if counted:
        mine = [(n, p) for n, p in named if numbered.search(n) and "shared" not in n]
        pattern, count = re.compile(r"^(?!.*shared).*experts\.\d+\."), len(counted)
    else:
        stacked = [(n, p) for n, p in fused if p.dim() == 3 and re.search(r"(^|\.)experts\.", n)]
        if not stacked:
            return None
        count = int(stacked[0][1].shape[0])
        pattern = re.compile(r"^(?!.*shared).*(^|\.)experts\.")
        mine = [(n, p) for n, p in named if pattern.search(n)]
    matrix = sum(p.numel() for n, p in mine if p.dim() >= 2 and not n.endswith("bias"))
    named_down = (p for n, p in mine if re.search(r"down|w2|output_linear|dense_4h", n) and p.dim() >= 2)
    down = next(named_down, min((p for _, p in mine if p.dim() >= 2), key=lambda p: p.numel()))
    return {
        "count": count,
        "matmul": matrix,
        "other": sum(p.numel() for _, p in mine) - matrix,
        "down": [int(size) for size in down.shape[-2:]],
        "pattern": pattern,
    }


def _attention(layer: Any) -> dict[str, Any] | None:
    """Return the softmax attention of a layer, if it has one: its names and numbers as the module has them."""
    for name, module in layer.named_modules():
        lowered = _kind(module).lower()
        if not name or "attention" not in lowered or any(w in lowered for w in ("linear", "lightning", "delta")):
            continue
        if not any(p.dim() >= 2 for p in module.parameters()):
            continue
        config = getattr(module, "config", None)
        heads = _first(module, ("num_heads", "num_attention_heads", "n_heads")) or _first(
            config, ("num_attention_heads", "n_head", "n_heads", "num_heads")
        )
        width = _first(module, ("head_dim", "head_size", "attention_head_size", "qk_head_dim"))
        value = _first(module, ("v_head_dim",))
        window = _first(module, ("sliding_window", "window_size"))
        found = {"path": name, "heads": heads, "head_dim": width, "v_dim": value, "window": window}
        for key in LATENT:
            found[key] = _first(module, (key,)) or _first(config, (key,))
        return found
    return None


def _first(owner: Any, names: Iterable[str]) -> Any:
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # a value that every layer has for itself
            continue
        if isinstance(value, (int, str)) and not isinstance(value, bool) and value:
            return value
    return None


def _traced_flops(model: Any, vocab: int, layers: int) -> list[list[float]] | None:
    """Return forward FLOPs of two lengths, traced without data; None if the model's code needs values."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    if layers > TRACED_LAYERS:  # a trace of a deep model takes minutes
        return None
    for module in model.modules():  # experts without a loop over the chosen ones, which needs data
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "batched_mm"
    for masked in (False, True):  # some models read the tokens to build a mask; none reads a mask of four dimensions
        found = []
        try:
            for tokens in TRACED_TOKENS:
                with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
                    given = {"attention_mask": torch.zeros((1, 1, tokens, tokens))} if masked else {}
                    model.eval()(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False, **given)
                found.append([float(tokens), float(counter.get_total_flops())])
            return found
        except Exception:  # data-dependent code
            continue
    return None


def main() -> int:
    """Read a config from stdin and print its description, or one line with what is wrong."""
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical", OMP_NUM_THREADS="1")
    warnings.filterwarnings("ignore")
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    try:
        answer = describe(json.load(sys.stdin, object_hook=decode_float))
    except Exception as error:  # whatever a library raises is the reason that the config is refused
        lines = str(error).strip().splitlines() or [type(error).__name__]
        answer = {"error": " ".join(line.strip() for line in lines)[:300], "kind": type(error).__name__}
    out.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
