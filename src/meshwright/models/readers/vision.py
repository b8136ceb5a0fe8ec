"""Read vision encoders: parameters of a layer, the stem and the connector to the language model."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.errors import InputError

from ..spec import Vision
from .fields import MAX_LAYERS, Fields, require_divisible

QWEN25_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
QWEN3_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
GLM_DEFAULTS = {
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "attention_bias": False,
}
SIGLIP_DEFAULTS = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
PIXTRAL_DEFAULTS = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
}
MOON_DEFAULTS = {
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "merge_kernel_size": (2, 2),
}
MOON_ALIASES = {
    "num_hidden_layers": ("vt_num_hidden_layers",),
    "hidden_size": ("vt_hidden_size",),
    "intermediate_size": ("vt_intermediate_size",),
    "num_attention_heads": ("vt_num_attention_heads",),
    "pos_emb_height": ("init_pos_emb_height",),
    "pos_emb_width": ("init_pos_emb_width",),
}
GEMMA4_DEFAULTS = {
    "num_hidden_layers": 16,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "pooling_kernel_size": 3,
}
LLAMA4_DEFAULTS = {
    "num_hidden_layers": 34,
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_channels": 3,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
RADIO_DEFAULTS = {"patch_size": 16, "max_resolution": 2048}
RADIO_VERSIONS = {"radio_v2.5-h": (32, 1280, 16, 10)}  # layers, width, heads, class and register tokens
QWEN_ALIASES = {"num_heads": ("num_attention_heads",), "in_channels": ("in_chans",)}


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _encoder_shape(
    fields: Fields, depth: str = "num_hidden_layers", heads: str = "num_attention_heads"
) -> tuple[int, int, int]:
    """Return depth, width and heads of an encoder, validated."""
    hidden, count = fields.size("hidden_size"), fields.size(heads)
    require_divisible(fields, heads, count, "hidden_size", hidden)
    return fields.size(depth, most=MAX_LAYERS), hidden, count


def qwen25_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Qwen2.5-VL encoder: RMS norms, gated feed-forward with biases, windowed attention."""
    depth, hidden, heads = _encoder_shape(fields, "depth", "num_heads")
    width, merge, out = fields.size("intermediate_size"), fields.size("spatial_merge_size"), _out(fields, text_hidden)
    patch = fields.size("patch_size")
    merged = hidden * merge**2
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    ffn = 2 * _linear(hidden, width) + _linear(width, hidden)
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=attention + ffn + 2 * hidden,
        stem_params=_linear(fields.size("in_channels") * fields.size("temporal_patch_size") * patch**2, hidden, False),
        connector_params=hidden + _linear(merged, merged) + _linear(merged, out),
        merge=merge**2,
    )


def qwen3_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Qwen3-VL encoder, whose inner layers also feed the language model through separate mergers."""
    mergers = 1 + len(fields.places("deepstack_visual_indexes", fields.size("depth", most=MAX_LAYERS)))
    return _qwen3_encoder(fields, text_hidden, mergers)


def qwen35_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Qwen3.5 encoder: that of Qwen3-VL with one merger."""
    if fields.data.get("deepstack_visual_indexes"):
        raise fields.error("deepstack_visual_indexes", "Qwen3.5 has no deep-stack mergers")
    return _qwen3_encoder(fields, text_hidden, mergers=1)


def _qwen3_encoder(fields: Fields, text_hidden: int, mergers: int) -> Vision:
    depth, hidden, heads = _encoder_shape(fields, "depth", "num_heads")
    width, merge, out = fields.size("intermediate_size"), fields.size("spatial_merge_size"), _out(fields, text_hidden)
    patch = fields.size("patch_size")
    merged = hidden * merge**2
    merger = _linear(merged, merged) + _linear(merged, out)
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    ffn = _linear(hidden, width) + _linear(width, hidden)
    pixels = fields.size("in_channels") * fields.size("temporal_patch_size") * patch**2
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=attention + ffn + 4 * hidden,
        stem_params=_linear(pixels, hidden) + fields.size("num_position_embeddings") * hidden,
        # The first merger norms each patch, the deep-stack ones the merged patches.
        connector_params=mergers * merger + 2 * hidden + (mergers - 1) * 2 * merged,
        merge=merge**2,
    )


def glm_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the GLM-4.5V encoder, whose feed-forward width is out_hidden_size and whose merger has intermediate_size."""
    depth, hidden, heads = _encoder_shape(fields, "depth", "num_heads")
    merge, out, wide = fields.size("spatial_merge_size"), _out(fields, text_hidden), fields.size("intermediate_size")
    patch = fields.size("patch_size")
    positions = (fields.size("image_size") // patch) ** 2
    attention = _linear(hidden, 3 * hidden, fields.flag("attention_bias")) + _linear(hidden, hidden, False)
    pixels = fields.size("in_channels") * fields.size("temporal_patch_size") * patch**2
    downsample = _linear(hidden * merge**2, out)
    merger = _linear(out, out, False) + 2 * out + 3 * _linear(out, wide, False)
    return Vision(
        depth,
        hidden,
        out,
        heads,
        patch,
        layer_params=attention + 3 * _linear(hidden, out, False) + 2 * hidden,
        stem_params=_linear(pixels, hidden) + positions * hidden + 2 * hidden,
        connector_params=downsample + merger,
        merge=merge**2,
    )


def siglip_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the SigLIP encoder of Gemma 3 and its projector to a fixed number of tokens per image."""
    depth, hidden, heads = _encoder_shape(fields)
    width, patch = fields.size("intermediate_size"), fields.size("patch_size")
    positions = (fields.size("image_size") // patch) ** 2
    tokens = wrapper.size("mm_tokens_per_image")
    attention = 4 * _linear(hidden, hidden)
    ffn = _linear(hidden, width) + _linear(width, hidden)
    pooling = attention + ffn + 3 * hidden if fields.flag("vision_use_head") else 0  # a probe, a norm, a block
    pixels = fields.size("num_channels") * patch**2
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=attention + ffn + 4 * hidden,
        stem_params=_linear(pixels, hidden) + positions * hidden + 2 * hidden + pooling,
        connector_params=hidden * text_hidden + hidden,
        merge=max(1, positions // tokens),
        image_tokens=tokens,
    )


def pixtral_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Pixtral encoder of Mistral 3 and Ministral 3, with its patch merger and two-layer projector."""
    depth, hidden, heads = _encoder_shape(fields)
    width, patch, merge = (
        fields.size("intermediate_size"),
        fields.size("patch_size"),
        wrapper.size("spatial_merge_size"),
    )
    bias = wrapper.flag("multimodal_projector_bias")
    projector = _linear(hidden, text_hidden, bias) + _linear(text_hidden, text_hidden, bias)
    if wrapper.data.get("vision_feature_layer", -1) != -1:
        raise wrapper.error("vision_feature_layer", "only the last layer (-1) is supported")
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=4 * hidden * hidden + 3 * hidden * width + 2 * hidden,
        stem_params=fields.size("num_channels") * patch**2 * hidden + hidden,
        connector_params=hidden + hidden * merge**2 * hidden + projector,
        merge=merge**2,
    )


def radio_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the C-RADIO encoder of Nemotron Nano v2 VL; its config has a version, its code the widths."""
    version = fields.text("version")
    if version not in RADIO_VERSIONS:
        raise fields.error("version", f"known: {', '.join(RADIO_VERSIONS)}")
    depth, hidden, heads, tokens = RADIO_VERSIONS[version]
    if wrapper.size("vit_hidden_size") != hidden:
        raise wrapper.error("vit_hidden_size", f"{version} has the width {hidden}")
    if wrapper.data.get("downsample_ratio", 0.5) != 0.5:
        raise wrapper.error("downsample_ratio", "only 0.5 (2 × 2 patches per token) is supported")
    if fields.data.get("separate_video_embedder") or wrapper.data.get("sound_config"):
        raise InputError("models with a video or sound encoder are not supported", field=fields.where + "version")
    patch, width, merge = fields.size("patch_size"), 4 * hidden, 4
    positions = (fields.size("max_resolution") // patch) ** 2
    projected = wrapper.size("projector_hidden_size")
    attention = 4 * _linear(hidden, hidden)
    ffn = _linear(hidden, width) + _linear(width, hidden)
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=attention + ffn + 4 * hidden,
        stem_params=3 * patch**2 * hidden + (positions + tokens) * hidden,
        connector_params=merge * hidden * (1 + projected) + projected * text_hidden,
        merge=merge,
    )


def _plain_layer(hidden: int, width: int) -> int:
    """Return a layer of four attention linears, two of a plain block and two layer norms, all with biases."""
    return 4 * _linear(hidden, hidden) + _linear(hidden, width) + _linear(width, hidden) + 4 * hidden


def moon_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the MoonViT encoder of Kimi K2.5."""
    depth, hidden, heads = _encoder_shape(fields)
    width, patch = fields.size("intermediate_size"), fields.size("patch_size")
    merge = _merged_patches(fields)
    merged, projected = hidden * merge, wrapper.size("projection_hidden_size")
    positions = fields.size("pos_emb_height") * fields.size("pos_emb_width")
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=_plain_layer(hidden, width),
        stem_params=_linear(3 * patch**2, hidden) + (positions + 2) * hidden,
        connector_params=2 * projected + _linear(merged, merged) + _linear(merged, text_hidden),
        merge=merge,
    )


MOON_K3_DEFAULTS = {
    **MOON_DEFAULTS, "qkv_hidden_size": None, "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False,
    "norm_type": "rmsnorm", "mlp_type": "mlp2", "mm_projector_type": "patchmergerv2",
}  # fmt: skip


def moon_k3_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the MoonViT encoder of Kimi K3: without biases, with RMSNorm, and wider queries, keys and values."""
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias", "norm_type", "mlp_type", "mm_projector_type"):
        if fields.raw(key) != MOON_K3_DEFAULTS[key]:
            raise fields.error(key, f"this architecture is only supported with {MOON_K3_DEFAULTS[key]}")
    depth, hidden = fields.size("num_hidden_layers", most=MAX_LAYERS), fields.size("hidden_size")
    width, patch, heads = (fields.size(key) for key in ("intermediate_size", "patch_size", "num_attention_heads"))
    wide, merge = fields.optional_size("qkv_hidden_size") or hidden, _merged_patches(fields)
    require_divisible(fields, "num_attention_heads", heads, "qkv_hidden_size", wide)
    positions, merged = fields.size("pos_emb_height") * fields.size("pos_emb_width"), hidden * merge
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=4 * hidden * wide + 2 * hidden * width + 2 * hidden,
        stem_params=(3 * patch**2 + positions + 1) * hidden,
        connector_params=merged * merged + merged * text_hidden + text_hidden,
        merge=merge,
    )


def _merged_patches(fields: Fields) -> int:
    kernel = fields.raw("merge_kernel_size")
    if not isinstance(kernel, (list, tuple)) or len(kernel) != 2 or not all(isinstance(one, int) for one in kernel):
        raise fields.error("merge_kernel_size", "must be a list of two numbers")
    return int(kernel[0] * kernel[1])


def gemma4_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Gemma 4 encoder: the parts of its decoder, with two tables of positions."""
    depth = fields.size("num_hidden_layers", most=MAX_LAYERS)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    width, patch, head_dim = fields.size("intermediate_size"), fields.size("patch_size"), fields.size("head_dim")
    attention = 2 * hidden * head_dim * (heads + fields.size("num_key_value_heads")) + 2 * head_dim
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=attention + 3 * hidden * width + 4 * hidden,
        stem_params=hidden * (3 * patch**2 + 2 * fields.size("position_embedding_size")),
        connector_params=hidden * text_hidden,
        merge=fields.size("pooling_kernel_size") ** 2,
    )


def llama4_vision(fields: Fields, text_hidden: int, wrapper: Fields) -> Vision:
    """Read the Llama 4 encoder, whose patches are shuffled into fewer wider ones."""
    depth, hidden, heads = _encoder_shape(fields)
    width, patch = fields.size("intermediate_size"), fields.size("patch_size")
    ratio = fields.raw("pixel_shuffle_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise fields.error("pixel_shuffle_ratio", "must be a number between 0 and 1")
    patches = (fields.size("image_size") // patch) ** 2 + 1
    inner, out = fields.size("projector_input_dim"), fields.size("projector_output_dim")
    return Vision(
        depth,
        hidden,
        width,
        heads,
        patch,
        layer_params=_plain_layer(hidden, width),
        stem_params=_linear(fields.size("num_channels") * patch**2, hidden, False) + (patches + 5) * hidden,
        connector_params=width * inner + out * out + fields.size("vision_output_dim") * text_hidden,
        merge=round(1 / ratio**2),
    )


def _out(fields: Fields, text_hidden: int) -> int:
    """Return the output width, which must be the language model's hidden size."""
    out = fields.size("out_hidden_size")
    if out != text_hidden:
        raise InputError(
            f"must be the language model's hidden_size {text_hidden}", field=fields.where + "out_hidden_size", value=out
        )
    return out


EncoderReader = Callable[[Fields, int, Fields], Vision]
