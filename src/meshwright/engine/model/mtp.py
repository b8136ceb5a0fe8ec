"""Multi-token prediction: one more layer after the last predicts the token after the next one.

transformers does not build these modules, so they are built here from the model's own layer and norm classes. From the
hidden state h of a token, before the final norm, and the embedding e of the next token (DeepSeek-V3, section 2.2):

    h' = layer(fc(cat[norm(e), norm(h)])),  loss = mtp_loss · cross entropy of head(norm(h')) and the token two ahead

Embedding and head are those of the model. For an image token e is the embedding of its placeholder.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meshwright.engine.model.module_names import find_module_names
from meshwright.errors import InputError

DEPTH_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


class MultiTokenPrediction(nn.Module):
    """Computes the head's input for the tokens two ahead from hidden states and the embeddings of the next tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parts = find_module_names(model)
        body: Any = model.get_submodule(parts.body)
        config = body.config
        layers, norm = getattr(body, parts.layers), getattr(body, parts.norm)
        # The names of Qwen3-Next's and Qwen3.5's checkpoints.
        self.pre_fc_norm_embedding = copy.deepcopy(norm)
        self.pre_fc_norm_hidden = copy.deepcopy(norm)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(_layers(type(layers[-1]), config))
        self.norm = copy.deepcopy(norm)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        hidden = self.fc(both)
        for layer in self.layers:
            out = layer(hidden, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        predicted: torch.Tensor = self.norm(hidden)
        return predicted


def mtp_depth(config: Any) -> int:
    """Return how many tokens beyond the next one a model predicts."""
    return next((int(value) for name in DEPTH_NAMES if (value := getattr(config, name, None))), 0)


def add_mtp(model: Any, dtype: torch.dtype) -> None:
    """Add multi-token prediction to a model on the meta device, as `mtp`."""
    depth = mtp_depth(model.config.get_text_config())
    if depth != 1:
        reason = f"has {depth} multi-token-prediction modules; one is supported" if depth else "has none"
        raise InputError(
            f"train.mtp_loss trains multi-token prediction, and {model.config.model_type} {reason}",
            field="train.mtp_loss",
            fix=("train.mtp_loss=0",),
        )
    with torch.device("meta"):
        model.mtp = MultiTokenPrediction(model).to(dtype)


def _layers(kind: Any, config: Any) -> list[nn.Module]:
    """Build the layers: full attention and the model's last type of feed-forward block, or as the config lists."""
    changed = copy.copy(config)
    if hasattr(config, "mtp_layers_block_type"):  # Nemotron-H: attention and experts are separate layers
        changed.layers_block_type = list(config.mtp_layers_block_type)
        return [kind(changed, i) for i in range(len(config.mtp_layers_block_type))]
    if getattr(config, "layer_types", None):
        changed.layer_types = ["full_attention"] * config.num_hidden_layers
    return [kind(changed, config.num_hidden_layers - 1)]
