"""A pipeline stage: some layers of a model, and the embedding and head at the ends of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.engine.attention.mask_tables import flex_windows, shared_tables, uses_tables
from meshwright.engine.experts.router import takes_token_mask
from meshwright.engine.kernels.dropout_keys import layer_keys
from meshwright.engine.model.module_names import (
    ModuleNames,
    find_module_names,
    is_attention,
    layer_arguments,
    rotary_tables,
)
from meshwright.engine.vision import (
    VisionModules,
    check_deepstack_layers,
    encode_images,
    feature_indices,
    image_groups,
    vision_modules_of,
)


class Stage(nn.Module):
    """Consecutive layers of a model, with the parameter names of the full model.

    The first stage takes token ids, the others hidden states; the last returns the loss of its micro batch (already
    divided by the global normalizer), the others hidden states. The vision encoder is on the first stage.
    """

    def __init__(self, model: nn.Module, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.names: ModuleNames = find_module_names(model)
        self.vision_modules: VisionModules | None = vision_modules_of(model.config)
        if self.vision_modules is not None and first and not last:
            check_deepstack_layers(model.config, len(layers))
        self.first, self.last = first, last
        self.sequence_rank = 0  # rank among the sequence-parallel ranks
        self.local_positions: torch.Tensor | None = None  # of this rank's tokens, with context parallelism
        self.partial_grads: frozenset[str] = frozenset()  # parameters whose gradients the step reduces over tp
        self.loaded: Any = None  # on a rank's first stage: report of the loaded checkpoint
        self.attention_modules: dict[int, list[nn.Module]] = {}  # by layer, once configured
        self.losses: list[torch.Tensor] = []  # on the last stage: cross entropy, z-loss and mtp loss per micro batch
        body: Any = model.get_submodule(self.names.body)
        self.depth = len(getattr(body, self.names.layers))
        kept = {str(i): layer for i, layer in enumerate(getattr(body, self.names.layers)) if i in layers}
        setattr(body, self.names.layers, nn.ModuleDict(kept))  # a dict keeps the layer numbers of the full model
        mtp: Any = getattr(model, "mtp", None)
        self.embedding_on_last_stage = mtp is not None  # multi-token prediction needs a copy of it there
        if not first:
            _drop(body, self.names.positions)
        if not first and not (last and self.embedding_on_last_stage):
            _drop(body, self.names.embedding)
        if not last:
            _drop(body, self.names.norm)
        if self.vision_modules is not None and not first:
            for path in self.vision_modules.entry_modules:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, None)
        outermost = self.names.body.partition(".")[0]
        self.add_module(outermost, getattr(model, outermost))
        self.mtp: Any = mtp if last else None
        self.lm_head: Any = model.lm_head if last else None
        if last and not first and self.embedding_on_last_stage:
            # A head tied to the embedding gets a copy of its own: zero-bubble schedules do not support a weight that is
            # used at both ends of a stage.
            head: Any = model.lm_head
            head.weight = nn.Parameter(head.weight.detach().clone())

    @property
    def body(self) -> Any:
        return self.get_submodule(self.names.body)

    @property
    def embedding_weight(self) -> str:
        """The name of the embedding's weight, on any stage."""
        return f"{self.names.body}.{self.names.embedding}.weight"

    @property
    def head_weight(self) -> str:
        """The name of the head's weight, on any stage."""
        return "lm_head.weight"

    @property
    def head_is_tied(self) -> bool:
        """Whether head and embedding share a weight, of which both ends of a pipeline have a copy."""
        return bool(getattr(self.body.config, "tie_word_embeddings", False))

    def shared_name(self, name: str) -> str:
        """Return the name of a parameter that is the same on all stages: a tied head has that of the embedding."""
        return self.embedding_weight if self.head_is_tied and name == self.head_weight else name

    @property
    def vision_entry_modules(self) -> list[nn.Module]:
        """The vision modules that are called directly (the encoder, a projector), on the first stage; else none."""
        if self.vision_modules is None or not self.first:
            return []
        return [self.get_submodule(path) for path in self.vision_modules.entry_modules]

    @property
    def vision_blocks(self) -> dict[int, nn.Module]:
        """The layers of the vision encoder, on the first stage; else none."""
        if self.vision_modules is None or not self.first:
            return {}
        return dict(enumerate(self.get_submodule(self.vision_modules.blocks).children()))

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of this stage by their number in the full model; those of multi-token prediction follow."""
        mtp_layers = self.mtp.layers if self.mtp is not None else ()
        return self.decoder_layers | {self.depth + i: layer for i, layer in enumerate(mtp_layers)}

    @property
    def decoder_layers(self) -> dict[int, nn.Module]:
        """The decoder layers of this stage in order, without multi-token prediction."""
        return {int(i): layer for i, layer in getattr(self.body, self.names.layers).items()}

    @property
    def embedding(self) -> Any:
        """The token embedding: on the first stage, and on the last with multi-token prediction; else None."""
        return getattr(self.body, self.names.embedding)

    @property
    def norm(self) -> Any:
        """The final norm, on the last stage."""
        return getattr(self.body, self.names.norm)

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
        dropout_keys: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        **images: torch.Tensor,
    ) -> torch.Tensor:
        feature_index = self._local_tokens(feature_indices(images)) if images else None
        features = encode_images(self.model, images) if images and self.first else None
        hidden = self._embed(x, positions) if self.first else x
        if features is not None and feature_index is not None:
            hidden = features.scatter_into(hidden, self._sequence_shard(feature_index, hidden))
        kwargs: dict[str, Any] = {"attention_mask": None, "position_ids": positions}
        if documents is not None:
            kwargs["documents"] = documents
        if feature_index is not None and self.vision_modules is not None and self.vision_modules.whole_images:
            kwargs["image_groups"] = image_groups(feature_index)
        axes = self._local_tokens(images["axes"]) if "axes" in images else positions
        tables = rotary_tables(self.body, self.names, hidden, axes)
        masks = self._mask_tables(hidden, positions.shape[-1], documents, kwargs.get("image_groups"))
        for i, layer in self.decoder_layers.items():
            layer_kwargs = layer_arguments(self.body, self.names, tables, i) | _dropout_kwargs(dropout_keys, i)
            layer_kwargs |= self._mask_kwargs(token_mask, layer, hidden) | masks.get(i, {})
            hidden = layer(hidden, **layer_kwargs, **kwargs)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            if features is not None and feature_index is not None:
                hidden = features.add_deepstack(hidden, self._sequence_shard(feature_index, hidden), i)
        if not self.last:
            return hidden
        mtp_inputs: tuple[Any, ...] = ()
        if self.mtp is not None and self.training:
            layer_kwargs = layer_arguments(self.body, self.names, tables, self.depth - 1)
            layer_kwargs |= _dropout_kwargs(dropout_keys, self.depth)
            layer_kwargs |= self._mask_kwargs(token_mask, self.mtp.layers[0], hidden) | masks.get(self.depth, {})
            predicted = self.mtp(hidden, self._embed_tokens(next_tokens), **layer_kwargs, **kwargs)
            mtp_inputs = (predicted, labels_2, weights_2)
        # One call of the head for both losses: FSDP gathers its weight once per call.
        loss: torch.Tensor = self.lm_head(self.norm(hidden), labels, weights, *mtp_inputs)
        return loss.reshape(1)  # pipeline schedules concatenate outputs and need a dimension

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self._embed_tokens(tokens)
        if self.names.positions is not None:
            table = getattr(self.body, self.names.positions)(positions)
            hidden = hidden + self._sequence_shard(table, hidden)
        return hidden

    def _local_tokens(self, value: torch.Tensor) -> torch.Tensor:
        """Select the values of this rank's tokens from one value per token of the sequence (context parallelism)."""
        return value if self.local_positions is None else value[..., self.local_positions]

    def _sequence_shard(self, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Select the sequence-parallel shard that matches `hidden` from one value per token of this rank."""
        parts = value.shape[1] // hidden.shape[1]
        return value.chunk(parts, 1)[self.sequence_rank % parts]

    def _mask_kwargs(self, mask: torch.Tensor | None, layer: nn.Module, hidden: torch.Tensor) -> dict[str, Any]:
        """Return the token mask as keyword argument of a layer that takes one."""
        masked = mask is not None and takes_token_mask(layer)
        return {"token_mask": self._sequence_shard(mask, hidden)} if masked and mask is not None else {}

    def find_attention(self) -> None:
        """Record the attention modules of every layer."""
        self.attention_modules = {
            i: [module for module in layer.modules() if is_attention(module)] for i, layer in self.layers.items()
        }

    def _mask_tables(
        self, hidden: torch.Tensor, width: int, documents: torch.Tensor | None, groups: torch.Tensor | None
    ) -> dict[int, dict[str, Any]]:
        """Return the block tables of the masks as keyword argument of every layer with attention.

        With context parallelism every rank computes with other tokens than it stores, so attention builds its own.
        """
        if self.local_positions is not None or not uses_tables(hidden):
            return {}
        with_attention = {i: modules for i, modules in self.attention_modules.items() if modules}
        modules = [module for found in with_attention.values() for module in found]
        windows = flex_windows(modules, documents is not None or groups is not None)
        if not windows:
            return {}
        tables = shared_tables(windows, width, hidden.device, documents, groups)
        return {i: {"block_tables": tables} for i in with_attention}

    def _embed_tokens(self, tokens: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.embedding(tokens)
        scale = self.names.embedding_scale
        return found if scale == 1.0 else found * torch.tensor(scale, dtype=found.dtype)


def _dropout_kwargs(keys: torch.Tensor | None, layer: int) -> dict[str, torch.Tensor]:
    """Return the dropout keys of the tokens in a layer, as its keyword argument."""
    return {} if keys is None else {"dropout_keys": layer_keys(keys, layer)}


def _drop(module: nn.Module, *names: str | None) -> None:
    for name in names:
        if name is not None:
            setattr(module, name, None)
