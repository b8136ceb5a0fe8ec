"""What of a recipe to run on this machine's device: ranks, layers, micro batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import costs
from meshwright.clusters import Gpu
from meshwright.costs.gemm import routing_imbalance
from meshwright.costs.speeds import speeds
from meshwright.costs.time import pass_seconds
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rehearsal.network import ClusterNetwork, Network
from meshwright.rehearsal.rank import LEAST_STEPS, WARM_UP, RankTask

MICRO_BATCHES = 3  # run without a pipeline: the first, a usual one, the last
ROOM = 0.9  # share of the GPU's memory that a rank may need by the estimate before layers are left out
CONTEXT_GIB = 1.5  # of the process, outside torch's allocator


class Device(msgspec.Struct, frozen=True):
    """The device that runs the kernels."""

    kind: str  # cuda or cpu
    gpu: Gpu | None = None  # its catalogue entry, if there is one
    memory_gib: float = math.inf


class RunPlan:
    """What to run of a case on a device."""

    def __init__(
        self,
        case: Case,
        config: Any,
        device: Device,
        network: Network,
        slowdown: float,
        kinds: Sequence[Any],
        layers: int | None,
        budget_s: float,
    ) -> None:
        from meshwright.engine.mesh import GroupInfo
        from meshwright.engine.parallelize.pipeline import stage_layers, stage_numbers

        self.case, self.config, self.device, self.network, self.slowdown = case, config, device, network, slowdown
        self.recipe: Recipe = case.recipe
        self.layout = self.recipe.layout
        self.world = case.cluster.world
        self.dp = max(self.world // (self.layout.tp * self.layout.pp * self.layout.cp), 1)
        unit = self.layout.micro_batch_size * self.dp
        self.micro_batches = self.recipe.train.global_batch_size // unit
        self.most_layers, self.budget_s = layers, budget_s / len(kinds)
        self.layer_types = tuple(repr(group.layer) for group in case.model.groups for _ in range(group.count))
        stages = stage_layers(self.layout, len(self.layer_types))
        self.chunks = {
            rank: tuple(tuple(stages[i]) for i in stage_numbers(self.layout, GroupInfo(self.layout.pp, rank)))
            for rank in range(self.layout.pp)
        }
        self.run_batches = min(self.micro_batches, self._enough_batches())
        self.run_recipe = _mock_data(self.recipe, self.run_batches * unit)

    def _enough_batches(self) -> int:
        """Return the micro batches that show all passes, and hold as many activations as the full step."""
        if self.layout.pp == 1:
            return MICRO_BATCHES
        if self.layout.pp_schedule in ("gpipe", "looped_bfs"):  # they hold the activations of all
            return self.micro_batches
        # The last activations come after a backward pass, which leaves gradients.
        enough = self.layout.pp + 1 if self.layout.pp_schedule == "1f1b" else 2 * self.layout.pp
        return max(enough, MICRO_BATCHES)

    def task(self, kind: tuple[int, tuple[int, ...]], most: int | None) -> RankTask:
        """Return the task of a kind of rank with at most so many layers in each chunk."""
        rank, represents = kind
        chunks = self.chunks[rank]
        return RankTask(
            recipe=self.run_recipe,
            config=self.config.to_dict(),
            world=self.world,
            pp_rank=rank,
            represents=represents,
            chunks=chunks,
            kept=chunks if most is None else tuple(self._prefix(chunk, most) for chunk in chunks),
            layer_types=self.layer_types,
            network=self.network,
            device=self.device.kind,
            gpu=self.device.gpu,
            slowdown=self.slowdown,
            budget_s=self.budget_s,
            imbalance=self._imbalance(),
        )

    def _imbalance(self) -> float:
        """Return the tokens of the fullest expert rank over the mean; 1 where every rank has all experts."""
        moe = self.case.model.moe
        if moe is None or self.layout.ep == 1 or not isinstance(self.network, ClusterNetwork):
            return 1.0
        return float(routing_imbalance(self.case, speeds(self.case), moe))

    def _prefix(self, chunk: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Return the first layers of a chunk: as many as allowed, and at least one of every type in it."""
        types = {self.layer_types[layer] for layer in chunk}
        needed = next(
            (n for n in range(len(chunk) + 1) if {self.layer_types[layer] for layer in chunk[:n]} == types), len(chunk)
        )
        return chunk[: max(most, needed)]

    def layers_in_budget(self, rank: int) -> int | None:
        """Return how many layers of a chunk to run in the time and memory there is; None: all."""
        if self.case.is_diffusion or self.device.kind == "cpu":
            return self.most_layers
        longest = max(len(chunk) for chunk in self.chunks[rank])
        gpu = self.device.gpu
        here = self.case.rebuild(cluster=msgspec.structs.replace(self.case.cluster, gpu=gpu)) if gpu else self.case
        forward, backward = pass_seconds(here)[rank]
        axes = sum(getattr(self.layout, name) > 1 for name in ("tp", "cp", "ep")) + (self.dp > 1)
        steps = WARM_UP + LEAST_STEPS + 1 + (axes + 1 if axes > 1 else 0)
        seconds = steps * self.run_batches * (forward + backward)
        shares = [1.0, self.budget_s / seconds]
        memory = costs.memory_by_stage(self.case)[rank]
        room = ROOM * self.device.memory_gib - CONTEXT_GIB
        need = float(memory.total - memory.overhead)
        ends = float(memory.logits)  # not of layers
        shares.append((room - ends) / max(need - ends, 1e-9))
        most = max(int(longest * min(shares)), 1)
        found = [one for one in (most if most < longest else None, self.most_layers) if one is not None]
        return max(min(found), min(2, longest)) if found else None


def _mock_data(recipe: Recipe, batch: int) -> Recipe:
    """Return the recipe with mock data, as bench has it, and the micro batches that run."""
    replace = msgspec.structs.replace
    data = replace(recipe.data, dataset="mock", blend={}, anneal_blend={}, anneal_steps=0, validation="",
                   validation_part=0.0, group_by_length=False, streaming=False)  # fmt: skip
    train = replace(
        recipe.train, global_batch_size=batch, eval_every=0, steps=max(recipe.train.steps, 1000), epochs=0.0
    )
    return replace(recipe, data=data, train=train)


def label_of(task: RankTask) -> str:
    pp = task.recipe.layout.pp
    ran, count = sum(map(len, task.kept)), sum(map(len, task.chunks))
    what = f"pipeline rank {task.pp_rank} of {pp}" if pp > 1 else "the step"
    return what + (f" with {ran} of {count} layers" if ran < count else "")
