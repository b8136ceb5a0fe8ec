"""From the book of a shortened step to that of the whole step.

Passes of layers that were left out are written in from their likes. A block that a replayed pass frees is the one that
its own layer (or its own neighbour) made, not the like's. What a pipeline receives was received for every pass, whether
or not that was traced: there the like only says when it goes. Where the gradients of a step are complete, the filled-up
book is compared with what the rank really holds then: no byte may be missing or left over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshwright.dryrun.allocation_log import Key, Segment
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_hooks import AFTER, BEFORE, REPLAYED

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Stretch:
    """A segment of the whole step: where it is, what was traced in its place, and what comes and goes."""

    key: Key
    traced: Segment
    events: list[int]  # block i comes: i; block i goes: ~i


@dataclass
class StepLog:
    """The book of the whole step. Blocks are told by number; `of[i]` is the traced block that block i is like."""

    stretches: list[Stretch] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    drift: int = 0  # bytes by which the last step's book differs from what the rank held; 0 where it is exact


def whole_step(trace: Trace) -> StepLog:
    """The book with everything that was left out written in."""
    return _Writer(trace).write()


class _Writer:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.ledger = trace, trace.ledger
        self.whole = StepLog()
        self.segments = self.ledger.segments
        self.kept = trace.traced_micro_batches
        self.born = [0] * len(self.ledger.blocks)  # of every traced block: its place among those of its segment
        for segment in self.segments:
            for place, number in enumerate(n for n in segment.events if n >= 0):
                self.born[number] = place
        self.made: dict[Key, list[int]] = {}  # the blocks that each segment of the whole step made, in order
        self.alive: dict[int, Key] = {}  # blocks of the whole step, and where they were made
        self.filled = trace.left_out != (0, 0)  # whether anything is to be written in
        self.real: dict[int, int] = {}  # since the last comparison: traced block -> block of the whole step
        self.arrived = {key: block for block, key in self.ledger.received.items()}
        self.replayed: set[int] | None = None  # while a replayed pass is written: traced blocks that really go in it

    def write(self) -> StepLog:
        for key, segment in self._order():
            if key.phase == "filled":
                self._compare(key, segment)
            else:
                self._stretch(key, segment)
        return self.whole

    def _order(self) -> Iterator[tuple[Key, Segment]]:
        """The segments of the whole step in order, each with the one that was traced for it."""
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
                self._let_go_of_received(self.replayed)
                self.replayed = None

    def _pass(self, key: Key, traced: list[Segment]) -> Iterator[tuple[Key, Segment]]:
        """One pass of a micro batch: what comes before its layers, all layers, what comes after them."""
        cut = self.trace.chunks[key.chunk]
        by_layer = {segment.key.layer: segment for segment in traced}
        layers = list(zip(cut.layers, cut.like, strict=True))
        middle = [(key._replace(layer=number), by_layer[like]) for number, like in layers if like in by_layer]
        first, last = (BEFORE, AFTER) if key.phase == "forward" else (AFTER, BEFORE)
        if first in by_layer:
            yield key._replace(layer=first), by_layer[first]
        yield from middle if key.phase == "forward" else reversed(middle)
        if last in by_layer:
            yield key._replace(layer=last), by_layer[last]

    def _stretch(self, key: Key, segment: Segment) -> None:
        events: list[int] = []
        mine: list[int] = []
        self.made[key] = mine
        here: dict[int, int] = {}  # by the traced block that each is like
        makers: dict[int, list[int]] = {}  # by traced segment: the blocks of the whole step that it stands for here
        received = self.ledger.received if self.replayed is not None else {}
        for event in segment.events:
            if event >= 0:
                block = here[event] = self._new(event, key)
                mine.append(block)
                events.append(block)
            else:
                gone = here.get(~event, -1)  # most go where they came
                if gone < 0 or ~event in received:
                    gone = self._meant(key, segment.key, ~event, makers)
                if gone in self.alive:
                    del self.alive[gone]
                    events.append(~gone)
        self.whole.stretches.append(Stretch(key, segment, events))

    def _new(self, traced: int, key: Key) -> int:
        block = len(self.whole.of)
        self.whole.of.append(traced)
        self.alive[block] = key
        self.real[traced] = block
        return block

    def _meant(self, key: Key, like: Key, traced: int, makers: dict[int, list[int]]) -> int:
        """The block that goes here, where the traced segment `like` says that a traced block goes."""
        if not self.filled:
            return self.real.get(traced, -1)
        if self.replayed is not None and traced in self.ledger.received:
            return self._received(key, like, self.ledger.received[traced])
        maker = self.ledger.blocks[traced].segment
        if maker not in makers:
            origin = self.segments[maker].key
            if origin.layer == REPLAYED:
                return self._stood_for(traced)
            if origin.phase not in PASSES or like.phase not in (*PASSES, "between") or origin.step != like.step:
                return self.real.get(traced, -1)
            makers[maker] = self.made.get(self._maker(key, like, origin), [])
        return self._at_its_place(makers[maker], traced)

    def _maker(self, key: Key, like: Key, origin: Key) -> Key:
        """The segment of the whole step that is to this one as the traced segment `origin` is to `like`."""
        if like.phase == "between":
            return origin._replace(layer=self._from_end(origin))
        return origin._replace(micro_batch=self._micro_batch(key, like, origin), layer=self._layer(key, like, origin))

    def _at_its_place(self, made: list[int], like: int) -> int:
        """Of the blocks that a segment of the whole step made: the one made where the traced one made this block."""
        place = self.born[like]
        return made[place] if place < len(made) else -1

    def _stood_for(self, traced: int) -> int:
        """The block of the whole step that a stand-in of a shortened pipeline stood for."""
        key, like = self.ledger.stands_for.get(traced, (None, -1))
        if key is None or like < 0:
            return -1
        origin = self.segments[self.ledger.blocks[like].segment].key
        maker = origin._replace(micro_batch=key.micro_batch, layer=self._from_end(origin))
        return self._at_its_place(self.made.get(maker, []), like)

    def _received(self, key: Key, like: Key, of: Key) -> int:
        """The block that this replayed pass received where the traced one received another, if it goes in this pass."""
        meant = of._replace(micro_batch=of.micro_batch + key.micro_batch - like.micro_batch)
        traced = self.arrived.get(meant, -1)
        return self.real.get(traced, -1) if self.replayed is not None and traced in self.replayed else -1

    def _let_go_of_received(self, gone: set[int]) -> None:
        """What a replayed pass received and really let go of, where its like did not."""
        for traced in sorted(gone & self.ledger.received.keys()):
            block = self.real.get(traced, -1)
            if self.alive.pop(block, None) is not None:
                self.whole.stretches[-1].events.append(~block)

    def _micro_batch(self, key: Key, like: Key, origin: Key) -> int:
        if origin.micro_batch == like.micro_batch:
            return key.micro_batch
        if self.trace.pipelined and abs(self.kept.index(origin.micro_batch) - self.kept.index(like.micro_batch)) == 1:
            return key.micro_batch + (1 if origin.micro_batch > like.micro_batch else -1)
        return origin.micro_batch

    def _layer(self, key: Key, like: Key, origin: Key) -> int:
        """The layer as far from this one as the traced block's from the traced one; at the ends, as far from there."""
        if origin.layer in (BEFORE, AFTER) or like.layer in (BEFORE, AFTER) or origin.chunk != like.chunk:
            return self._from_end(origin)
        cut = self.trace.chunks[key.chunk]
        away = cut.kept.index(origin.layer) - cut.kept.index(like.layer)
        if abs(away) > 1:  # no neighbour: something of one end that goes at the other
            return self._from_end(origin)
        at = cut.layers.index(key.layer) + away
        return cut.layers[at] if 0 <= at < len(cut.layers) else origin.layer

    def _from_end(self, origin: Key) -> int:
        """The layer as far from the nearer end of all layers as a traced one is from that of the traced layers."""
        if origin.layer in (BEFORE, AFTER):
            return origin.layer
        cut = self.trace.chunks[origin.chunk]
        place = cut.kept.index(origin.layer)
        return cut.layers[place if 2 * place < len(cut.kept) else place - len(cut.kept)]

    def _compare(self, key: Key, segment: Segment) -> None:
        """Here the step's passes are over: what they left must be what the rank holds, the filled-up gradients too."""
        here = {traced for traced in self._held_until(segment) if self._is_of_passes(traced, key.step)}
        left = [block for block, made in self.alive.items() if made.phase in PASSES]
        self.whole.drift = abs(self._bytes(here) - self._bytes(self.whole.of[block] for block in left))
        events = [~block for block in left]
        for block in left:
            del self.alive[block]
        for traced in sorted(here):
            events.append(self._new(traced, key))
        self.whole.stretches.append(Stretch(key, segment, events))

    def _is_of_passes(self, traced: int, step: int) -> bool:
        key = self.segments[self.ledger.blocks[traced].segment].key
        return key.step == step and (key.phase == "filled" or (key.phase in PASSES and key.layer != REPLAYED))

    def _bytes(self, traced: Iterable[int]) -> int:
        """What is compared: a pipeline sums the gradients of all layers at its end, of those left out with none."""
        blocks = [self.ledger.blocks[number] for number in traced]
        late = ("gradients", "buffers") if self.trace.pipelined else ()
        return sum(block.bytes for block in blocks if block.part not in late)

    def _held_until(self, end: Segment) -> set[int]:
        """Traced blocks that are alive after a segment."""
        held: set[int] = set()
        for segment in self.segments:
            for event in segment.events:
                if event >= 0:
                    held.add(event)
                else:
                    held.discard(~event)
            if segment is end:
                break
        return held


def counted(trace: Trace, key: Key) -> int:
    """How often a segment of the whole step happens: without a pipeline the second micro batch stands for the rest."""
    left_out = trace.micro_batches - len(trace.traced_micro_batches)
    return 1 + left_out if key.micro_batch == 1 and not trace.pipelined else 1
