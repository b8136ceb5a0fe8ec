"""A model that runs transformers' own forward pass: for model types that the engine does not run layer by layer.

Nothing of the model's code is repeated or replaced, so any causal language model of transformers trains. Its decoder
layers are found by structure. Only the head is patched where it is a linear layer: it computes the loss, so that logits
of all tokens never exist at once. What the model does with logits (scale, soft cap) is found by a probe.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.architecture import layer_list
from meshwright.engine.model.block_split import BlockOrder, Received, keep_blocks, run_stage
from meshwright.engine.model.stage import Stage
from meshwright.errors import InputError

PROBE = (
    0.0,
    2.0**-10,
    -(2.0**-10),
    0.5,
    -2.0,
    7.0,
    -30.0,
    100.0,
    1e6,
)  # logits: small ones show the scale, large ones a cap
POSITIONS = "position_ids"


@dataclass(frozen=True)
class LogitTransform:
    """What a model does with its head's output: scale · logits, then cap · tanh(logits / cap)."""

    scale: float = 1.0
    softcap: float | None = None


class TransformersStage(Stage):
    """A stage of a model, mostly the only one: transformers' forward pass, with the model's names.

    With several stages, `blocks` are those of this one, and `order` says how they run.
    """

    def __init__(self, model: Any, blocks: range | None = None, order: BlockOrder | None = None) -> None:
        nn.Module.__init__(self)
        _require_parts_inside_modules(model)
        self.__dict__["model_"] = model  # not a child: parameters keep the model's names
        self.layers_path = layer_list(model)
        self.depth = len(model.get_submodule(self.layers_path))
        self.blocks = range(self.depth) if blocks is None else blocks
        self.first, self.last = self.blocks.start == 0, self.blocks.stop == self.depth
        self.received = Received()
        self.end_weights = _end_weights(model)
        if order is not None:
            _require_weights_inside_stages(model, order, self.layers_path, self.blocks, self.end_weights)
            keep_blocks(model, self.layers_path, order, self.blocks, self.received)
        self.vision_modules, self.mtp = None, None
        self.sequence_rank, self.local_positions = 0, None
        self.partial_grads = frozenset()
        self.embedding_on_last_stage = False
        self.loaded = None
        self.attention_modules = {}
        self.losses: list[torch.Tensor] = []
        self.aux_loss_weight = 0.0  # of the model's own balancing loss of a micro batch
        self.targets = Targets()
        self.logits_loss: Any = None  # set where the head does not compute the loss
        self._modules.update(model._modules)  # add_module refuses names of this class's own attributes
        self.tied = _shared_parameters(model)

    @property
    def transformers_model(self) -> Any:
        return self.__dict__["model_"]

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the model: one of its names may be an attribute of this class."""
        found: nn.Module = self.transformers_model.get_submodule(target) if target else self
        return found

    @property
    def body(self) -> Any:
        return self.transformers_model

    @property
    def embedding_weight(self) -> str:
        return self.end_weights.embedding

    @property
    def head_weight(self) -> str:
        return self.end_weights.head

    @property
    def head_is_tied(self) -> bool:
        """Whether the ends have copies of one weight; on a single stage it is one parameter."""
        return self.end_weights.tied and self.first != self.last

    @property
    def decoder_layers(self) -> dict[int, nn.Module]:
        """The decoder layers of this stage by their number, in the order of their list."""
        every = enumerate(self.get_submodule(self.layers_path).children())
        return {number: layer for number, layer in every if number in self.blocks}

    @property
    def embedding(self) -> Any:
        """The token embedding, on the first stage."""
        return self.transformers_model.get_input_embeddings() if self.first else None

    @property
    def head(self) -> Any:
        """The module that returns logits, on the last stage; None if the model has none."""
        return self.transformers_model.get_output_embeddings() if self.last else None

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
        model = self.transformers_model
        model.training = self.training  # it is not a child
        kwargs = {POSITIONS: positions} if documents is not None else {}
        targets = self.targets
        targets.labels, targets.weights, targets.loss = labels, weights, None
        output = run_stage(model, x, self.received, self.first, **kwargs)
        if not self.last:
            hidden: torch.Tensor = output
            return hidden
        loss: Any = targets.loss
        targets.labels = targets.weights = targets.loss = None
        if loss is None:
            loss = self.logits_loss(output.logits, labels, weights)
        if self.aux_loss_weight and self.training:
            loss = loss + self.aux_loss_weight * output.aux_loss
        total: torch.Tensor = loss.reshape(1)
        return total

    def find_attention(self) -> None:
        """Leave the model's attention as it is."""

    def tie_again(self) -> None:
        """Share parameters again that the model shares, after they were allocated one by one."""
        for (owner, name), *others in self.tied:
            for other, other_name in others:
                other._parameters[other_name] = owner._parameters[name]

    def layers_of_their_own(self) -> list[nn.Module]:
        """Return the layers that share no parameter with another part of the model: each can be one FSDP unit."""
        inside: dict[int, set[int]] = {
            i: {id(module) for module in layer.modules()} for i, layer in self.decoder_layers.items()
        }
        places: dict[int, int] = defaultdict(int)  # in how many layers a module is
        for modules in inside.values():
            for one in modules:
                places[one] += 1
        shared = {id(owner) for group in self.tied for owner, _ in group}
        return [
            layer
            for i, layer in self.decoder_layers.items()
            if not inside[i] & shared and all(places[one] == 1 for one in inside[i])
        ]


class Targets:
    """Labels and loss weights of the current micro batch for the head, and the loss that it returned."""

    labels: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    loss: torch.Tensor | None = None


def _require_parts_inside_modules(model: Any) -> None:
    """Raise for parameters of the model itself, outside of its modules."""
    own = [*model._parameters, *model._buffers]
    if own:
        raise InputError(
            f"{type(model).__name__} has parameters outside of its modules ({', '.join(own)}), which cannot be sharded",
            field="model",
            value=model.config.model_type,
        )


@dataclass(frozen=True)
class EndWeights:
    """The names of the weights of embedding and head, and whether they are one."""

    embedding: str = ""
    head: str = ""
    tied: bool = False


def _end_weights(model: Any) -> EndWeights:
    """Return the weights at the ends of a model that has all of its modules."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    tied = getattr(head, "weight", None) is not None and head.weight is getattr(embedding, "weight", None)
    return EndWeights(names.get(id(embedding), ""), names.get(id(head), ""), tied)


def _require_weights_inside_stages(model: Any, order: BlockOrder, path: str, kept: range, ends: EndWeights) -> None:
    """Raise for a weight that modules of several stages share, unless these are embedding and head."""
    names = {id(module): name for name, module in model.named_modules()}
    depth = len(model.get_submodule(path))

    def stays(name: str) -> bool:
        if name.startswith(f"{path}."):
            return int(name.removeprefix(f"{path}.").partition(".")[0]) in kept
        return not ((name in order.before and kept.start > 0) or (name in order.after and kept.stop < depth))

    for group in _shared_parameters(model):
        places = [names[id(owner)] for owner, _ in group]
        if {f"{place}.weight" for place in places} == {ends.embedding, ends.head}:
            continue
        if len({stays(place) for place in places}) > 1:
            kind = model.config.model_type
            raise InputError(
                f"{' and '.join(places[:2])} of {kind} share a weight, which stages would train apart",
                field="layout.pp",
                fix=("layout.pp=1",),
            )


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of every parameter that several modules share."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, name))
    return [group for group in places.values() if len(group) > 1]


class _Outputs:
    """What a model's body returns: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def find_logit_transform(model: Any) -> LogitTransform | None:
    """Return what the model does with the output of its linear head; None if it does anything else.

    The model's own forward pass runs with a body and a head that return fixed values, so no weights are needed.
    """
    head: Any = model.get_output_embeddings()
    body: Any = model.base_model
    if not isinstance(head, nn.Linear) or body is model:
        return None
    probe = torch.tensor([[PROBE]])
    hidden = torch.zeros(1, 1, head.in_features)
    seen: list[torch.Tensor] = []

    def capture(given: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(given)
        return probe.clone()

    replaced: Any = head  # the check above is of its class
    body.forward, replaced.forward = (lambda *_, **__: _Outputs(hidden)), capture
    try:
        with torch.no_grad():
            found = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False, return_dict=True).logits
    except Exception:  # code that needs more than hidden states
        return None
    finally:
        del body.forward, head.forward
    if len(seen) != 1 or found is None or found.shape != probe.shape:
        return None
    return _transform(found.flatten().double(), head.bias is not None)


def _transform(found: torch.Tensor, has_bias: bool) -> LogitTransform | None:
    given = torch.tensor(PROBE, dtype=torch.float64)
    scale = float(found[1] / given[1])
    if abs(scale - 1) < 1e-6:
        scale = 1.0
    if has_bias and scale != 1.0:
        return None
    cap = float(found[-1])
    for transform, expected in (
        (LogitTransform(scale), given * scale),
        (LogitTransform(scale, cap), cap * torch.tanh(given * scale / cap) if cap else given),
    ):
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-7):
            return transform
    return None
