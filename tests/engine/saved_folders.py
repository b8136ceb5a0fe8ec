"""Tiny random models of every supported type, saved by transformers itself: the folders of the sweep."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.engine.families import BASE, DELTA, FAMILIES, LATENT, MOE, SLIDING
from tests.engine.hf_folder import VECTOR_NOISE

from meshwright.engine.data.mock import Mock
from meshwright.models.readers.architectures import SAME_AS
from meshwright.models.readers.wrappers import WRAPPERS

SEQ, SEED = 32, 11
_NO_HEAD_DIM = {k: v for k, v in BASE.items() if k != "head_dim"}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "depth": 2, "patch_size": 4}
_QWEN_VISION = {**_VISION, "out_hidden_size": 32, "spatial_merge_size": 2}
_QWEN35_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}
_QWEN3_VISION = {**_QWEN35_VISION, "deepstack_visual_indexes": [0]}
# Their language models have no class of their own: trained with images (losses: tests/engine/test_vision.py).
WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOWER = {**_TOWER, "patch_size": 4, "image_size": 16}
_TOKENS = {"image_token_id": 63, "video_token_id": 62, "vision_start_token_id": 61, "vision_end_token_id": 60}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_GLM_TEXT = {**{k: v for k, v in LATENT.items() if "lora" not in k}, "num_key_value_heads": 2, "n_group": 1}


def _wrapped(outer: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": outer, "text_config": text, "vision_config": vision, **more}


_DELTA_MROPE = {**DELTA, "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}}
TYPES: dict[str, dict[str, Any]] = {
    **{config["model_type"]: config for config in FAMILIES.values()},
    "mistral": {"model_type": "mistral", **BASE, "sliding_window": 8},
    "ministral": {"model_type": "ministral", **BASE, **SLIDING},
    "ministral3": {"model_type": "ministral3", **BASE},
    "olmo2": {"model_type": "olmo2", **_NO_HEAD_DIM},
    "phi3": {"model_type": "phi3", **_NO_HEAD_DIM, "pad_token_id": 0, "sliding_window": 8},
    "seed_oss": {"model_type": "seed_oss", **BASE},
    "smollm3": {"model_type": "smollm3", **_NO_HEAD_DIM, "no_rope_layers": [1, 1, 0, 1], "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", **_NO_HEAD_DIM, "bos_token_id": 1, "eos_token_id": 2},
    "gemma3": _wrapped("gemma3", {**FAMILIES["gemma3_text"]}, _TOWER, mm_tokens_per_image=4, image_token_index=63),
    "mistral3": _wrapped(
        "mistral3", {"model_type": "mistral", **BASE}, {**_TOWER, "model_type": "pixtral", "head_dim": 8}
    ),
    "qwen2_5_vl": _wrapped(
        "qwen2_5_vl",
        {"model_type": "qwen2_5_vl_text", **_NO_HEAD_DIM, "rope_parameters": _MROPE},
        {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 16},
        **_TOKENS,
    ),
    "qwen3_vl": _wrapped(
        "qwen3_vl", {"model_type": "qwen3_vl_text", **BASE, "rope_parameters": _MROPE}, _QWEN3_VISION, **_TOKENS
    ),
    "qwen3_vl_moe": _wrapped(
        "qwen3_vl_moe", {"model_type": "qwen3_vl_moe_text", **MOE, "rope_parameters": _MROPE}, _QWEN3_VISION, **_TOKENS
    ),
    "qwen3_5": _wrapped("qwen3_5", {"model_type": "qwen3_5_text", **BASE, **_DELTA_MROPE}, _QWEN35_VISION, **_TOKENS),
    "qwen3_5_moe": _wrapped(
        "qwen3_5_moe",
        {"model_type": "qwen3_5_moe_text", **MOE, **_DELTA_MROPE, "shared_expert_intermediate_size": 16},
        _QWEN35_VISION,
        **_TOKENS,
    ),
    "glm4v_moe": _wrapped(
        "glm4v_moe",
        {"model_type": "glm4v_moe_text", **_GLM_TEXT, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        {**_QWEN_VISION, "image_size": 16, "num_hidden_layers": 2, "intermediate_size": 32},
        **_TOKENS,
        image_start_token_id=59,
        image_end_token_id=58,
        video_start_token_id=57,
        video_end_token_id=56,
    ),
}
# Types that transformers cannot save: another type's class, text parts without a class of their own, diffusers.
NOT_SAVED = {
    *("kimi_k2", "gpt-sw3", "NemotronH_Nano_VL_V2", "WanTransformer3DModel", "FluxTransformer2DModel"),
    *(text for wrapper in WRAPPERS.values() for text in wrapper.text if text not in TYPES),
    *(name for name in SAME_AS if name not in TYPES),
}


def save(rank: int, world: int, path: str, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> float:
    """Save a random model with `save_pretrained`; return transformers' own loss on the mock samples."""
    values = json.loads(json.dumps(TYPES[kind]))
    text = values.get("text_config", values)
    values.update({k: v for k, v in changes.items() if k == "tie_word_embeddings"})
    text.update(changes)
    config = transformers.AutoConfig.for_model(**values)
    auto = transformers.AutoModelForImageTextToText if "vision_config" in values else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model: Any = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim < 2:
                tensor.add_(torch.randn(tensor.shape) * VECTOR_NOISE)
    dtype = options.pop("dtype", torch.float32)
    model.to(dtype).save_pretrained(path, **options)
    loaded: Any = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    samples = Mock(int(text["vocab_size"]), SEQ, SEED).samples([0, 1])
    tokens = torch.from_numpy(samples.tokens)
    with torch.no_grad():
        logits = loaded(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def import_models(*kinds: str) -> None:
    """Import transformers' modules once, before ranks are forked."""
    for kind in kinds:
        module = kind.removesuffix("_text")
        importlib.import_module(f"transformers.models.{module}.modeling_{module}")


def words(folder: Path, kind: str) -> list[str]:
    """Return the command line that trains two steps from a folder in fp32."""
    return [
        *("train", "llama3_8b_pretrain_config", "--model", str(folder), "--dataset", "mock", "--json"),
        *(f"checkpoint.pretrained={folder}", "train.steps=2", "train.global_batch_size=2", f"train.seed={SEED}"),
        *(
            f"data.seq_length={SEQ}",
            "layout.micro_batch_size=2",
            "layout.tp=1",
            "layout.cp=1",
            "precision.compute=fp32",
            "precision.reduce=fp32",
        ),
        *("moe.balancing=none", "moe.aux_loss=0", "train.mtp_loss=0", "--out", str(folder.parent / "run")),
        *(("data.images=true",) if kind in WITH_IMAGES else ()),
    ]
