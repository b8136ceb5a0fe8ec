"""Pipeline stages of a model that runs transformers' own forward pass: every stage keeps some of its blocks.

A stage runs the whole forward pass of the model, in which blocks of other stages do nothing. The block before the
stage's first one puts in the hidden states that were received; the block after its last one ends the pass. So whatever
the model passes to its blocks (masks, rotary tables, positions) is computed by its own code on every stage.

This is right only if blocks run one after the other, each on the output of the last, and get nothing else that other
modules compute. A small model of the type is traced (`trace_blocks`), and its stages are compared with the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.architecture import layer_list

TOKENS = 16
SAME = 1e-5  # relative difference of logits that counts as none


class UnsplitError(Exception):
    """Why the blocks of a model cannot be put on different stages."""


class LeftForwardError(Exception):
    """Ends the forward pass of a stage that is not the last, with the hidden states to send."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class BlockOrder:
    """The modules with weights that run before the blocks and after them, and what blocks return."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    outputs: int  # values in the tuple that a block returns; 0: it returns hidden states alone


class Received:
    """The hidden states that a stage received for the current micro batch."""

    hidden: torch.Tensor | None = None


class AbsentModule(nn.Module):
    """A module of another stage: it keeps the plain attributes, which a model's forward pass may read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in module.__dict__.items():
            if not name.startswith("_") and name not in self.__dict__ and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value

    def forward(self, given: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return a value of a usable shape; the block at the stage's start replaces what is computed from it."""
        return given if given.is_floating_point() and given.dim() > 2 else torch.zeros((), device=given.device)


class AbsentBlock(AbsentModule):
    """A block of another stage: hidden states pass through it, enter the stage here, or leave it."""

    def __init__(self, block: nn.Module, place: str, received: Received, outputs: int) -> None:
        super().__init__(block)
        self.place, self.received, self.outputs = place, received, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if self.place == "after":
            raise LeftForwardError(hidden)
        if self.place == "before":
            hidden = self.received.hidden
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def keep_blocks(model: Any, path: str, order: BlockOrder, kept: range, received: Received) -> None:
    """Remove the weights of other stages from a model: blocks outside `kept`, embedding and head at the ends."""
    blocks = model.get_submodule(path)
    for number, (name, block) in enumerate(list(blocks._modules.items())):
        if number not in kept:
            place = "before" if number == kept.start - 1 else "after" if number == kept.stop else "elsewhere"
            blocks._modules[name] = AbsentBlock(block, place, received, order.outputs)
    others = (*(order.before if kept.start > 0 else ()), *(order.after if kept.stop < len(blocks) else ()))
    for name in others:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._modules[last] = AbsentModule(model.get_submodule(name))


def run_stage(model: Any, given: torch.Tensor, received: Received, first: bool, **kwargs: Any) -> Any:
    """Return the output of a model's forward pass on a stage, or the hidden states to send to the next one.

    `given` are token ids on the first stage, hidden states on the others.
    """
    received.hidden = given
    # A copy: models that scale their embedding in place would change the received hidden states.
    entry = {"input_ids": given} if first else {"inputs_embeds": given.detach().clone()}
    try:
        return model(**entry, use_cache=False, return_dict=True, **kwargs)
    except LeftForwardError as left:
        return left.hidden
    finally:
        received.hidden = None


def trace_blocks(model: Any) -> BlockOrder:
    """Return the order of a small model's blocks; raise UnsplitError if stages would compute something else."""
    path = layer_list(model)
    tokens = torch.arange(TOKENS)[None] % (model.config.get_text_config().vocab_size - 3) + 3
    count = len(model.get_submodule(path))
    if count < 2:
        raise UnsplitError("it has one layer")
    fresh = copy.deepcopy(model)  # first: a forward pass may leave states behind
    order = _Tracer(model, path).run(tokens)
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False, return_dict=True).logits.float()
        # Every place: a layer may take something from the one before it that most layers do not.
        for cut in range(1, count):
            try:
                staged = _staged_logits(fresh, path, order, (range(cut), range(cut, count)), tokens).float()
            except Exception as error:
                raise UnsplitError(f"layer {cut} does not run from hidden states alone: {error}") from error
            if staged.shape != whole.shape or bool((staged - whole).abs().max() > SAME * whole.abs().max()):
                raise UnsplitError(f"layer {cut} computes something else from hidden states alone")
    return order


def _staged_logits(
    model: Any, path: str, order: BlockOrder, blocks: tuple[range, ...], tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits of stages, which copies of a model become."""
    given: Any = tokens
    for kept in blocks:
        stage, received = copy.deepcopy(model), Received()
        keep_blocks(stage, path, order, kept, received)
        given = run_stage(stage, given, received, first=kept.start == 0)
    logits: torch.Tensor = given.logits
    return logits


class _Tracer:
    """Follows one forward pass: which modules run when, and what each block receives."""

    def __init__(self, model: Any, path: str) -> None:
        self.model = model
        self.blocks = list(model.get_submodule(path).children())
        self.width = model.config.get_text_config().hidden_size
        self.started = self.ended = 0  # blocks
        self.last: Any = None  # output of the last block
        self.before: list[str] = []
        self.after: list[str] = []
        self.outputs: set[int] = set()

    def run(self, tokens: torch.Tensor) -> BlockOrder:
        """Run the model once and return the order of its blocks."""
        inside = {id(module) for block in self.blocks for module in block.modules()}
        handles = [one for number, block in enumerate(self.blocks) for one in self._watch(number, block)]
        for name, module in self.model.named_modules():
            if id(module) not in inside and any(p is not None for p in module._parameters.values()):
                handles.append(module.register_forward_pre_hook(self._outside(name)))
        try:
            self.model(input_ids=tokens, use_cache=False, return_dict=True)
        finally:
            for handle in handles:
                handle.remove()
        if self.ended != len(self.blocks):
            raise UnsplitError(f"{self.ended} of its {len(self.blocks)} layers run")
        if len(self.outputs) != 1:
            raise UnsplitError("its layers return different numbers of values")
        return BlockOrder(tuple(dict.fromkeys(self.before)), tuple(dict.fromkeys(self.after)), self.outputs.pop())

    def _watch(self, number: int, block: nn.Module) -> tuple[Any, Any]:
        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = _hidden(args, kwargs)
            if number != self.started:
                raise UnsplitError("its layers run in another order, or several times")
            if self.last is not None and hidden is not self.last:
                raise UnsplitError(f"it computes something between layers {number - 1} and {number}")
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[1] != TOKENS:
                raise UnsplitError("its layers do not receive one vector per token")
            if hidden.shape[2] != self.width:  # streams side by side: stages exchange tensors of the model's width
                raise UnsplitError(f"its layers receive {hidden.shape[2]} values per token, hidden_size={self.width}")
            named = {f"argument {place}": value for place, value in enumerate(args)} | kwargs
            for name, value in named.items():
                parts = value if isinstance(value, (tuple, list)) else (value,)
                if any(isinstance(one, torch.Tensor) and one.requires_grad and one is not hidden for one in parts):
                    raise UnsplitError(f"its layers also receive what other modules compute ({name})")
            self.started += 1

        def end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            several = isinstance(output, (tuple, list))
            self.outputs.add(len(output) if several else 0)
            self.last = output[0] if several else output
            self.ended += 1

        return (
            block.register_forward_pre_hook(start, with_kwargs=True),
            block.register_forward_hook(end, with_kwargs=True),
        )

    def _outside(self, name: str) -> Callable[[nn.Module, Any], None]:
        def start(_: nn.Module, __: Any) -> None:
            if self.started == 0:
                self.before.append(name)
            elif self.ended == len(self.blocks):
                self.after.append(name)
            else:
                raise UnsplitError(f"{name} runs between its layers")

        return start
