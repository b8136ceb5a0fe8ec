"""What models are, kept in a file: every count of every shipped model and of odd shapes, names, numerics and errors.

`python -m tests.models.kept_models` writes them anew.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from tests import kept

from meshwright import models
from meshwright.errors import InputError
from meshwright.models import GatedDelta, Mamba2, catalogue, numerics, quantization, reader
from meshwright.models.readers.architectures import SAME_AS
from meshwright.models.readers.fields import MAX_SIZE
from meshwright.models.readers.wrappers import WRAPPERS
from meshwright.models.spec import MLA, Attention, Dense, Layer, ModelSpec, MoE

FILE = Path(__file__).with_name("models.json")
NAMES = (
    "Llama 3.1 8B", "meta-llama/Llama-3.1-8B-Instruct", "llama31 8b", "llama3 18b", "Qwen2.5-0.5B", "qwen2p5 7b", "7b",
    "70B", "175b", "1.3 b", "9b", "3000b", "0b", "a3b", "llama", "qwen3 30b", "nemotron nano v2", "gpt oss", "gpt",
    "deepseek", "Qwen3-30B-A3B (base)", "llama-3-70b-hf", "instruct", "lama3", "model.toml", "some/unknown", "",
    "qwen3", "Qwen/Qwen3-8B", "qwen3_8", "mixtral 8x7b", "gemma3-27b-it", "wan", "flux", "kimi", "500m", "2t", "10b",
    "40b",
)  # fmt: skip
SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("llama3_8b", {"layers": n}) for n in (0, 1, 2, 33, 10**6)),
    *(("deepseek_v3", {"layers": n, "hidden": 128}) for n in (3, 4, 5, 62)),
    *(("gemma3_1b", {"layers": n}) for n in (1, 6, 7, 31)),
    *(("nemotronh_8b", {"layers": n}) for n in (1, 9, 52, 53)),
    *(("qwen3_next_80b_a3b", {"layers": n, "heads": 4}) for n in (1, 4, 7)),
    ("llama3_8b", {"hidden": 1000}),
    ("llama3_8b", {"hidden": 1024, "ffn": 77, "vocab": 99}),
    ("llama3_8b", {"heads": 12}),
    ("llama3_8b", {"heads": 64, "head_dim": 32, "kv_heads": 1}),
    ("llama3_8b", {"kv_heads": 16}),
    ("llama3_8b", {"kv_heads": 33}),
    ("llama3_8b", {"vocab": True}),
    ("llama3_8b", {"vocab": 1.5}),
    ("llama3_8b", {"vocab": 10**15}),
    ("llama3_8b", {"vocab": MAX_SIZE}),
    ("llama3_8b", {"vocab": MAX_SIZE + 1}),
    ("llama2_7b", {"heads": 16}),
    ("llama3_8b", {"topk": 2}),
    ("llama3_8b", {"experts": 2}),
    ("deepseek_v3", {"kv_heads": 8}),
    ("deepseek_v3", {"heads": 8, "experts": 8, "ffn": 64}),
    ("deepseek_v3", {"experts": 7}),
    ("qwen3_30b_a3b", {"experts": 8, "topk": 8, "ffn": 64}),
    ("qwen3_30b_a3b", {"topk": 129}),
    ("gpt3_175b", {"hidden": 96, "heads": 4}),
    ("gpt3_175b", {"head_dim": 4}),
    ("qwen3_vl_8b", {"layers": 3}),
    ("qwen3_vl_8b", {"hidden": 64}),
    ("wan_14b", {"layers": 3}),
    ("wan_14b", {"hidden": 64}),
    ("flux_12b", {"layers": 3}),
    ("nemotronh_47b", {"layers": 99}),
    ("qwen35_800m", {"hidden": 256}),
)
PARTS: dict[str, Any] = {
    **{
        f"attention {key} {value}": Attention(6, 3, 5, **{key: value})
        for key, value in (
            ("window", 7), ("qkv_bias", True), ("out_bias", True), ("qk_norm", "head"), ("qk_norm", "full"),
            ("output_gate", True), ("sinks", True), ("shared_kv", True), ("context_width", 11),
        )
    },
    "attention with all": Attention(6, 3, 5, None, True, True, "full", True, True, True, 11),
    "attention, gated bias": Attention(6, 3, 5, None, True, False, "none", True, False, False),
    "mla": MLA(6, 7, 5, 3, 4),
    "mla with all": MLA(6, 7, 5, 3, 4, 9, True),
    "mamba": Mamba2(6, 5, 7, 2, 3, True, True),
    "mamba without biases": Mamba2(6, 5, 7, 2, 3, False, False),
    "delta": GatedDelta(2, 6, 5, 7, 3),
    "dense": Dense(17),
    "dense, plain": Dense(17, False, True),
    "dense with biases": Dense(17, True, True),
}  # fmt: skip
EXPERTS: dict[str, MoE] = {
    "experts": MoE(8, 3, 17),
    "experts, shared": MoE(8, 3, 17, 19, True, True, True, False, True, True),
    "experts, latent": MoE(8, 3, 17, 0, False, True, False, False, True, False, 6),
    "experts, latent without biases": MoE(8, 3, 17, 5, False, False, False, False, False, False, 6),
    "experts, parallel": MoE(8, 3, 17, parallel=Dense(9, True, True)),
}
QUANTIZED: tuple[Any, ...] = (
    None, "fp8", {"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [128, 64]},
    {"quant_method": "fp8", "weight_block_size": [128, 64, 2]}, {"quant_method": "fp8", "weight_block_size": [128, 0]},
    {"quant_method": "fp8", "weight_block_size": 128}, {"quant_method": "fp8", "weight_block_size": ["a", 2]},
    {"quant_method": "fbgemm_fp8"}, {"quant_method": "gptq"}, {"quant_method": "other"}, {"bits": 4},
    *({"quant_method": "compressed-tensors", "format": "f", **more} for more in (
        {}, {"config_groups": {}}, {"config_groups": {"a": 3}}, {"config_groups": {"a": {"weights": 3}}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}},
        {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "block_structure": [2, 3]}},
                           "b": {"weights": {"type": "float", "num_bits": 8}}}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "block_structure": [2, 3]}}},
         "sparsity_config": {"format": "dense"}},
        {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}, "sparsity_config": {"format": "s24"}},
    )),
)  # fmt: skip
ROPES: tuple[dict[str, Any], ...] = (
    {}, {"rope_theta": 5e5, "rms_norm_eps": 1e-6, "initializer_range": 0.02}, {"text_config": {"rope_theta": 3}},
    {"rope_scaling": {"type": "yarn", "factor": 4}}, {"rope_scaling": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 7, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_theta": 7}}, {"rope_parameters": {"full": {"rope_theta": 7}, "rope_theta": 8}},
    {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "norm_topk_prob": True, "n_group": 8},
)  # fmt: skip
OTHER_PATHS = (
    "tiny", "tiny/", "./tiny", "llama3_8b", "./llama3_8b", "empty", "large.json", "org/two", "largest.json", "org",
    "Qwen/Qwen3-8B", "a/b/c", "missing.json", "~/missing",
)  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
CONFIGS: tuple[Any, ...] = (
    LLAMA, [], {}, {"model_type": 3}, {"model_type": "other"}, {"architectures": ["LlamaForCausalLM"]},
    {"architectures": "LlamaForCausalLM"}, {"architectures": ["Other"]}, {"_class_name": "Other"},
    {**LLAMA, "model_type": None, "architectures": ["Other", "LlamaForCausalLM"]}, {**LLAMA, "unknown_key": 3},
    {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}, {"model_type": "qwen2_5_vl"},
    {**LLAMA, "model_type": "mistral3"}, {**LLAMA, "model_type": "gemma3"}, {**LLAMA, "model_type": "qwen2"},
)  # fmt: skip


def described(make: Callable[[], Any]) -> Any:
    """Return a value's parts as lines, or those of the error."""
    try:
        found = make()
    except InputError as error:
        return " ".join(kept.tokens([error.field, error.value, error.reason, list(error.fix)]))
    return " ".join(kept.tokens(counts(found) if isinstance(found, ModelSpec) else to_builtins(found)))


def counts(spec: ModelSpec) -> dict[str, Any]:
    """Return the counts of a model and of its layers."""
    kinds = {type(group.layer.mixer) for group in spec.groups}
    return {
        "name": spec.name,
        "params": to_builtins(spec.params),
        "layers": [spec.num_layers, len(spec.layers)],
        "groups": [
            [g.count, g.places[0], g.layer.params(spec.hidden), g.layer.active_params(spec.hidden)] for g in spec.groups
        ],
        "mixers": [len(spec.mixers(kind)) for kind in (Attention, MLA, Mamba2, GatedDelta) if kind in kinds],
        "moe": spec.moe is not None,
        "facts": [spec.kind, spec.hidden, spec.vocab, spec.tied, spec.final_norm_params, spec.max_seq_length],
        "source": spec.source,
        "quantized": None if spec.quantization is None else spec.quantization.method,
    }


def parts() -> Iterator[tuple[str, Any]]:
    """Yield the counts of every kind of block with every option, alone, in a layer and in a model."""
    for name, part in PARTS.items():
        layer = Layer(None, part, None, 3, 4, 2) if isinstance(part, Dense) else Layer(part, Dense(9), part, 3, 4, 2)
        numbers = [part.matmul_params(13), part.vector_params(13), layer.params(13), layer.active_params(13)]
        numbers += [part.active_params(13)] if isinstance(part, Dense) else []
        yield name, " ".join(map(str, numbers))
    for name, ffn in EXPERTS.items():
        layer = Layer(Attention(6, 3, 5), ffn, None, 3, 4)
        spec = models.find("qwen3_30b_a3b")
        whole = [replace(spec, tied=tied, head_bias=not tied, learned_positions=7, extra_params=5, mtp_layers=2,
                         mtp_layer=layer).params for tied in (True, False)]  # fmt: skip
        numbers = [ffn.routed_params(13), ffn.active_params(13), layer.params(13), layer.active_params(13)]
        yield name, " ".join(kept.tokens([*numbers, layer.routed_params(13), *map(to_builtins, whole)]))


def folders() -> Iterator[tuple[str, Any]]:
    """Yield what paths mean: files, folders, names that are also files, and files that are no configs."""
    kept_place = os.getcwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            files = {"tiny/config.json": LLAMA, "llama3_8b/config.json": LLAMA, "mine.json": LLAMA, "org/one": LLAMA,
                     "recipe.json": {"base": "x", "layout": {}}, "both.json": {**LLAMA, "layout": {}}, "list.json": [3],
                     "text.json": "{", "empty/other.txt": 3, "other.json": {"other": 3},
                     "float.json": {**LLAMA, "x": {"__float__": "Infinity"}, "y": {"__float__": "3"}}}  # fmt: skip
            for name, content in files.items():
                Path(name).parent.mkdir(exist_ok=True)
                Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
            Path("large.json").write_text(" " * reader.MAX_BYTES + "{}")
            Path("largest.json").write_text(json.dumps(LLAMA).ljust(reader.MAX_BYTES))
            for text in (*files, *OTHER_PATHS):
                readers = (models.find, catalogue.config_named)
                found = [described(lambda text=text, read=read: read(text)) for read in readers]
                facts = [*found, models.is_path(text), catalogue.is_config(text)]
                yield f"path {text}", " ".join(kept.tokens(facts)).replace(place, "")
        finally:
            os.chdir(kept_place)


def answers() -> Iterator[tuple[str, Any]]:
    """Yield counts, names, sizes, numerics and configs."""
    yield from parts()
    for name in models.names():
        yield name, described(lambda name=name: models.find(name))
        yield f"{name} in numbers", described(lambda name=name: [n := numerics.numerics_of(name), n.scaling_type])
    for name, sizes in SIZES:
        label = f"{name} with {' '.join(f'{key}={value}' for key, value in sizes.items())}"
        yield label, described(lambda name=name, sizes=sizes: models.reshape(models.find(name), **sizes))
    for count in (2, 7, 11, 12, 13, 18):
        yield (
            f"gemma3_1b with {count} layers and 20",
            described(
                lambda count=count: models.reshape(models.reshape(models.find("gemma3_1b"), layers=count), layers=20)
            ),
        )
    for name in sorted({*WRAPPERS} & {*SAME_AS}):
        for more in ({}, {"text_config": LLAMA}, {"vision_config": {"hidden_size": 64}}):
            config = {**LLAMA, "model_type": name, **more}
            yield f"{name} {list(more)}", described(lambda config=config: models.spec_from_config(config, "mine"))
    for name in ("llama3_8b", "llama3 8b", "none"):
        yield f"config of {name}", described(lambda name=name: catalogue.config_of(name))
    for text in NAMES:
        yield f"name {text}", described(lambda text=text: [models.find(text).name, catalogue.search(text)])
    for place, config in enumerate(QUANTIZED):
        for key in quantization.KEYS:
            inside = {key: config} if place % 2 else {"text_config": {key: config}}
            yield f"{key} {place}", described(lambda config=inside: quantization.quantization_of(config))
    for place, config in enumerate(ROPES):
        yield (
            f"numbers {place}",
            described(
                lambda config=config: [n := numerics.from_config(config), n.scaling_type, n.partial_rotary_factor]
            ),
        )
    for place, config in enumerate(CONFIGS):
        yield f"config {place}", described(lambda config=config: models.spec_from_config(config, "mine"))
    for shape in ((4096, 32), (4096, 33), (4097, 32), (12288, 96), (5120, 64)):
        yield f"shape {shape}", described(lambda shape=shape: [one.name for one in catalogue.find_by_shape(*shape)])
    yield from folders()


if __name__ == "__main__":
    kept.write(FILE, answers)
