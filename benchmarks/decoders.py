"""Compare our reader of config.json with transformers, for every causal-LM type that transformers can build.

    python benchmarks/decoders.py [--keys] [--flops] [--renamed] [--save] [TYPE...]

Every type is built without data (meta device) in a small size and in its default size; --keys also changes one key of
the small config at a time. Our reader gets config.to_dict() and must return the same number of parameters, in total and
for the embedding and the routed experts, or refuse the config. A type that no row reads is inspected, here in the same
process: "inspected" means the same total. --flops runs a tiny model and compares forward FLOPs
with torch's counter. --renamed inspects types that the tables know as if they did not: total and active parameters must
be equal, forward FLOPs at three lengths within 1 %. A wrong count fails the sweep; a refusal does not.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshwright.costs.flops import layer_flops
from meshwright.engine.architecture import describe
from meshwright.errors import InputError
from meshwright.models import MLA, Attention, Layer, ModelSpec, MoE, inspection
from meshwright.models.reader import decode_float, known_architectures, spec_from_config
from meshwright.models.readers import architectures
from meshwright.models.readers.architectures import BY_CLASS

DEFAULTS = Path(architectures.__file__).with_name("class_defaults.json")
# Sizes that every published file has; a file without them is an error.
REQUIRED = frozenset(
    """hidden_size n_embd d_model num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads
    attention_heads vocab_size intermediate_size ffn_dim""".split()  # noqa: SIM905
)
NO_SIZES = frozenset("architectures id2label label2id rope_parameters model_type base_config_key".split())  # noqa: SIM905
RESULTS = Path(__file__).parent / "results" / "decoders.json"
RENAMED = RESULTS.with_name("decoders_renamed.json")
RESULT_WORDS = ("exact", "inspected", "wrong", "refused", "not built")

# Types of the mapping that are no decoder-only language models: encoders, the decoder half of a translation or speech
# model, masked or permuted language models.
NOT_DECODERS = frozenset(
    """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra
    ernie git got_ocr2 marian mbart megatron-bert moshi musicgen musicgen_melody mvp pegasus plbart prophetnet reformer
    rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
    emu3 mllama""".split()  # noqa: SIM905
)
# Small values by key; only keys that the type's config has as integers are set. Tried in order until one builds.
SMALL = {
    "hidden_size": 128, "n_embd": 128, "d_model": 128, "word_embed_proj_dim": 128, "num_hidden_layers": 6, "n_layer": 6,
    "n_layers": 6, "num_layers": 6, "num_attention_heads": 8, "n_head": 8, "n_heads": 8, "num_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 320, "ffn_dim": 320, "n_inner": 320,
    "vocab_size": 768, "max_position_embeddings": 256, "n_positions": 256, "moe_intermediate_size": 96,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 160, "kv_lora_rank": 48, "q_lora_rank": 64, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "qk_head_dim": 40, "n_group": 2, "topk_group": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "vocab_size_per_layer_input": 768,
}  # fmt: skip
LEFT_OUT = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads"))
# What a type needs besides, because its default config is incomplete.
EXTRA: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16},
    "gptj": {"rotary_dim": 16},
    "codegen": {"rotary_dim": 16},
    "youtu": {"head_dim": 16, "num_key_value_heads": 8},
    "minicpm3": {"head_dim": 16, "num_key_value_heads": 8},
    "glm4_moe_lite": {"head_dim": 16, "num_key_value_heads": 8},
    "deepseek_v32": {"head_dim": 16, "num_key_value_heads": 8, "index_n_heads": 4, "index_head_dim": 32},
    "glm_moe_dsa": {"head_dim": 16, "num_key_value_heads": 8, "index_n_heads": 4, "index_head_dim": 32},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_chunk_size": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_chunk_size": 32, "attn_layer_indices": [2]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 256, "mamba_d_state": 32, "mamba_chunk_size": 32},
    "mamba2": {"chunk_size": 32, "state_size": 32},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 16, "num_key_value_heads": 8},
    "deepseek_v2": {
        "head_dim": 16,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
    },
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "axk1": {"head_dim": 16, "num_key_value_heads": 8},
    "axk2": {"head_dim": 16, "num_key_value_heads": 8, "index_n_heads": 4, "index_head_dim": 32},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 4, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 128,
        "ngram_vocab_size_base": 768,
        "split_ngram_parts": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"] * 2},
}
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "block_types", "attention_types")
SKIPPED_KEYS = frozenset(
    """return_dict output_hidden_states output_attentions torchscript dtype chunk_size_feed_forward is_encoder_decoder
    use_cache bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id transformers_version
    initializer_range rope_theta output_router_logits _name_or_path problem_type use_bfloat16 is_decoder
    prefix_token_id suffix_token_id pretraining_tp""".split()  # noqa: SIM905
)


def small_config(name: str, layers: int = 6) -> Any:
    """Return a small config of a type, or its default one if the small values contradict each other."""
    default = AutoConfig.for_model(name)
    values = {**SMALL, "num_hidden_layers": layers, "n_layer": layers, "n_layers": layers, "num_layers": layers}
    plain = default.to_dict()
    kept = {k: v for k, v in values.items() if _is_integer(plain.get(k))}
    if _is_integer(plain.get("pad_token_id")) and plain["pad_token_id"] >= SMALL["vocab_size"]:
        kept["pad_token_id"] = 0
    unset = {k: v for k, v in values.items() if k in plain and plain[k] is None}
    trials = [{k: v for k, v in kept.items() if k not in left_out} for left_out in LEFT_OUT]
    refused = []
    for trial in (*trials, kept | unset, unset):
        try:
            config = type(default)(**{**trial, **EXTRA.get(name, {})})
            build(config)
            return config
        except Exception as error:  # a type may need other values: the next set is tried
            refused.append(_one_line(error))
    print(f"{name}: no small config can be built, its default one is used: {'; '.join(refused)}", file=sys.stderr)
    return default


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def build(config: Any) -> Any:
    """Return the model of a config on the meta device: with its encoder of images, if it has one."""
    sees = type(config) in AutoModelForImageTextToText._model_mapping and getattr(config, "vision_config", None)
    with torch.device("meta"):
        return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)


def counted(model: Any) -> dict[str, int]:
    """Return the trained parameters of a built model: in total, of the input embedding, of the routed experts."""
    named = dict(model.named_parameters())
    routed = sum(p.numel() for n, p in named.items() if ".experts." in n and ".shared" not in n)
    return {
        "total": sum(p.numel() for p in named.values()),
        "embedding": model.get_input_embeddings().weight.numel(),
        "routed": routed,
    }


def variants(name: str, keys: bool, rejected: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the configs of a type that are compared, each with what was changed; collect values that it rejects."""
    small = small_config(name)
    yield "small", small
    yield "default", AutoConfig.for_model(name)
    if not keys:
        return
    plain = {k: v for k, v in small.to_dict().items() if k not in SKIPPED_KEYS}
    for key, value in plain.items():
        for other in _others(value):
            changed = {k: v for k, v in plain.items() if k not in LISTS}
            try:
                config = type(small)(**{**changed, key: other})
            except Exception as error:  # nothing to compare
                rejected.append(f"{key}={other}: {_one_line(error)}")
                continue
            yield f"{key}={other}", config


def _others(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if value is None:
        return (True, 4)
    return (2 * value, max(1, value // 2)) if isinstance(value, int) and value > 0 else ()


def compare(name: str, keys: bool) -> dict[str, Any]:
    """Return one row: how many variants are read exactly, wrongly or not at all."""
    row: dict[str, Any] = {"type": name, "exact": 0, "wrong": [], "refused": []}
    rejected: list[str] = []  # by transformers
    for what, config in variants(name, keys, rejected):
        try:
            model = build(config)
        except Exception as error:  # transformers cannot build it, so there is nothing to compare with
            if what == "small":
                return {**row, "result": "not built", "reason": _one_line(error)}
            rejected.append(f"{what}: {_one_line(error)}")
            continue
        expected = counted(model)
        try:
            spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)), name)
        except InputError as error:
            row["refused"].append(f"{what}: {error}"[:300])
            continue
        params = spec.params
        found = {
            "total": params.total,
            "embedding": params.embedding - spec.learned_positions * spec.hidden,
            "routed": params.routed,
        }
        inspected = name not in known_architectures()
        if not expected["routed"] or inspected:
            found["routed"] = expected["routed"]  # experts under another name
        if found == expected:
            row["exact"] += 1
        else:
            row["wrong"].append(f"{what}: {found} instead of {expected}")
    first = row["refused"][0] if row["refused"] else ""
    # defaults that contradict themselves are refused rightly, if the small config is read
    refused = first.startswith("small") or not row["exact"]
    if rejected:
        row["rejected"] = rejected
    return {**row, "result": "wrong" if row["wrong"] else "refused" if refused else _way(name)}


def _way(name: str) -> str:
    return "exact" if name in known_architectures() else "inspected"


def describe_here(config: str) -> dict[str, Any]:
    """Return what the inspecting process would print, without a process for every config."""
    try:
        return dict(describe(json.loads(config, object_hook=decode_float)))
    except Exception as error:
        raise InputError(f"transformers cannot build it: {error}"[:200], "model_type") from None


def write_defaults() -> None:
    """Write the defaults of the config classes whose rows do not type them."""
    found = {}
    for name in sorted(BY_CLASS):
        fields = dataclasses.fields(type(AutoConfig.for_model(name)))
        values = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        found[name] = {k: v for k, v in sorted(values.items()) if _is_default(k, v)}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
    DEFAULTS.write_text("{\n" + lines + "\n}\n")


def _is_default(key: str, value: Any) -> bool:
    """Return whether the reader may need a key's default: no sizes that every file has, no token ids, no floats."""
    if (
        key in SKIPPED_KEYS
        or key in NO_SIZES
        or (key in REQUIRED and value is not None)
        or key.startswith("__")
        or "dropout" in key
        or "token" in key
    ):
        return False
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and "coef" not in key)


def forward_flops(name: str, seq: int = 64) -> tuple[float, float]:
    """Return the forward FLOPs of a small model: counted by torch, and from our spec.

    Of models with scans only the linears are compared: torch counts the matmuls of a scan's slow path, and no others.
    """
    config = small_config(name, layers=6)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # grouped matmuls are not counted
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    ids = torch.randint(3, min(500, model.get_input_embeddings().weight.shape[0]), (1, seq))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)), name)
    counts = counter.get_flop_counts()["Global"]
    scans = any(not isinstance(g.layer.mixer, Attention | MLA) for g in spec.groups)
    theirs = sum(n for op, n in counts.items() if not scans or str(op) in ("aten.mm", "aten.addmm"))
    return float(theirs), spec_flops(spec, seq, core=not scans)


def spec_flops(spec: ModelSpec, seq: int, core: bool = True) -> float:
    """Return the forward FLOPs of a sequence as eager code executes them: full matrices, with routers."""
    total = 2.0 * spec.hidden * spec.vocab
    for group in spec.groups:
        layer = group.layer
        matmul, inner = layer_flops(_unwindowed(layer), spec, seq, "full")
        router = 2 * spec.hidden * layer.ffn.experts if isinstance(layer.ffn, MoE) else 0
        total += group.count * (matmul + float(inner) * core + router)
    return total * seq


def _unwindowed(layer: Layer) -> Layer:
    if isinstance(layer.mixer, MLA):
        return msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, topk=None))
    if isinstance(layer.mixer, Attention):
        return msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, window=None))
    return layer


RENAMED_LENGTHS = (512, 4096, 32768)
RENAMED_LIMIT = 0.01


def compare_renamed(name: str) -> dict[str, Any]:
    """Return one row: how inspection differs from the tables for a type's small and default config."""
    row: dict[str, Any] = {"type": name, "result": "not built", "configs": []}
    for what in ("small", "default"):
        try:
            config = small_config(name) if what == "small" else AutoConfig.for_model(name)
            model = build(config)
            plain = json.loads(config.to_json_string(use_diff=False))
            read = spec_from_config(plain, name)
        except Exception as error:  # an incomplete default config, or one that contradicts itself
            row["configs"].append({"config": what, "not built": f"{type(error).__name__}: {error}"[:160]})
            continue
        try:
            found = inspection.inspected_spec(plain, name)
        except InputError as error:
            row["configs"].append({"config": what, "refused": str(error)[:160]})
            row["result"] = "refused"
            continue
        flops = [round(_masked_flops(found, n) / _masked_flops(read, n) - 1, 4) for n in RENAMED_LENGTHS]
        counts = [found.params.total - counted(model)["total"], found.params.active - read.params.active]
        row["configs"].append({"config": what, "total": counts[0], "active": counts[1], "flops": flops})
        right = not any(counts) and all(abs(one) <= RENAMED_LIMIT for one in flops)
        row["result"] = (
            "wrong" if not right or row["result"] == "wrong" else row["result"].replace("not built", "exact")
        )
    return row


def _masked_flops(spec: ModelSpec, seq: int) -> float:
    """Return the forward FLOPs per token as the cost model counts them."""
    pairs = ((layer_flops(group.layer, spec, seq, "causal"), group.count) for group in spec.groups)
    return 2.0 * spec.hidden * spec.vocab + sum(count * (matmul + float(core)) for (matmul, core), count in pairs)


def sweep_renamed(types: list[str], save: bool) -> int:
    """Print one line for each known type that is inspected; write the rows."""
    known = [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name in known_architectures()]
    rows = []
    for name in types or [name for name in known if name not in NOT_DECODERS]:
        rows.append(compare_renamed(name))
        print(f"{name:26} {rows[-1]['result']:9} {rows[-1]['configs']}", flush=True)
    sums = Counter(row["result"] for row in rows)
    print("renamed: " + ", ".join(f"{count} {result}" for result, count in sums.items()))
    if save:
        RENAMED.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}, indent=1) + "\n")
    return 1 if sums["wrong"] else 0


def main() -> int:
    """Print one line for each type and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--keys", action="store_true", help="also change one key at a time")
    parser.add_argument("--flops", action="store_true", help="also compare forward FLOPs of a tiny model")
    parser.add_argument("--renamed", action="store_true", help="inspect the types that the tables know, and end")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--defaults", action="store_true", help=f"write {DEFAULTS.name} and end")
    parser.add_argument(
        "--verbose", action="store_true", help="also print variants that we refuse or transformers cannot build"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if given.defaults:
        write_defaults()
        return 0
    inspection._described = describe_here
    if given.renamed:
        return sweep_renamed(given.types, given.save)
    rows = []
    for name in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.monotonic()
        try:
            row = compare(name, given.keys)
        except Exception as error:
            row = {"type": name, "result": "not built", "reason": f"{type(error).__name__}: {error}"[:200]}
        if given.flops and row["result"] in ("exact", "inspected"):
            try:
                theirs, ours = forward_flops(name)
                row["flops"] = round(ours / theirs - 1, 4)
            except Exception as error:
                row["flops"] = f"{type(error).__name__}: {error}"[:160]
        row["decoder"] = name not in NOT_DECODERS
        rows.append(row)
        _show(row, time.monotonic() - started, given.verbose)
    for label, chosen in (("all types", rows), ("decoders", [r for r in rows if r["decoder"]])):
        sums = Counter(row["result"] for row in chosen)
        print(
            f"{label}: " + ", ".join(f"{sums[k]} {k}" for k in ("exact", "inspected", "wrong", "refused", "not built"))
        )
    if given.save:
        RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["result"] == "wrong" for row in rows) else 0


def _show(row: dict[str, Any], seconds: float, verbose: bool) -> None:
    detail = row.get("reason", "")
    if row["result"] == "refused":
        detail = row["refused"][0][:150]
    print(f"{row['type']:26} {row['result']:9} {row.get('exact', 0):3} {row.get('flops', '')} {detail} {seconds:.1f}s")
    more = [*row.get("refused", [])[:8], *(f"not built: {one}" for one in row.get("rejected", [])[:8])]
    shown = row.get("wrong", [])[:6] + (more if verbose else [])
    for line in shown:
        print("    " + line)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
