"""Runs the attention of Wan and FLUX with the engine's attention: any kernel, heads sharded over tp, tokens over cp.

Nothing is masked, so the token order does not matter as long as the rotary tables follow it: a cp rank can have any
part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.engine import attention
from meshwright.engine.diffusion.tensor import ActivationSharding
from meshwright.engine.patching import Patch, apply, symbol

Tables = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [tokens, head width], each twice in a row


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Rotate adjacent pairs of [batch, tokens, heads, width] by the angles of their tokens."""
    cos, sin = (table[None, :, None] for table in tables)
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    rotated = torch.stack((-odd, even), -1).flatten(-2)
    return (x.float() * cos + rotated * sin).to(x.dtype)


def _attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention.attend(module, q, k, v, is_causal=False)[0].flatten(2)


def _heads(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.unflatten(x, -1, (-1, width))


class WanAttention(Patch):
    """Wan's self-attention, or cross-attention if there is a text; queries and keys are normed over all heads."""

    tag = "Attention"

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: None = None,
        rotary_emb: Tables | None = None,
    ) -> torch.Tensor:
        hidden = self.sharding.gather_input(hidden_states)
        kv_input = hidden if encoder_hidden_states is None else self.sharding.replicate(encoder_hidden_states)
        q, k, v = self.norm_q(self.to_q(hidden)), self.norm_k(self.to_k(kv_input)), self.to_v(kv_input)
        q, k, v = (_heads(x, self.head_width) for x in (q, k, v))
        if rotary_emb is not None:
            q, k = rotate(q, rotary_emb), rotate(k, rotary_emb)
        out: torch.Tensor = self.to_out[0](_attend(self, q, k, v))
        return out


class FluxAttention(Patch):
    """FLUX's attention of image and text: with separate weights, or (single blocks) as one sequence."""

    tag = "Attention"

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: Tables | None = None,
    ) -> Any:
        joint = encoder_hidden_states is not None
        hidden = (
            self.sharding.gather_input(hidden_states) if joint else hidden_states
        )  # a single block's norm gathered already
        q, k, v = (_heads(x, self.head_width) for x in (self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)))
        q, k = self.norm_q(q), self.norm_k(k)
        if joint:
            text = self.sharding.gather_input(encoder_hidden_states)
            projections = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
            text_q, text_k, text_v = (_heads(project(text), self.head_width) for project in projections)
            text_q, text_k = self.norm_added_q(text_q), self.norm_added_k(text_k)
            q, k, v = (torch.cat(pair, 1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        if image_rotary_emb is not None:
            q, k = rotate(q, image_rotary_emb), rotate(k, image_rotary_emb)
        out = _attend(self, q, k, v)
        if not joint:
            return out
        text_out, image_out = out.split_with_sizes([text.shape[1], hidden.shape[1]], 1)
        return self.to_out[0](image_out), self.to_add_out(text_out)


MODELS = "diffusers.models.transformers"
PATCHES = {
    "wan": (f"{MODELS}.transformer_wan", "WanAttention", WanAttention),
    "flux": (f"{MODELS}.transformer_flux", "FluxAttention", FluxAttention),
}


def patch_attention(
    model: Any, sharding: ActivationSharding, context: attention.ContextAxis | None, kernel: str
) -> None:
    """Make every attention module use the engine's attention; every context-parallel rank has the whole text."""
    path, name, patch = PATCHES[model.config.model_type]
    original = symbol(path, name)
    module: Any
    for module in model.modules():
        if not isinstance(module, original):
            continue
        crosses = getattr(module, "is_cross_attention", False)
        module.head_width = module.inner_dim // module.heads
        module.sharding, module.kernel, module.context = sharding, kernel, None if crosses else context
        apply(module, patch)
