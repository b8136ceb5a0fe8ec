"""A pipeline step over time: which micro batch each rank runs when, in schedule order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from meshwright.costs.time import pass_seconds
from meshwright.recipes.capabilities import V_SHAPED
from meshwright.recipes.case import Case

MAX_PASSES = 40_000  # maximum passes simulated; a longer step is simulated for fewer micro batches
INPUT_SHARE = 0.5  # share of a backward pass for the input gradient; the rest is for weights


class Pass(NamedTuple):
    """One pass of one micro batch through one stage chunk."""

    kind: str  # F forward, B full backward, I backward for the input, W backward for the weights
    chunk: int  # position in the model, 0 = first
    micro_batch: int


class ScheduledPass(msgspec.Struct, frozen=True):
    """A pass with its start and end, in seconds from the start of the step."""

    rank: int
    kind: str
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


class Timeline(msgspec.Struct, frozen=True):
    """The passes of a step, and the ranks' idle share."""

    schedule: str
    ranks: int
    chunks: int  # of each rank
    micro_batches: int  # of one pass through the pipeline
    followed: int  # number of these in `passes`
    span_s: float
    idle_share: float  # share of the time of all ranks
    passes: tuple[ScheduledPass, ...]


def timeline(case: Case) -> Timeline:
    """Return one step of the layout's pipeline, with estimated durations per stage."""
    pp, vp, micro_batches = int(case.pp), int(case.vp), int(case.pass_micro_batches)
    schedule = str(case.pp_schedule) if pp > 1 else "1f1b"
    followed = _simulated_micro_batches(micro_batches, pp, vp)
    orders = [order(schedule, rank, pp, vp, followed) for rank in range(pp)]
    passes = schedule_passes(orders, pp * vp, _durations(case, vp))
    span = max(one.end_s for one in passes)
    busy = sum(one.end_s - one.start_s for one in passes)
    return Timeline(schedule, pp, vp, micro_batches, followed, span, 1 - busy / (span * pp), tuple(passes))


def _simulated_micro_batches(micro_batches: int, pp: int, vp: int) -> int:
    """Return all micro batches, or as many complete rounds as are worth simulating."""
    most = max(MAX_PASSES // (2 * pp * vp) // pp, 2) * pp
    return micro_batches if micro_batches <= most else most


def order(schedule: str, rank: int, pp: int, vp: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one rank in a step, in order."""
    return list(ORDERS[schedule](rank, pp, vp, micro_batches))


def chunk_place(schedule: str, rank: int, pp: int, local: int) -> int:
    """Return the model position of a rank's n-th chunk: every pp-th, or the two ends of a V."""
    if schedule in V_SHAPED:
        return rank if local == 0 else 2 * pp - 1 - rank
    return rank + local * pp


def _1f1b(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """1F1B: fill the pipeline, alternate one forward and one backward, then drain it."""
    ahead = min(pp - rank, micro_batches)
    for step in range(micro_batches + ahead):
        if step >= ahead:
            yield Pass("B", rank, step - ahead)
        if step < micro_batches:
            yield Pass("F", rank, step)


def _gpipe(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """GPipe, and its looped form if a rank has several chunks: the last chunk runs backward first."""
    chunks = [rank + lap * pp for lap in range(vp)]
    for chunk in chunks:
        yield from (Pass("F", chunk, micro) for micro in range(micro_batches))
    for chunk in reversed(chunks):
        backwards = range(micro_batches) if vp == 1 else reversed(range(micro_batches))
        yield from (Pass("B", chunk, micro) for micro in backwards)


def _looped(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """Looped breadth-first also runs backward from the last micro batch if a rank has one chunk."""
    passes = list(_gpipe(rank, pp, vp, micro_batches))
    forward, backward = passes[: len(passes) // 2], passes[len(passes) // 2 :]
    yield from forward
    yield from backward if vp > 1 else reversed(backward)


def _interleaved(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """Rounds of micro batches through one chunk after another; two more in flight per following rank."""
    per_round = micro_batches // max(1, micro_batches // pp)
    total = micro_batches * vp
    ahead = min((vp - 1) * per_round + 2 * (pp - 1 - rank), total)
    forward, backward = _laps("F", rank, pp, vp, per_round), _laps("B", rank, pp, vp, per_round)
    for step in range(total + ahead):
        if step < total:
            yield forward(step)
        if step >= ahead:
            yield backward(step - ahead)


def _interleaved_zero_bubble(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """The same with one more in flight; weight gradients wait as many turns as there are earlier ranks."""
    per_round = micro_batches // max(1, micro_batches // pp)
    total = micro_batches * vp
    ahead = min((vp - 1) * per_round + (pp - 1 - rank), total)
    forward, backward, weights = (_laps(kind, rank, pp, vp, per_round) for kind in "FIW")
    done = 0
    for step in range(total + ahead):
        if step < total:
            yield forward(step)
        if step >= ahead:
            yield backward(step - ahead)
            if step - ahead >= rank:
                yield weights(done)
                done += 1
    yield from (weights(step) for step in range(done, total))


def _laps(kind: str, rank: int, pp: int, vp: int, per_round: int) -> Callable[[int], Pass]:
    """Return the n-th pass of a kind if micro batches run in rounds through the chunks; backward in reverse."""

    def at(step: int) -> Pass:
        lap, place = divmod(step, per_round)
        local = lap % vp if kind == "F" else vp - 1 - lap % vp
        return Pass(kind, rank + local * pp, lap // vp * per_round + place)

    return at


def _zbv(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """Zero bubble on a V: chunk 0 on the way down, chunk 1 on the way up."""
    total = max(2 * pp - 1, micro_batches)  # a shorter step skips turns of the full one
    phases = [
        ("F0", 2 * (pp - rank) - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", pp - rank),
        ("F0 I0 W0 F1 I1 W1", total - 2 * pp + rank + 1),
        ("I0 W0 F1 I1 W1", pp - rank - 1),
        ("I0 I1", rank),
        ("I0 W0", pp - rank),
        ("W1", rank),
        ("W0", rank),
    ]
    passes = _expand_phases(phases, "zbv", rank, pp)
    return (one for one in passes if one.micro_batch < micro_batches)


def _dualpipe_v(rank: int, pp: int, vp: int, micro_batches: int) -> Iterator[Pass]:
    """DualPipe on a V: a forward of one chunk alongside a backward of the other; few weight passes are deferred."""
    turns = ["B1", "B0"] * (rank + 1)
    ending = turns[: rank + 1] + [turn.replace("B", "I") for turn in turns[rank + 1 :]]
    phases = [
        ("F0", 2 * (pp - rank - 1)),
        ("F0 F1", rank + 1),
        ("I1 W F1", pp - rank - 1),
        ("F0 B1 F1 B0", micro_batches - 2 * pp + rank + 1),
        ("B1 F1 B0", pp - rank - 1),
        (" ".join(ending), 1),
        ("W I0", pp - rank - 1),
        ("W", rank + 1),
    ]
    return _expand_phases(phases, "dualpipe_v", rank, pp)


def _expand_phases(phases: Sequence[tuple[str, int]], schedule: str, rank: int, pp: int) -> Iterator[Pass]:
    """Expand phases: each token takes the next micro batch of its kind and chunk; a bare W the longest waiting."""
    next_micro_batch: Counter[str] = Counter()
    waiting: deque[Pass] = deque()
    for token in chain.from_iterable(tokens.split() * times for tokens, times in phases):
        if token == "W":
            if waiting:
                yield waiting.popleft()._replace(kind="W")
            continue
        kind, local = token[0], int(token[1])
        counter = token.replace("B", "I")  # a full backward counts as one for the input
        one_pass = Pass(kind, chunk_place(schedule, rank, pp, local), next_micro_batch[counter])
        next_micro_batch[counter] += 1
        if kind == "I":
            waiting.append(one_pass)
        yield one_pass


ORDERS: dict[str, Callable[[int, int, int, int], Iterator[Pass]]] = {
    "1f1b": _1f1b,
    "gpipe": _gpipe,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipe_v": _dualpipe_v,
}


def _durations(case: Case, vp: int) -> list[dict[str, float]]:
    """Return the seconds of each kind of pass on every rank; a rank's chunks take equal shares."""
    return [
        {
            "F": forward / vp,
            "B": backward / vp,
            "I": INPUT_SHARE * backward / vp,
            "W": (1 - INPUT_SHARE) * backward / vp,
        }
        for forward, backward in pass_seconds(case)
    ]


def schedule_passes(
    orders: Sequence[Sequence[Pass]], chunks: int, seconds: Sequence[dict[str, float]]
) -> list[ScheduledPass]:
    """Schedule every pass as early as its rank and its dependencies allow, with seconds by rank and kind of pass."""
    return schedule_timed_passes(orders, chunks, lambda rank, one: seconds[rank][one.kind])


def schedule_timed_passes(
    orders: Sequence[Sequence[Pass]], chunks: int, seconds: Callable[[int, Pass], float], send_s: float = 0.0
) -> list[ScheduledPass]:
    """Schedule every pass as early as its rank and its dependencies allow; `send_s`: a send between two ranks."""
    done: dict[tuple[str, int, int], tuple[float, int]] = {}  # end of a pass, and its rank
    at, free = [0] * len(orders), [0.0] * len(orders)
    scheduled: list[ScheduledPass] = []
    progress = True
    while progress:
        progress = False
        for rank, passes in enumerate(orders):
            while at[rank] < len(passes):
                one = passes[at[rank]]
                needed = [done.get(key) for key in _dependencies(one, chunks)]
                if None in needed:
                    break
                arrived = [end + send_s * (of != rank) for end, of in filter(None, needed)]
                start = max([free[rank], *arrived])
                free[rank] = start + seconds(rank, one)
                key = ("I" if one.kind == "B" else one.kind, one.chunk, one.micro_batch)
                done[key] = free[rank], rank
                scheduled.append(ScheduledPass(rank, one.kind, one.chunk, one.micro_batch, start, free[rank]))
                at[rank] += 1
                progress = True
    return scheduled


def _dependencies(one: Pass, chunks: int) -> list[tuple[str, int, int]]:
    """Return the dependencies of a pass: the previous or next chunk, and for backward its own forward."""
    kind, chunk, micro = one
    if kind == "F":
        return [("F", chunk - 1, micro)] if chunk else []
    if kind == "W":
        return [("I", chunk, micro)]
    return [("F", chunk, micro), *([("I", chunk + 1, micro)] if chunk < chunks - 1 else [])]
