"""Trains a tiny model in a layout and in one process, and compares losses, all gradients and all weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import transformers
from tests.engine.families import FAMILIES
from tests.engine.layouts import Tried
from tests.engine.ranks import run
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from meshwright.engine.data.mock import Mock
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.mesh import build_mesh, sizes
from meshwright.engine.model.build import transformers_config
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

transformers.logging.set_verbosity_error()
for _model_type in {config["model_type"] for config in FAMILIES.values()}:  # imported once here, not on every rank
    transformers.AutoModelForCausalLM._model_mapping[type(transformers_config({"model_type": _model_type}))]

STEPS = 5
QUICK_LAYERS = 2  # of runs with fewer steps: still one layer of each kind
SEQ = 32
BATCH = 8
MICRO_BATCH = 2  # more than one sample, so that swapping batch and sequence fails
TOLERANCE = 1e-5
# Some gradients are zero up to rounding (a key bias shifts all scores equally): differences are relative to the
# tensor's largest entry, but at least to this fraction of the norm of all gradients (or, for weights, of one).
FLOOR = {"gradients": 1e-3, "weights": 1e-2}


def recipe(layout: types.Layout, **sections: Any) -> types.Recipe:
    """Return a recipe for parity: fp32, plain SGD (AdamW would hide a gradient of the wrong scale)."""
    given = {
        "precision": types.Precision(compute="fp32"),
        "optimizer": types.Optimizer(name="sgd", lr=0.1, beta1=0.0, weight_decay=0.0),
        "schedule": types.Schedule(name="constant", warmup_steps=0),
        "train": types.Train(global_batch_size=BATCH, steps=100),
        "data": types.Data(seq_length=SEQ),
        "moe": types.Moe(aux_loss=0.01),
    }
    return types.Recipe(
        name="parity", model="llama3_8b", goal="pretrain", cluster="1xH100", layout=layout, **{**given, **sections}
    )


def recipe_of(tried: Tried) -> types.Recipe:
    """Return the recipe of a layout in the table."""
    layout = types.Layout(**{"micro_batch_size": MICRO_BATCH, **tried.layout})
    return recipe(layout, **tried.sections)


class Ragged:
    """Mock samples with a different number of loss-mask tokens in each; with documents if packed."""

    def __init__(self, inner: Mock, packed: bool) -> None:
        self.inner, self.packed = inner, packed

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        random = [np.random.Generator(np.random.Philox(key=[7, number])) for number in numbers]
        length = self.inner.seq_length
        counted = np.stack([r.random(length) < r.uniform(0.3, 1.0) for r in random])
        borders = np.stack([np.sort(r.integers(1, length, size=2)) for r in random])
        documents = (np.arange(length) >= borders[:, :, None]).sum(1)
        if self.packed:  # the last token of a document does not predict the first of the next
            counted[:, :-1] &= documents[:, 1:] == documents[:, :-1]
        return replace(self.inner.samples(numbers), loss_mask=counted, documents=documents if self.packed else None)


def train(rank: int, world: int, settings: str, given: types.Recipe, steps: int) -> dict[str, Any]:
    """Train on one rank; return losses, gradient norms, the first step's gradients and the final weights."""
    if given.kernels.compile:
        compile_without_a_compiler()
    config = transformers_config(json.loads(settings))
    mesh = build_mesh(given.layout, "cpu")
    source = Ragged(Mock(config.vocab_size, given.data.seq_length, given.train.seed), given.data.packing)
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source)
    return run_steps(trainer, steps)


def run_steps(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Run the steps; return losses, gradient norms, the first step's gradients and the final weights."""
    found: dict[str, Any] = {}
    finish = trainer.finish_gradients

    def finish_and_keep() -> torch.Tensor:
        norm = finish()
        found.setdefault("gradients", full_tensors(trainer, "grad"))
        return norm

    trainer.finish_gradients = finish_and_keep  # type: ignore[method-assign]
    results = [trainer.step(step) for step in range(steps)]
    found["losses"] = [result.loss for result in results]
    found["norms"] = [result.grad_norm for result in results]
    found["weights"] = full_tensors(trainer, "data")
    return found


def compile_without_a_compiler() -> None:
    """Compile with aot_eager on this rank: a C++ compiler would take most of a minute."""
    inner = nn.Module.compile

    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **{**kwargs, "backend": "aot_eager"})

    nn.Module.compile = compile  # type: ignore[method-assign,assignment]


def full_tensors(trainer: Trainer, what: str) -> dict[str, Any]:
    """Return full tensors by name; experts in the same order in every layout.

    One exchange of all shards: torch plans the gather of every shape on its own, which takes seconds in some layouts.
    """
    held: dict[str, Any] = {}
    for stage in trainer.stages:
        held |= {name: p.grad if what == "grad" else p.detach() for name, p in stage.named_parameters()}
        if what == "data":
            held |= {name: b for name, b in stage.named_buffers() if name.endswith("_bias")}
    shards: list[Any] = [None] * dist.get_world_size()
    sharded = {name: value for name, value in held.items() if isinstance(value, DTensor)}
    dist.all_gather_object(shards, {name: _array(value.to_local()) for name, value in sharded.items()})
    whole = {name: value if value is None else _array(value) for name, value in held.items() if name not in sharded}
    return whole | {name: _assembled(value, [of.get(name) for of in shards]) for name, value in sharded.items()}


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().float().numpy().copy()


def _assembled(value: DTensor, shards: list[Any]) -> Any:
    """Return the full tensor from the shards of all ranks."""
    mesh = value.device_mesh.mesh
    orders = _split_orders(value)
    full = np.full(tuple(value.shape), np.nan, np.float32)
    for place in np.ndindex(*mesh.shape):
        rows = [np.arange(size) for size in value.shape]
        for dim, axes in orders.items():
            for axis in axes:
                size = -(-len(rows[dim]) // mesh.shape[axis])
                rows[dim] = rows[dim][place[axis] * size : (place[axis] + 1) * size]
        full[np.ix_(*rows)] = shards[int(mesh[place])]
    return full


def _split_orders(value: DTensor) -> dict[int, list[int]]:
    """Return the mesh axes that split each dimension, the outermost first; a strided axis splits inside later ones."""
    orders: dict[int, list[int]] = {}
    for axis, placement in reversed(list(enumerate(value.placements))):
        if isinstance(placement, Replicate):
            continue
        assert hasattr(placement, "dim"), placement  # a shard: no sum is pending
        order, at, inside = orders.setdefault(placement.dim % value.ndim, []), 0, getattr(placement, "split_factor", 1)
        while inside > 1:
            inside //= value.device_mesh.mesh.shape[order[at]]
            at += 1
        order.insert(at, axis)
    return orders


@lru_cache(maxsize=256)
def reference(settings: str, encoded: bytes, steps: int) -> dict[str, Any]:
    """Train in one process with the same micro batches."""
    given = msgspec.msgpack.decode(encoded, type=types.Recipe)
    return run(1, train, settings, given, steps)[0]  # type: ignore[no-any-return]


def alone(given: types.Recipe, world: int) -> types.Recipe:
    """Return the same recipe without parallelism, kernels and memory savings."""
    size = given.layout.micro_batch_size
    if given.moe.balancing == "global_aux_loss":  # its loads are counted over all ranks
        axes = sizes(given.layout, world)
        size *= axes["dp_replicate"] * axes["dp_shard"]
    layout = types.Layout(micro_batch_size=size)
    return msgspec.structs.replace(given, layout=layout, kernels=types.Kernels())


def shortened(given: types.Recipe, world: int) -> types.Recipe:
    """Return the recipe with two micro batches a step, unless data-parallel or pipeline ranks need more."""
    axes = sizes(given.layout, world)
    batch = 2 * given.layout.micro_batch_size
    if axes["pp"] * axes["dp_replicate"] * axes["dp_shard"] > 1 or given.train.global_batch_size < batch:
        return given
    return msgspec.structs.replace(given, train=msgspec.structs.replace(given.train, global_batch_size=batch))


def shallow(config: dict[str, Any], layout: types.Layout) -> dict[str, Any]:
    """Return the config of a model with fewer layers, unless the stages of the layout or a list of blocks need all."""
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    if depth not in config or layout.pp * layout.vp > QUICK_LAYERS or layout.stage_layers:
        return config
    kinds = {"layer_types": config["layer_types"][:QUICK_LAYERS]} if "layer_types" in config else {}
    return {**config, **kinds, depth: QUICK_LAYERS}


def differences(family: str, world: int, given: types.Recipe, steps: int = STEPS) -> dict[str, float]:
    """Return the largest relative differences of losses, norms, gradients and weights to one process."""
    config = FAMILIES[family]
    if steps < STEPS:
        given, config = shortened(given, world), shallow(config, given.layout)
    settings = json.dumps(config)
    expected = reference(settings, msgspec.msgpack.encode(alone(given, world)), steps)
    ranks = run(world, train, settings, given, steps, timeout=300)
    worst = {"gradients": 0.0, "weights": 0.0}
    seen: set[str] = set()
    for found in ranks:
        for what in worst:
            for name, value in found[what].items():
                seen.add(name)
                floor = FLOOR[what] * (expected["norms"][0] if what == "gradients" else 1.0)
                worst[what] = max(worst[what], _relative(value, _expected(expected[what], name), floor))
    missing = set(expected["gradients"]) - seen
    assert not missing, f"no rank has {sorted(missing)}"
    for what in ("losses", "norms"):
        worst[what] = max(_relative(np.array(found[what]), np.array(expected[what])) for found in ranks)
    return worst


def _expected(values: dict[str, Any], name: str) -> Any:
    """Return the reference of a name; a tied head on the last pipeline stage is the embedding."""
    if name in values:
        return values[name]
    return next(value for known, value in values.items() if known.endswith(("embed_tokens.weight", "wte.weight")))


def _relative(found: Any, expected: Any, floor: float = 0.0) -> float:
    if expected is None or found is None:
        return 0.0 if expected is found else float("inf")
    scale = max(float(np.abs(expected).max()), floor)
    return float(np.abs(found - expected).max()) / scale if scale else float(np.abs(found).max())
