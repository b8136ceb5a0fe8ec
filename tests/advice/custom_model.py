"""A model class of a user's own: Llama with a feed-forward module and an attention module that no table knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM


class OwnFeedForward(nn.Module):
    """A gated feed-forward module with names of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=True)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=True)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = nn.functional.silu(self.w1(x)) * self.w3(x)
        assert gated.shape[-1] == self.inner  # wrong unless the plan divides the attribute
        return self.w2(gated)


class OwnLlama(LlamaForCausalLM):
    """Llama with that module."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnFeedForward(config.hidden_size, config.intermediate_size).to(self.dtype)


PLAN = {
    "layers.*.mlp.w1": "colwise",
    "layers.*.mlp.w3": "colwise",
    "layers.*.mlp.w2": "rowwise",
    "layers.*.mlp.inner": "divide",
}


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Focal loss: tokens that are already predicted well count less."""
    log_p = torch.log_softmax(logits.float(), -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -((1 - log_p.exp()) ** 2) * log_p
