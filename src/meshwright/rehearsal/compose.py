"""Composes what every kind of rank measured into a step of the cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean

from meshwright.costs.timeline import Pass, ScheduledPass, order, schedule_timed_passes
from meshwright.recipes.types import Layout
from meshwright.rehearsal.rank import ALL, FULLEST, NONE, Measured, RankResult, RankTask

SPLIT_SHARE = 0.5  # of a left-out layer's backward time, for each part of a split backward pass


@dataclass(frozen=True)
class RankTime:
    """Seconds of one variant of a rank's full step: all layers and micro batches."""

    busy_s: float
    rest_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The step of this rank without a bubble."""
        return self.busy_s + self.rest_s


class TimedRank:
    """A rank's measurements, extended to all layers and micro batches."""

    def __init__(self, task: RankTask, result: RankResult, micro_batches: int) -> None:
        self.task, self.result, self.micro_batches = task, result, micro_batches
        self.run_batches = task.recipe.train.global_batch_size // _batch_unit(task)

    @property
    def training(self) -> str:
        """The variant that is nearest to training: with the fullest experts if it ran."""
        return FULLEST if FULLEST in self.result.variants else ALL

    def time(self, variant: str) -> RankTime:
        """Return the seconds of a variant."""
        found = self.result.variants.get(variant, self.result.variants[ALL])
        update = found.optimizer_s * self._left_out_weights()
        if self.task.recipe.layout.pp > 1:
            busy = sum(self.seconds(variant, one) for one in self.passes())
            ran = sum(found.passes.values())
        else:
            extra = sum(self._left_out(found, chunk, kind) for chunk in range(len(self.task.chunks)) for kind in "FB")
            ran = sum(found.micro_batches)
            missing = self.micro_batches - len(found.micro_batches)
            busy = ran + missing * self._usual(found.micro_batches) + self.micro_batches * extra
        rest = max(found.step_s - ran, 0.0) + update
        return RankTime(busy, rest, found.optimizer_s + update)

    def passes(self) -> list[Pass]:
        """Return the passes of this rank in a step, in order."""
        layout = self.task.recipe.layout
        return order(layout.pp_schedule, self.task.pp_rank, layout.pp, layout.vp, self.micro_batches)

    def seconds(self, variant: str, one: Pass, chunk: int | None = None) -> float:
        """Return the seconds of a pass; `chunk`: the rehearsed rank's own chunk, if the pass is of a rank like it."""
        found = self.result.variants.get(variant, self.result.variants[ALL])
        stage = one.chunk if chunk is None else chunk
        known = {micro: s for (kind, of, micro), s in found.passes.items() if (kind, of) == (one.kind, stage)}
        if not known:
            return self._other_kind(found, one.kind, stage)
        return self._at(known, one.micro_batch) + self._left_out(found, self._local(stage), one.kind)

    def _other_kind(self, found: Measured, kind: str, stage: int) -> float:
        """Return the seconds of a kind of pass that did not run: torch may run a split backward pass in full."""
        full = [s for (one, of, _), s in found.passes.items() if of == stage and one in "BI"]
        return mean(full) if full and kind in "BI" else 0.0

    def _at(self, known: dict[int, float], micro_batch: int) -> float:
        """Return the time of a micro batch: first and last as they ran, those between as the usual one."""
        last = max(known)
        if micro_batch == 0 or len(known) == 1:
            return known[min(known)]
        if micro_batch == self.micro_batches - 1:
            return known[last]
        return self._usual([known[one] for one in sorted(known)])

    @staticmethod
    def _usual(times: list[float]) -> float:
        """Return the time of a micro batch that is neither the first nor the last."""
        between = times[1:-1] or times[-1:]
        return mean(between) if between else 0.0

    def _local(self, stage: int) -> int:
        own = sorted({chunk for _, chunk, _ in self.result.variants[ALL].passes})
        return own.index(stage)

    def _left_out(self, found: Measured, chunk: int, kind: str) -> float:
        """Return the seconds that the layers of a chunk would add that did not run."""
        share = 1.0 if kind in "FB" else SPLIT_SHARE
        name = "F" if kind == "F" else "B"
        total = 0.0
        for layer_type, count in self.left_out_types(chunk).items():
            times = [
                seconds
                for (one, of, layer), seconds in found.layers.items()
                if one == name and self.task.layer_types[layer] == layer_type and of == chunk
            ]
            usual = times[1:-1] if len(times) > 3 else times
            total += share * count * (mean(usual) if usual else 0.0)
        return total

    def left_out_types(self, chunk: int) -> Counter[str]:
        """Return how many layers of each type of a chunk did not run."""
        ran = set(self.task.kept[chunk])
        return Counter(self.task.layer_types[layer] for layer in self.task.chunks[chunk] if layer not in ran)

    def _left_out_weights(self) -> float:
        """Return the weights of left-out layers over those that are held."""
        missing = 0.0
        for chunk in range(len(self.task.chunks)):
            for layer_type, count in self.left_out_types(chunk).items():
                missing += count * self._mean_of(
                    {k: float(v) for k, v in self.result.layer_weights.items()}, layer_type
                )
        return missing / self.result.weights if self.result.weights else 0.0

    def _mean_of(self, values: dict[tuple[int, int], float], layer_type: str) -> float:
        found = [
            value
            for (_, layer), value in values.items()
            if layer < len(self.task.layer_types) and self.task.layer_types[layer] == layer_type
        ]
        return mean(found) if found else 0.0

    def left_out_bytes(self) -> float:
        """Return the memory that left-out layers would add at the peak."""
        total = 0.0
        held = {key: value for key, (value, _) in self.result.layer_state.items()}
        grads = {key: value for key, (_, value) in self.result.layer_state.items()}
        in_flight = self._in_flight()
        for chunk in range(len(self.task.chunks)):
            for layer_type, count in self.left_out_types(chunk).items():
                kept = in_flight * self._mean_of(self.result.layer_bytes, layer_type)
                summed = self._mean_of(grads, layer_type)
                both = kept + summed if self.micro_batches > 1 else max(kept, summed)
                total += count * (self._mean_of(held, layer_type) + both)
        return total

    def _in_flight(self) -> int:
        """Return the largest number of micro batches whose activations a chunk holds."""
        if self.task.recipe.layout.pp == 1:
            return 1
        alive: Counter[int] = Counter()
        most = 1
        for one in self.passes():
            alive[one.chunk] += {"F": 1, "B": -1, "W": -1}.get(one.kind, 0)
            most = max(most, max(alive.values()))
        return most


def _batch_unit(task: RankTask) -> int:
    layout = task.recipe.layout
    return layout.micro_batch_size * max(task.world // (layout.tp * layout.pp * layout.cp), 1)


def schedule(
    layout: Layout, ranks: dict[int, TimedRank], micro_batches: int, variant: str, send_s: float
) -> list[ScheduledPass]:
    """Return the passes of all pipeline ranks over a step; `ranks`: the rehearsed rank for each pipeline rank."""
    orders = [order(layout.pp_schedule, rank, layout.pp, layout.vp, micro_batches) for rank in range(layout.pp)]
    own = {rank: sorted({one.chunk for one in passes}) for rank, passes in enumerate(orders)}

    def seconds(rank: int, one: Pass) -> float:
        timed = ranks[rank]
        stand_in = own[timed.task.pp_rank][own[rank].index(one.chunk)]
        return timed.seconds(timed.training if variant == ALL else variant, one, stand_in)

    return schedule_timed_passes(orders, layout.pp * layout.vp, seconds, 0.0 if variant == NONE else send_s)
