"""With sequence parallelism each rank saves only its shard; the backward pass gathers inputs again."""

from __future__ import annotations

import time
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.kept import kept_bytes
from tests.engine.parity import SEQ, recipe
from tests.engine.ranks import run

from meshwright.engine import collectives
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize.output_recompute import OutputNotes
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

SAMPLES = 2
PATIENCE_S = 0.5
TP_SP: dict[str, Any] = {"tp": 2, "sp": True}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": modules}


class Counted:
    """A collective of the engine with counted calls and weak references to its results."""

    def __init__(self, name: str) -> None:
        self.inner, self.calls = getattr(collectives, name), 0
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        setattr(collectives, name, self)

    def __call__(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(*args)
        self.storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self) -> int:
        """Return the number of live results; gloo's threads release theirs shortly after the call."""
        until = time.monotonic() + PATIENCE_S
        while (left := sum(one() is not None for one in self.storages)) and time.monotonic() < until:
            time.sleep(0.01)
        return left


def trainer_of(family: str, layout: dict[str, Any], layers: int = 2) -> Trainer:
    config = transformers_config(FAMILIES[family] | {"num_hidden_layers": layers})
    given = recipe(types.Layout(micro_batch_size=SAMPLES, **layout))
    source = Mock(config.vocab_size, SEQ, seed=1)
    return Trainer(given, config, build_mesh(given.layout, "cpu"), torch.device("cpu"), source)


def one_micro_batch(rank: int, world: int, family: str, layout: dict[str, Any]) -> dict[str, int]:
    """Count the collectives of a forward and backward pass, and gathered tensors that outlive the forward pass."""
    trainer = trainer_of(family, layout)
    (stage,) = trainer.stages
    tokens, kwargs = trainer.loader.batch(0).micro_batches(SAMPLES)[0]
    gathers, scatters = Counted("_all_gather"), Counted("_reduce_scatter")
    loss = stage(tokens, **kwargs)
    found = {"gathers": gathers.calls, "scatters": scatters.calls, "kept": gathers.alive()}
    loss.sum().backward()
    return found | {"backward": gathers.calls - found["gathers"], "left": gathers.alive()}


CASES = {
    "nothing again": ("llama", TP_SP),
    "norms again": ("llama", TP_SP | selective("layernorm")),
    "feed-forward again": ("llama", TP_SP | selective("layernorm", "mlp")),
    "by operation": ("llama", TP_SP | selective("ops")),
    "all again": ("llama", {**TP_SP, "recompute": "full"}),
    "one layer again": ("llama", {**TP_SP, "recompute": "full", "recompute_layers": 1}),
    "latent attention, shared experts": ("deepseek_v3", TP_SP),
    "shared experts again": ("deepseek_v3", TP_SP | selective("layernorm", "mla_up_proj", "shared_experts")),
    "state space over cp": ("nemotron_h", {"cp": 2}),
}


def of_every_case(rank: int, world: int) -> dict[str, dict[str, int]]:
    return {name: one_micro_batch(rank, world, *case) for name, case in CASES.items()}


@cache
def every_case() -> list[dict[str, dict[str, int]]]:
    """Return what all cases gathered, by rank: the ranks are started once."""
    return run(2, of_every_case)


@pytest.mark.parametrize("name", CASES)
def test_gathered_inputs_are_not_saved_but_gathered_again(name: str) -> None:
    for found in (of[name] for of in every_case()):
        assert found["gathers"] > 0
        assert found["kept"] == 0
        # One for the gradient of every scatter, and one to repeat every gather.
        assert found["backward"] == found["scatters"] + found["gathers"]
        assert found["left"] == 0


def kept_by_layer(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[float]:
    """Return the fp32 values that a llama layer saves per token of the sequence, for each layout."""

    def kept(layout: dict[str, Any], layers: int) -> int:
        trainer = trainer_of("llama", layout, layers)
        (stage,) = trainer.stages
        tokens, kwargs = trainer.loader.batch(0).micro_batches(SAMPLES)[0]
        return kept_bytes(stage, lambda: stage(tokens, **kwargs))

    return [(kept(layout, 3) - kept(layout, 1)) / 2 / (SEQ * SAMPLES) / 4 for layout in layouts]


def test_a_note_does_not_save_a_shard_that_is_itself_recomputed() -> None:
    every, some = run(2, kept_by_layer, [TP_SP, TP_SP | selective("layernorm")])[0]
    hidden = FAMILIES["llama"]["hidden_size"]
    # The outputs of two norms for half of the tokens, up to a few values that gloo's threads may still hold.
    assert every - some == pytest.approx(2 * hidden / 2, rel=0.25)


def alive_afterwards(rank: int, world: int) -> list[int]:
    """Count live scattered tensors after a forward pass without gradients, and after one whose loss is dropped."""
    trainer = trainer_of("llama", TP_SP)
    (stage,) = trainer.stages
    tokens, kwargs = trainer.loader.batch(0).micro_batches(SAMPLES)[0]
    scatters = Counted("_reduce_scatter")
    with torch.no_grad():
        stage(tokens, **kwargs)
    without = scatters.alive()
    stage(tokens, **kwargs)
    return [without, scatters.alive()]


def test_a_forward_pass_without_a_backward_pass_leaves_nothing() -> None:
    assert run(2, alive_afterwards) == [[0, 0]] * 2


def test_offloaded_activations_are_not_gathered_again() -> None:
    for found in run(2, one_micro_batch, "llama", {**TP_SP, "offload": "activations"}):
        assert found["backward"] == found["scatters"] + 1  # the head's, whose activations are not offloaded


def shared(rank: int, world: int) -> dict[str, Any]:
    """Run two GEMMs that save views of one gathered tensor; return when it was freed, and the gradients."""
    gathered: list[weakref.ref[torch.UntypedStorage]] = []

    def gather(part: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([part, part])
        gathered.append(weakref.ref(whole.untyped_storage()))
        return whole

    part = torch.ones(2, 3, requires_grad=True)
    first, second = (torch.full((3, 3), value, requires_grad=True) for value in (2.0, 3.0))
    notes = OutputNotes()
    with notes.hooks():
        whole = notes.gathered(gather, part)
        out = (whole @ first).sum() + (whole.view(-1, 3)[1:] @ second).sum()
    del whole
    after_forward = [one() is None for one in gathered]
    out.backward()
    after_backward = [one() is None for one in gathered]
    gradients = [one.grad.tolist() for one in (first, second, part) if one.grad is not None]
    return {"freed": (after_forward, after_backward), "gradients": gradients}


def test_operations_share_one_gather_and_the_last_one_frees_it() -> None:
    (found,) = run(1, shared)
    assert found["freed"] == ([True], [True, True])
    assert found["gradients"] == [[[4.0] * 3] * 3, [[3.0] * 3] * 3, [[21.0] * 3, [30.0] * 3]]
