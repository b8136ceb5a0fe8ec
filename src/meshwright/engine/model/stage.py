"""The part of a model that one rank runs: some layers, and the embedding and head at the ends of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.engine.kernels.dropout_keys import layer_keys
from meshwright.engine.model.module_names import ModuleNames, find_module_names, layer_arguments, rotary_tables
from meshwright.engine.vision import (
    VisionModules,
    check_deepstack_layers,
    encode_images,
    feature_indices,
    image_groups,
    vision_modules_of,
)


class Stage(nn.Module):
    """A run of layers that keep the names they have in the whole model.

    The first stage takes token ids, the others hidden states; the last returns the loss of its micro batch (already
    divided by the global normaliser), the others hidden states. The vision parts of a model are on the first stage.
    """

    def __init__(self, model: nn.Module, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.parts: ModuleNames = find_module_names(model)
        self.vision_modules: VisionModules | None = vision_modules_of(model.config)
        if self.vision_modules is not None and first and not last:
            check_deepstack_layers(model.config, len(layers))
        self.first, self.last = first, last
        self.sequence_rank = 0  # this rank's part of the tokens between regions, with sequence parallelism
        self.local_positions: torch.Tensor | None = None  # of this rank's tokens, with context parallelism
        self.partial_grads: frozenset[str] = frozenset()  # parameters whose gradients the step reduces over tp
        self.loaded: Any = None  # on a rank's first stage: what was read of a folder (folders.Loaded)
        self.losses: list[torch.Tensor] = []  # on the last stage: cross entropy, z-loss and mtp of each micro batch
        body: Any = model.get_submodule(self.parts.body)
        self.depth = len(getattr(body, self.parts.layers))
        kept = {str(i): layer for i, layer in enumerate(getattr(body, self.parts.layers)) if i in layers}
        setattr(body, self.parts.layers, nn.ModuleDict(kept))  # a dict, so that layers keep their numbers
        mtp: Any = getattr(model, "mtp", None)
        self.embedding_at_end = mtp is not None  # the last stage of the pipeline holds a copy of it
        if not first:
            _drop(body, self.parts.positions)
        if not first and not (last and self.embedding_at_end):
            _drop(body, self.parts.embedding)
        if not last:
            _drop(body, self.parts.norm)
        if self.vision_modules is not None and not first:
            for path in self.vision_modules.entry_modules:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, None)
        outermost = self.parts.body.partition(".")[0]
        self.add_module(outermost, getattr(model, outermost))
        self.mtp: Any = mtp if last else None
        self.lm_head: Any = model.lm_head if last else None
        if last and not first and self.embedding_at_end:
            # A head tied to the embedding is another copy: schedules that split the backward pass cannot follow a
            # weight that is used at both ends of a stage.
            head: Any = model.lm_head
            head.weight = nn.Parameter(head.weight.detach().clone())

    @property
    def body(self) -> Any:
        return self.get_submodule(self.parts.body)

    @property
    def seeing(self) -> list[nn.Module]:
        """The vision parts that are called by themselves, on the first stage of a model that sees; else none."""
        if self.vision_modules is None or not self.first:
            return []
        return [self.get_submodule(path) for path in self.vision_modules.entry_modules]

    @property
    def seeing_blocks(self) -> dict[int, nn.Module]:
        """The layers of the vision tower, where `seeing` has one."""
        if self.vision_modules is None or not self.first:
            return {}
        return dict(enumerate(self.get_submodule(self.vision_modules.blocks).children()))

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of this stage by their place in the whole model; multi-token prediction's come after the last."""
        further = self.mtp.layers if self.mtp is not None else ()
        return self.own_layers | {self.depth + i: layer for i, layer in enumerate(further)}

    @property
    def own_layers(self) -> dict[int, nn.Module]:
        """The layers of this stage that hidden states run through, one after the other."""
        return {int(i): layer for i, layer in getattr(self.body, self.parts.layers).items()}

    @property
    def embedding(self) -> Any:
        """The token embedding: on the first stage, and on the last where multi-token prediction needs it; else None."""
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
        next_tokens: torch.Tensor | None = None,
        labels_2: torch.Tensor | None = None,
        weights_2: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        **images: torch.Tensor,
    ) -> torch.Tensor:
        at = self._held(feature_indices(images)) if images else None
        seen = encode_images(self.model, images) if images and self.first else None
        hidden = self._embed(x, positions) if self.first else x
        if seen is not None and at is not None:
            hidden = seen.scatter_into(hidden, self._between(at, hidden))
        told: dict[str, Any] = {"attention_mask": None, "position_ids": positions}
        if documents is not None:
            told["documents"] = documents
        if at is not None and self.vision_modules is not None and self.vision_modules.whole_images:
            told["image_groups"] = image_groups(at)
        axes = self._held(images["axes"]) if "axes" in images else positions
        tables = rotary_tables(self.body, self.parts, hidden, axes)
        for i, layer in self.own_layers.items():
            where = layer_arguments(self.body, self.parts, tables, i) | _noise(noise, i)
            hidden = layer(hidden, **where, **told)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            if seen is not None and at is not None:
                hidden = seen.add_deepstack(hidden, self._between(at, hidden), i)
        if not self.last:
            return hidden
        further: tuple[Any, ...] = ()
        if self.mtp is not None and self.training:
            where = layer_arguments(self.body, self.parts, tables, self.depth - 1) | _noise(noise, self.depth)
            further = (self.mtp(hidden, self._look_up(next_tokens), **where, **told), labels_2, weights_2)
        # One call of the head for both: it may be gathered for the call and freed after it.
        loss: torch.Tensor = self.lm_head(self.norm(hidden), labels, weights, *further)
        return loss.reshape(1)  # pipelines put outputs side by side and need a dimension for it

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self._look_up(tokens)
        if self.parts.positions is not None:
            table = getattr(self.body, self.parts.positions)(positions)
            hidden = hidden + self._between(table, hidden)
        return hidden

    def _held(self, value: torch.Tensor) -> torch.Tensor:
        """Of a value for each token of the sequence, those that this rank holds."""
        return value if self.local_positions is None else value[..., self.local_positions]

    def _between(self, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Of a value for each of the rank's tokens, those between regions: with sequence parallelism a part."""
        parts = value.shape[1] // hidden.shape[1]
        return value.chunk(parts, 1)[self.sequence_rank % parts]

    def _look_up(self, tokens: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.embedding(tokens)
        scale = self.parts.embedding_scale
        return found if scale == 1.0 else found * torch.tensor(scale, dtype=found.dtype)


def _noise(keys: torch.Tensor | None, layer: int) -> dict[str, torch.Tensor]:
    """What adapters with dropout are told of the tokens in a layer."""
    return {} if keys is None else {"noise": layer_keys(keys, layer)}


def _drop(module: nn.Module, *names: str | None) -> None:
    for name in names:
        if name is not None:
            setattr(module, name, None)
