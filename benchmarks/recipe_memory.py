"""Bound the memory of Megatron-Bridge's recipes from below, for memory errors on recipes that nobody has run.

PYTHONPATH=src:. python -m benchmarks.recipe_memory

Counted are weights, gradients and optimizer state by their formats and degrees, and of the activations only the inputs
of matrix multiplications, norms, attention and activation functions that the backward pass reads, in 16 bit, for the
micro-batches in flight on the first pipeline stage. Logits, buffers, kernels' workspace and fragmentation are left out.
The recipes are those whose memory `check` calls an error; those below the usable memory of the GPU are marked.
"""

from __future__ import annotations

from meshwright import costs, frameworks
from meshwright.errors import InputError
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.models.spec import Attention, Dense, Layer, MoE
from meshwright.planner import case_of
from meshwright.recipes.case import Case

GIB = 2**30
BYTES = 2  # of an activation
COMMAND = "python scripts/training/run_recipe.py --recipe {} checkpoint.pretrained_checkpoint=/checkpoints/model"


def least_gib(case: Case) -> float:
    """Return GiB that a GPU of the first pipeline stage needs at least."""
    layout, memory = case.recipe.layout, costs.estimate(case).memory
    tokens = case.recipe.data.seq_length * layout.micro_batch_size / layout.cp
    layers = [group.layer for group in case.model.groups for _ in group.places]
    first = layout.stage_layers[0] if layout.stage_layers else len(layers) // (layout.pp * layout.vp)
    average = sum(_layer_bytes(one, case) for one in layers) / len(layers)
    state = float(memory.weights + memory.gradients + memory.optimizer)
    return state + _chunks_in_flight(case) * first * tokens * average / GIB


def _chunks_in_flight(case: Case) -> int:
    layout = case.recipe.layout
    ranks = case.cluster.world // (layout.tp * layout.pp * layout.cp)
    micro = max(1, case.recipe.train.global_batch_size // (ranks * layout.micro_batch_size))
    if layout.vp == 1:
        return min(layout.pp, micro)
    return min(2 * (layout.pp - 1) + (layout.vp - 1) * layout.pp + 1, micro * layout.vp)


def _layer_bytes(layer: Layer, case: Case) -> float:
    """Return the bytes of a token in a layer: of whole rows, which only sequence parallelism divides, and of parts."""
    hidden, layout = case.model.hidden, case.recipe.layout
    rows, parts, routed = 0, 0, 0
    if layer.mixer is not None:
        rows += 2 * hidden  # input of the norm, and of the projections
    if isinstance(layer.mixer, Attention):
        parts += 2 * layer.mixer.heads * layer.mixer.head_dim  # query, and input of the last projection
        parts += 2 * layer.mixer.kv_heads * layer.mixer.head_dim
    if layer.ffn is not None:
        rows += 2 * hidden
    if isinstance(layer.ffn, Dense):
        parts += _inner(layer.ffn.width, layer.ffn.gated)
    elif isinstance(layer.ffn, MoE):
        parts += _inner(layer.ffn.shared_width, layer.ffn.gated)
        routed = layer.ffn.topk * ((layer.ffn.latent or hidden) + _inner(layer.ffn.width, layer.ffn.gated))
    by_rows = layout.tp if layout.sp else 1
    return BYTES * ((rows + routed) / by_rows + parts / layout.tp)


def _inner(width: int, gated: bool) -> int:
    return (3 if gated else 2) * width  # before the activation function, and after it


def main() -> None:
    for name in bridge_recipes.names():
        row = bridge_recipes.find(name)
        if row is None or row.name != name or row.benchmark:
            continue
        content = frameworks.content_of(f"#!/bin/bash\n{COMMAND.format(name)}\n", "run.sh")
        try:
            found = frameworks.check(frameworks.framework("megatron-bridge"), content)
        except InputError:
            continue
        errors = [one for one in found.findings if one.severity == "error" and one.rule.startswith("memory.")]
        if errors and found.model is not None and found.cluster is not None:
            case = case_of(found.recipe, found.model, found.cluster, found.engine)
            least, usable = least_gib(case), float(costs.estimate(case).memory.capacity)
            mark = "" if least > usable else ": not confirmed"
            print(f"{name}: {errors[0].rule}: {least:.0f} GiB or more of {usable:.0f}{mark}", flush=True)


if __name__ == "__main__":
    main()
