"""Expands the log of a shortened step to that of the full step.

The passes of layers that were left out are filled in from the traced layer that represents them. A block that a
replayed pass frees is the one that its own layer (or its own neighbor) allocated, not the representative's. What a
pipeline receives was received for every pass, traced or not: there the representative only determines when it is freed.
Blocks of two layers correspond if the same line of code allocated them. Their position among all allocations would not
do: the first layer of the first step also allocates what the whole run keeps, such as the buffers of GPU libraries.
When the gradients of a step are complete, the expanded log is compared with what the rank really holds: no byte may be
missing or left over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshwright.dryrun.allocation_log import Segment, SegmentKey
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_hooks import AFTER, BEFORE, REPLAYED

PASSES = ("forward", "backward")
Place = tuple[str, str, int, int]  # operation, line of code, bytes, and number of such blocks before it in the segment


@dataclass(frozen=True)
class ReplayedSegment:
    """A segment of the full step: its key, the traced segment it is copied from, and its events."""

    key: SegmentKey
    traced: Segment
    events: list[int]  # i: block i is allocated; ~i: block i is freed


@dataclass
class StepLog:
    """The log of the full step; block i is a copy of traced block `traced_block[i]`."""

    segments: list[ReplayedSegment] = field(default_factory=list)
    traced_block: list[int] = field(default_factory=list)
    drift: int = 0  # most bytes by which the log differs from what the rank holds after a step; 0 if it is exact


def replay_step(trace: Trace) -> StepLog:
    """Return the log with everything that was left out filled in."""
    return _Replayer(trace).replay()


class _Replayer:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.log = trace, trace.log
        self.step = StepLog()
        self.segments = self.log.segments
        self.kept = trace.traced_micro_batches
        self.places = self._places()
        self.allocated: dict[SegmentKey, dict[Place, int]] = {}  # by segment of the full step
        self.alive: dict[int, SegmentKey] = {}  # live blocks of the full step -> the segment that allocated them
        self.filled = trace.left_out != (0, 0)  # whether any pass has to be filled in
        self.copies: dict[int, int] = {}  # since the last reconciliation: traced block -> block of the full step
        self.received_for = {key: block for block, key in self.log.received.items()}
        self.replayed: set[int] | None = None  # during a replayed pass: traced blocks that are really freed in it

    def replay(self) -> StepLog:
        for key, segment in self._order():
            if key.phase == "filled":
                self._reconcile(key, segment)
            else:
                self._replay_segment(key, segment)
        return self.step

    def _places(self) -> dict[int, Place]:
        """Return where in its segment every traced block is allocated."""
        places: dict[int, Place] = {}
        for segment in self.segments:
            before: Counter[tuple[str, str, int]] = Counter()
            for number in (event for event in segment.events if event >= 0):
                block = self.log.blocks[number]
                like = block.operation, block.origin.source, block.bytes
                places[number] = *like, before[like]
                before[like] += 1
        return places

    def _order(self) -> Iterator[tuple[SegmentKey, Segment]]:
        """Yield the segments of the full step in order, each with the traced segment to copy."""
        passes: dict[tuple[int, str, int, int], list[Segment]] = defaultdict(list)
        for segment in self.segments:
            if segment.key.phase in PASSES:
                passes[segment.key[:4]].append(segment)
        written: set[tuple[int, str, int, int]] = set()
        for segment in self.segments:
            key = segment.key
            if key.phase not in PASSES:
                yield key, segment
            elif key[:4] not in written:
                written.add(key[:4])
                if key.layer != REPLAYED:
                    yield from self._pass(key, passes[key[:4]])
                    continue
                self.replayed = {~event for event in segment.events if event < 0}
                yield from self._pass(key, passes[key._replace(micro_batch=self.kept[1])[:4]])
                self._free_received(self.replayed)
                self.replayed = None

    def _pass(self, key: SegmentKey, traced: list[Segment]) -> Iterator[tuple[SegmentKey, Segment]]:
        """Yield one pass of a micro batch: before its layers, all layers, after them."""
        chunk = self.trace.chunks[key.chunk]
        by_layer = {segment.key.layer: segment for segment in traced}
        layers = list(zip(chunk.layers, chunk.representative, strict=True))
        middle = [(key._replace(layer=number), by_layer[one]) for number, one in layers if one in by_layer]
        first, last = (BEFORE, AFTER) if key.phase == "forward" else (AFTER, BEFORE)
        if first in by_layer:
            yield key._replace(layer=first), by_layer[first]
        yield from middle if key.phase == "forward" else reversed(middle)
        if last in by_layer:
            yield key._replace(layer=last), by_layer[last]

    def _replay_segment(self, key: SegmentKey, segment: Segment) -> None:
        events: list[int] = []
        blocks: dict[Place, int] = {}
        self.allocated[key] = blocks
        local: dict[int, int] = {}  # traced block -> its copy in this segment
        counterparts: dict[int, dict[Place, int]] = {}  # traced segment -> blocks of the full step like its own
        received = self.log.received if self.replayed is not None else {}
        for event in segment.events:
            if event >= 0:
                block = local[event] = self._new(event, key)
                blocks[self.places[event]] = block
                events.append(block)
            else:
                freed = local.get(~event, -1)  # most blocks are freed in the segment that allocated them
                if freed < 0 or ~event in received:
                    freed = self._freed_block(key, segment.key, ~event, counterparts)
                if freed in self.alive:
                    del self.alive[freed]
                    events.append(~freed)
        self.step.segments.append(ReplayedSegment(key, segment, events))

    def _new(self, traced: int, key: SegmentKey) -> int:
        block = len(self.step.traced_block)
        self.step.traced_block.append(traced)
        self.alive[block] = key
        self.copies[traced] = block
        return block

    def _freed_block(
        self, key: SegmentKey, template: SegmentKey, traced: int, counterparts: dict[int, dict[Place, int]]
    ) -> int:
        """Return the block to free where the traced segment `template` frees a traced block."""
        if not self.filled:
            return self.copies.get(traced, -1)
        if self.replayed is not None and traced in self.log.received:
            return self._received_block(key, template, self.log.received[traced])
        allocating = self.log.blocks[traced].segment
        if allocating not in counterparts:
            origin = self.segments[allocating].key
            if origin.layer == REPLAYED:
                return self._represented(traced)
            if origin.phase not in PASSES or template.phase not in (*PASSES, "between") or origin.step != template.step:
                return self.copies.get(traced, -1)
            counterparts[allocating] = self.allocated.get(self._counterpart(key, template, origin), {})
        return counterparts[allocating].get(self.places[traced], -1)

    def _counterpart(self, key: SegmentKey, template: SegmentKey, origin: SegmentKey) -> SegmentKey:
        """Return the segment that is to this one as the traced segment `origin` is to `template`."""
        if template.phase == "between":
            return origin._replace(layer=self._from_end(origin))
        return origin._replace(
            micro_batch=self._micro_batch(key, template, origin), layer=self._layer(key, template, origin)
        )

    def _represented(self, traced: int) -> int:
        """Return the block of the full step that a placeholder of a skipped pass represents."""
        key, template = self.log.represents.get(traced, (None, -1))
        if key is None or template < 0:
            return -1
        origin = self.segments[self.log.blocks[template].segment].key
        allocating = origin._replace(micro_batch=key.micro_batch, layer=self._from_end(origin))
        return self.allocated.get(allocating, {}).get(self.places[template], -1)

    def _received_block(self, key: SegmentKey, template: SegmentKey, of: SegmentKey) -> int:
        """Return the block that this replayed pass received in index of the traced one, if this pass frees it."""
        target = of._replace(micro_batch=of.micro_batch + key.micro_batch - template.micro_batch)
        traced = self.received_for.get(target, -1)
        return self.copies.get(traced, -1) if self.replayed is not None and traced in self.replayed else -1

    def _free_received(self, freed: set[int]) -> None:
        """Free received blocks that a replayed pass really freed but its template did not."""
        for traced in sorted(freed & self.log.received.keys()):
            block = self.copies.get(traced, -1)
            if self.alive.pop(block, None) is not None:
                self.step.segments[-1].events.append(~block)

    def _micro_batch(self, key: SegmentKey, template: SegmentKey, origin: SegmentKey) -> int:
        if origin.micro_batch == template.micro_batch:
            return key.micro_batch
        distance = abs(self.kept.index(origin.micro_batch) - self.kept.index(template.micro_batch))
        if self.trace.pipelined and distance == 1:
            return key.micro_batch + (1 if origin.micro_batch > template.micro_batch else -1)
        return origin.micro_batch

    def _layer(self, key: SegmentKey, template: SegmentKey, origin: SegmentKey) -> int:
        """Return the layer at the same distance from this one as the traced ones are apart, or from the end."""
        if origin.layer in (BEFORE, AFTER) or template.layer in (BEFORE, AFTER) or origin.chunk != template.chunk:
            return self._from_end(origin)
        chunk = self.trace.chunks[key.chunk]
        away = chunk.kept.index(origin.layer) - chunk.kept.index(template.layer)
        if abs(away) > 1:  # not a neighbor: allocated at one end of the layers and freed at the other
            return self._from_end(origin)
        at = chunk.layers.index(key.layer) + away
        return chunk.layers[at] if 0 <= at < len(chunk.layers) else origin.layer

    def _from_end(self, origin: SegmentKey) -> int:
        """Return the layer at the same distance from the nearer end as the traced one."""
        if origin.layer in (BEFORE, AFTER):
            return origin.layer
        chunk = self.trace.chunks[origin.chunk]
        index = chunk.kept.index(origin.layer)
        return chunk.layers[index if 2 * index < len(chunk.kept) else index - len(chunk.kept)]

    def _reconcile(self, key: SegmentKey, segment: Segment) -> None:
        """Replace what the passes left with what the rank really holds, including filled-in gradients."""
        held = {traced for traced in self._alive_after(segment) if self._from_passes(traced, key.step)}
        leftover = [block for block, origin in self.alive.items() if origin.phase in PASSES]
        drift = abs(self._bytes(held) - self._bytes(self.step.traced_block[block] for block in leftover))
        self.step.drift = max(self.step.drift, drift)
        events = [~block for block in leftover]
        for block in leftover:
            del self.alive[block]
        for traced in sorted(held):
            events.append(self._new(traced, key))
        self.step.segments.append(ReplayedSegment(key, segment, events))

    def _from_passes(self, traced: int, step: int) -> bool:
        key = self.segments[self.log.blocks[traced].segment].key
        return key.step == step and (key.phase == "filled" or (key.phase in PASSES and key.layer != REPLAYED))

    def _bytes(self, traced: Iterable[int]) -> int:
        """Return the bytes to compare; a pipeline reduces gradients of all layers at its end, so those are left out."""
        blocks = [self.log.blocks[number] for number in traced]
        late = ("gradients", "buffers") if self.trace.pipelined else ()
        return sum(block.bytes for block in blocks if block.part not in late)

    def _alive_after(self, end: Segment) -> set[int]:
        """Return the traced blocks that are alive after a segment."""
        alive: set[int] = set()
        for segment in self.segments:
            for event in segment.events:
                if event >= 0:
                    alive.add(event)
                else:
                    alive.discard(~event)
            if segment is end:
                break
        return alive


def repetitions(trace: Trace, key: SegmentKey) -> int:
    """Return how often a segment happens: without a pipeline the second micro batch represents the rest."""
    left_out = trace.micro_batches - len(trace.traced_micro_batches)
    return 1 + left_out if key.micro_batch == 1 and not trace.pipelined else 1
