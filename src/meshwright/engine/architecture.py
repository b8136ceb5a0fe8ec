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
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from meshwright.json_text import decode_float
from meshwright.models.readers.architectures import SAME_AS
from meshwright.models.readers.fields import SHAPE_KEYS

MEMORY_BYTES = 24 << 30  # of address space, most of which torch only reserves
TRACED_TOKENS = (64, 128, 256)
TRACED_LAYERS = 8  # of a deeper model, one layer of each kind
TRACE_S = 2.0
UNUSED = ("torchao", "accelerate", "torchvision", "sklearn", "scipy", "pandas", "matplotlib", "flash_attn")
TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "top_k")
NOT_TEXT = re.compile(r"(^|\.)(vision|visual|audio|image|speech)|_tower|_encoder")
WIDTHS = ("hidden_size", "n_embd", "d_model")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
LATENT = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "index_topk",
    "o_groups",
    "o_lora_rank",
)
# Keys that transformers ignores in every class: prediction heads, which it does not build, and those of other uses.
_OTHER = frozenset(
    ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "moe_layer_freq", "use_cache")
)
LINEAR = ("lightning", "gateddelta", "deltaattention", "deltanet", "linearattention")  # in names of classes
SCAN = ("A_log", "dt_bias", "dt_proj", "x_proj", "time_decay", "rg_lru", "recurrent_gate_weight")


class NotADecoderError(LookupError):
    """A model type that transformers has, but not as a decoder that predicts the next token."""


def describe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers builds from a config: sizes, and the parameters of every different layer by part."""
    import torch

    config = _config(values)
    text = config.get_text_config()
    with torch.device("meta"):
        with _no_initial_values():
            model = _model(config, values)
        model.tie_weights()
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
        "layer_width": int(_first(text, WIDTHS) or embedding.shape[1]),
        "vocab": int(embedding.shape[0]),
        "tied": bool(tied),
        "head_bias": bool(not tied and head.bias is not None),
        "head": 0 if tied else int(head.weight.numel()),
        "positions": _first(text, POSITIONS) or 0,
        "activation": str(_first(text, ("hidden_act", "hidden_activation", "activation_function")) or "silu"),
        "rest": sum(p.numel() for p in rest),
        "rest_norms": _norms_of(model, {id(p) for p in rest}),
        "rest_linears": _linears_outside(model, body, {id(p) for p in rest}),
        "other_encoders": any(NOT_TEXT.search(name) for name, _ in model.named_modules()),
        "total": sum(p.numel() for p in model.parameters()),
        "layers": rows,
        "traced": _traced_flops(model, body, rows),
    }


def _norms_of(model: Any, chosen: set[int]) -> int:
    """Return how many of the chosen parameters are those of norms: the last one, and any before the layers."""
    norms = (one for one in model.modules() if "norm" in _kind(one).lower())
    return sum(p.numel() for one in norms for p in one.parameters(recurse=False) if id(p) in chosen)


def _no_initial_values() -> AbstractContextManager[Any]:
    """Return a context in which models are built without computing initial values, where transformers has one."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        return nullcontext()
    found: AbstractContextManager[Any] = no_init_weights()
    return found


def _linears_outside(model: Any, body: str, counted: set[int]) -> int:
    """Return the parameters of linears outside the layers that every token passes; 0 if there are other encoders."""
    from torch import nn

    if any(NOT_TEXT.search(name) for name, _ in model.named_modules()):
        return 0
    outside = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(f"{body}.")]
    return sum(m.weight.numel() for m in outside if id(m.weight) in counted)


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _config(values: Mapping[str, Any]) -> Any:
    """Return the config of a model_type, or of the class in architectures; remote code is never run."""
    import transformers
    from transformers import CONFIG_MAPPING

    unused = ("auto_map", "quantization_config", "trust_remote_code", "model_type")
    kept = {k: v for k, v in values.items() if k not in unused}
    model_type = str(values.get("model_type"))
    model_type = SAME_AS.get(model_type, model_type) if model_type not in CONFIG_MAPPING else model_type
    if model_type in CONFIG_MAPPING:
        return _filled(CONFIG_MAPPING[model_type], kept)
    for name in kept.get("architectures") or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        config_class = getattr(found, "config_class", None)
        if config_class is not None:
            return _filled(config_class, kept)
    raise LookupError(f"transformers {transformers.__version__} has no model type {model_type!r}")


def _filled(config_class: Any, values: Mapping[str, Any]) -> Any:
    """Return a config with these values; some sections (of DBRX) take no keys that only say what every config says."""
    from transformers import PretrainedConfig

    try:
        return config_class(**values)
    except ValueError as error:
        common = PretrainedConfig().to_dict()
        sections = {key: one for key, one in values.items() if isinstance(one, Mapping)}
        short = {
            key: {k: v for k, v in one.items() if k not in common or v != common[k]} for key, one in sections.items()
        }
        if "unknown kwargs" not in str(error) or short == sections:
            raise
        return config_class(**{**values, **short})


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
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # Encoders declare is_decoder (GPT-NeoX too); older files of decoders have it as false without a meaning.
    declared = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    encodes = "is_decoder" in declared and config.is_decoder is False and "gpt" not in config.model_type
    if getattr(config, "is_encoder_decoder", False) or encodes:
        raise NotADecoderError(config.model_type)
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    speech = getattr(transformers, "AutoModelForMultimodalLM", None)
    autos += [speech] if speech is not None else []
    if type(config) in AutoModelForImageTextToText._model_mapping:
        whole: Any = AutoModelForImageTextToText._model_mapping[type(config)]
        named = values.get("architectures")
        if values.get("vision_config") or (isinstance(named, list) and whole.__name__ in named):
            autos.reverse()
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto.from_config(config, attn_implementation="eager")
    raise NotADecoderError(config.model_type)


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
    """Return the parameters of one layer by part; those that an earlier layer shares with it are also counted."""
    every = list(layer.named_parameters())
    shared = sum(p.numel() for _, p in every if id(p) in seen)
    seen.update(id(p) for _, p in every)
    experts = _experts(layer, every)
    routed = {name for name, _ in every if experts and experts["pattern"].search(name)}
    plain = [(n, p) for n, p in every if n not in routed]
    matrices, vectors = _split(layer, plain)
    kinds = getattr(text, "layer_types", None)
    kind = str(kinds[place]) if isinstance(kinds, (list, tuple)) and place < len(kinds) else ""
    return {
        "type": kind,
        "matrices": [[n, *map(int, p.shape)] for n, p in matrices],
        "vectors": sum(p.numel() for _, p in vectors),
        "norms": sum(
            p.numel() for n, p in vectors if "norm" in _kind(layer.get_submodule(n.rpartition(".")[0])).lower()
        ),
        "shared": shared,
        "scan": any(word in n for n, _ in every for word in SCAN),
        "conv": any("conv" in n for n, _ in every),
        "recurrent": _recurrent(layer),
        "attention": _attention(layer),
        "experts": {k: v for k, v in experts.items() if k != "pattern"} if experts else None,
        "topk": _first(text, TOPK) or _first(getattr(text, "ffn_config", None), TOPK),
        "chunk": _first(text, ("attention_chunk_size",)) if "chunk" in kind else None,
    }


def _recurrent(layer: Any) -> dict[str, Any] | None:
    """Return the module of a layer with a scan, a delta rule, lightning attention or a short convolution: its sizes."""
    for name, module in layer.named_modules():
        own = {n.rpartition(".")[2] for n, _ in module.named_parameters(recurse=False)}
        deeper = {n.rpartition(".")[2] for n, _ in module.named_parameters()}
        convolutions = [p for n, p in module.named_parameters() if "conv" in n and p.dim() == 3]
        is_linear = any(word in _kind(module).lower() for word in LINEAR)
        has_state = bool(own & {"A_log", "dt_bias"}) or (is_linear and bool(deeper & {"A_log", "dt_bias"}))
        only_conv = any("conv" in child and _kind(one) == "Conv1d" for child, one in module.named_children())
        if not name or not (has_state or is_linear or only_conv):
            continue
        decay = next((p for n, p in module.named_parameters() if n.endswith("A_log")), None)
        return {
            "path": name,
            "class": _kind(module),
            "numbers": {key: value for key, value in vars(module).items() if _is_size(value)},
            "conv": sum(p.numel() for p in convolutions),
            "by_channel": decay is not None and decay.dim() == 2,
        }
    return None


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


def _experts(layer: Any, named: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the routed experts: parameters with a leading dimension of experts, or equal numbered modules."""
    numbered = re.compile(r"^(?!.*shared).*experts\.\d+\.")
    counted = {found[1] for n, _ in named if numbered.search(n) and (found := re.search(r"experts\.(\d+)\.", n))}
    owned = {n: _kind(layer.get_submodule(n.rpartition(".")[0])) for n, p in named if p.dim() == 3}
    stacked = [(n, p) for n, p in named if n in owned and "expert" in (n + owned[n]).lower() and "shared" not in n]
    flat = None if counted or stacked else _flat_experts(layer, named)
    if counted:
        pattern, count, together = numbered, len(counted), False
    elif flat:
        pattern, count, together = re.compile("|".join(f"^{re.escape(n)}$" for n, _ in flat[0])), flat[1], False
    elif stacked:
        owners = {re.escape(n.rpartition(".")[0] if "experts." in n else n.split(".")[0]) for n, _ in stacked}
        linears = "|".join(sorted(re.escape(n) for n, _ in stacked))
        beside = "|".join(rf"{owner}\.[^.]*bias[^.]*$" for owner in sorted(owners))
        pattern = re.compile(rf"^({linears}|{beside})")
        count, together = min(int(p.shape[0]) for _, p in stacked), True
    else:
        return None
    mine = [(n, p) for n, p in named if pattern.search(n)]
    weights = [p for n, p in mine if p.dim() >= 2 and not n.rpartition(".")[2].endswith("bias")]
    used = sum(p.numel() // int(p.shape[0]) * count if together else p.numel() for p in weights)
    named_down = (p for n, p in mine if re.search(r"down|w2|output_linear|dense_4h", n) and p.dim() >= 2)
    down = next(named_down, min(weights, key=lambda p: p.numel()))
    routes = max(int(p.shape[0]) for p in weights) if together else count
    width = [int(size) for size in down.shape[-2:]]
    return {
        "count": count,
        "routes": routes,
        "matmul": used,
        "other": sum(p.numel() for _, p in mine) - used,
        "down": [width[0] // count, width[1]] if flat else width,
        "pattern": pattern,
    }


def _flat_experts(layer: Any, named: list[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], int] | None:
    """Return the weights of experts that are rows of common matrices (DBRX), and how many experts they are."""
    inside = [(n, p) for n, p in named if ".experts." in f".{n}" and p.dim() == 2 and "shared" not in n]
    for name, _ in inside:
        owner = layer.get_submodule(name.rpartition(".")[0])
        count = _first(owner, ("moe_num_experts", "num_experts"))
        if isinstance(count, int) and count > 1 and all(p.shape[0] % count == 0 for _, p in inside):
            return inside, count
    return None


def _attention(layer: Any) -> dict[str, Any] | None:
    """Return the softmax attention of a layer, if it has one: its names and numbers as the module has them."""
    found: list[tuple[dict[str, Any], str]] = []
    for name, module in layer.named_modules():
        lowered = _kind(module).lower()
        is_latent = _is_size(getattr(module, "kv_lora_rank", None)) and hasattr(module, "forward")
        is_softmax = "attention" in lowered and not any(word in lowered for word in ("linear", *LINEAR))
        if name and (is_latent or is_softmax) and any(p.dim() >= 2 for p in module.parameters()):
            found.append((_attention_numbers(name, module), _kind(module)))
    chosen = next((pair for pair in found if pair[0]["heads"]), found[0] if found else None)
    if chosen is None:
        return None
    return chosen[0] | {"number": sum(kind == chosen[1] for _, kind in found)}


def _attention_numbers(name: str, module: Any) -> dict[str, Any]:
    config = getattr(module, "config", None)
    heads = _first(module, ("num_heads", "num_attention_heads", "n_heads", "n_head")) or _first(
        config, ("num_attention_heads", "n_head", "n_heads", "num_heads")
    )
    window = _first(module, ("sliding_window", "window_size"))
    if window is None and not hasattr(module, "sliding_window") and not getattr(config, "layer_types", None):
        is_local = getattr(module, "attention_type", "") == "local"
        window = _first(config, ("window_size",) if is_local else ("sliding_window",))
    found = {
        "path": name,
        "heads": heads,
        "head_dim": _first(module, ("head_dim", "head_size", "attention_head_size", "qk_head_dim")),
        "v_dim": _first(module, ("v_head_dim",)),
        "window": window,
        "differential": any("lambda_q" in n for n, _ in module.named_parameters(recurse=False)),
        "sinks": any(n == "sinks" for n, _ in module.named_parameters(recurse=False)),
    }
    for key in LATENT:
        found[key] = _first(module, (key,)) or _first(config, (key,))
    indexer, compressor = getattr(module, "indexer", None), getattr(module, "compressor", None)
    indexer = indexer or getattr(compressor, "indexer", None)
    found["index_heads"] = _first(indexer, ("n_heads", "num_heads"))
    found["index_dim"] = _first(indexer, ("head_dim",))
    blocks = _first(indexer, ("topk_blocks",)), _first(indexer, ("block_size",))
    found["index_blocks"] = blocks[0] * blocks[1] if all(blocks) else None
    found["compress_rate"] = _first(compressor, ("compress_rate",))
    return found


def _first(owner: Any, names: Iterable[str]) -> Any:
    for name in names:
        try:
            value = getattr(owner, name, None)
        except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError: the layers have different values
            continue
        if isinstance(value, (int, str)) and not isinstance(value, bool) and value:
            return value
    return None


def _traced_flops(model: Any, body: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return forward FLOPs of a few lengths and the layers that were traced, or `untraced` with the reason for none.

    Changes the model: of a deep one, only one layer of each kind stays.
    """
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    places = list(range(len(rows)))
    if len(rows) > TRACED_LAYERS:  # a trace of a deep model takes minutes
        first: dict[str, int] = {}
        for place, row in enumerate(rows):
            first.setdefault(json.dumps(row, sort_keys=True, default=str), place)
        places = sorted(first.values())
        parent, _, name = body.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.ModuleList([model.get_submodule(body)[one] for one in places]))
    if len(places) > TRACED_LAYERS:
        return {"untraced": f"it has {len(places)} different layers"}
    for module in model.modules():  # experts without a loop over the chosen ones, which needs data
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "batched_mm"
    end = time.monotonic() + TRACE_S

    def stop_late(*_: Any) -> None:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {TRACE_S:g} s")

    for module in model.modules():
        module.register_forward_pre_hook(stop_late)
    reasons = []
    for masked in (False, True):  # some models read the tokens to build a mask; none reads a mask of four dimensions
        found = []
        try:
            for tokens in TRACED_TOKENS:
                with torch.no_grad(), torch.device("meta"), FlopCounterMode(display=False) as counter:
                    given = {"attention_mask": torch.zeros((1, 1, tokens, tokens))} if masked else {}
                    model.eval()(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False, **given)
                found.append([float(tokens), float(counter.get_total_flops())])
            return {"places": places, "flops": found}
        except Exception as error:  # the model's own code, which may need data
            reasons.append(
                str(error) if isinstance(error, TimeoutError) else f"its code needs data ({_one_line(error)})"
            )
    return {"untraced": reasons[0]}


def _one_line(error: Exception) -> str:
    """Return the start of the message of a foreign error, with its type."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def main() -> int:
    """Read a config from stdin and print its description, or one line with what is wrong."""
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="critical", OMP_NUM_THREADS="1")
    warnings.filterwarnings("ignore")
    for name in UNUSED:  # transformers imports them if they are there, which takes seconds
        sys.modules[name] = None  # type: ignore[assignment]  # what makes an import fail
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
