"""The part of a model that one rank runs: some layers, and the embedding and head at the ends of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.engine.model.anatomy import Anatomy, anatomy, layer_arguments, rotary_tables


class Stage(nn.Module):
    """A run of layers that keep the names they have in the whole model.

    The first stage takes token ids, the others hidden states; the last returns the loss of its micro batch (already
    divided by the global normaliser), the others hidden states.
    """

    def __init__(self, model: nn.Module, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.parts: Anatomy = anatomy(model)
        self.first, self.last = first, last
        self.sequence_rank = 0  # this rank's part of the tokens between regions, with sequence parallelism
        self.partial: frozenset[str] = frozenset()  # parameters whose gradients the step sums over tp
        self.losses: list[torch.Tensor] = []  # cross entropy and z-loss of each micro batch, on the last stage
        body = getattr(model, self.parts.body)
        kept = {str(i): layer for i, layer in enumerate(getattr(body, self.parts.layers)) if i in layers}
        setattr(body, self.parts.layers, nn.ModuleDict(kept))  # a dict, so that layers keep their numbers
        if not first:
            _drop(body, self.parts.embedding, self.parts.positions)
        if not last:
            _drop(body, self.parts.norm)
        self.add_module(self.parts.body, body)
        self.lm_head: Any = model.lm_head if last else None

    @property
    def body(self) -> Any:
        return getattr(self, self.parts.body)

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of this stage by their place in the whole model."""
        return {int(i): layer for i, layer in getattr(self.body, self.parts.layers).items()}

    @property
    def embedding(self) -> Any:
        """The token embedding, on the first stage."""
        return getattr(self.body, self.parts.embedding)

    @property
    def norm(self) -> Any:
        """The last norm, on the last stage."""
        return getattr(self.body, self.parts.norm)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self._embed(x, positions) if self.first else x
        told = {} if documents is None else {"documents": documents}
        tables = rotary_tables(self.body, self.parts, hidden, positions)
        for i, layer in self.layers.items():
            where = layer_arguments(self.body, self.parts, tables, i)
            hidden = layer(hidden, attention_mask=None, position_ids=positions, **where, **told)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if not self.last:
            return hidden
        loss: torch.Tensor = self.lm_head(self.norm(hidden), labels, weights)
        return loss.reshape(1)  # pipelines put outputs side by side and need a dimension for it

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        if self.parts.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(self.parts.embedding_scale, dtype=hidden.dtype)
        if self.parts.positions is not None:
            table = getattr(self.body, self.parts.positions)(positions)
            parts = positions.shape[1] // hidden.shape[1]  # with sequence parallelism a rank holds a part of the tokens
            hidden = hidden + table.chunk(parts, 1)[self.sequence_rank % parts]
        return hidden


def _drop(module: nn.Module, *names: str | None) -> None:
    for name in names:
        if name is not None:
            setattr(module, name, None)
