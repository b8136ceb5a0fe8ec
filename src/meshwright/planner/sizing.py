"""Choose the number of GPUs: smallest that fits, most efficient, days and cost for a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import msgspec

from meshwright import costs
from meshwright.clusters import Assumption, host_assumed
from meshwright.display import Readable, Row, duration, titled
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.budget import GB_PER_GIB, Price, Range, batch_notes, budget, goodput_of
from meshwright.planner.deadline import refine_deadline
from meshwright.planner.divisors import wrong_on_every_count
from meshwright.planner.faster_step import fast_values
from meshwright.planner.goodput import Goodput
from meshwright.planner.gpu_counts import MAX_GPUS, gpu_count, gpu_counts, resized
from meshwright.planner.levers import levers_of
from meshwright.planner.plan import Question, calibration_notes
from meshwright.planner.published import keeps_recipe_layout
from meshwright.planner.recommend import with_layout
from meshwright.planner.reliability import Reliability, reliability
from meshwright.planner.scaling import MIN_SLOWDOWN, divisible_batches
from meshwright.planner.search import SEARCHED_NAMES, Candidate, as_overrides
from meshwright.planner.smallest_cluster import best_with_levers
from meshwright.planner.storage import Storage, storage_of
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.stages import stage

BUDGETED = ("tokens", "steps", "days", "days_band", "gpu_hours", "cost", "cost_band", "goodput")
LISTED = 8  # counts that a note lists


class Size(msgspec.Struct, frozen=True):
    """One GPU count with its best layout."""

    gpus: int
    layout: str
    fits: bool
    total_gib: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    goodput: Goodput
    days: float | None = None
    cost: float | None = None
    nodes: str = ""  # nodes x GPUs per node
    days_band: Range | None = None
    gpu_hours: float | None = None
    cost_band: Range | None = None
    levers: tuple[str, ...] = ()  # overrides of layout kind that make it fit, e.g. layout.offload=optimizer
    host_gib: float = 0.0  # host memory per GPU that offloading needs
    tokens: float | None = None  # of the budget, or what the days train
    steps: int | None = None  # that train them
    step_pct: float = 0.0  # error band of the step time, and so of the speed: value / (1 + pct) to value * (1 + pct)

    @property
    def offloads(self) -> bool:
        """Whether it uses host memory, to fit or to be faster."""
        return any(text.startswith("layout.offload=") for text in self.levers)


class Compared(msgspec.Struct, frozen=True):
    """The best counts of one GPU type, next to those of others."""

    gpu: str
    price: float | None
    currency: str
    smallest: Size | None
    most_efficient: Size | None
    in_time: Size | None  # the smallest that meets the deadline
    cheapest: Size | None  # of all counts that fit; None without a price and a token budget
    soonest: Size | None = None  # of all counts that fit; None without a token budget
    own: int | None = None  # GPUs that the user named
    yours: Size | None = None  # the size of that count; None if no layout divides it or it was not tried
    best: tuple[str, ...] = ()  # what this count is among those that the user named: fastest, cheapest


class Sizing(Readable, msgspec.Struct, frozen=True):
    """All counts with a layout, the smallest that fits and the most efficient, and which counts were tried."""

    sizes: tuple[Size, ...]
    smallest: Size | None
    most_efficient: Size | None
    gpu: str = ""
    node: int = 0  # GPUs per node
    tried: tuple[int, ...] = ()
    no_layout: tuple[int, ...] = ()  # tried counts that no layout divides
    tokens: float | None = None
    price: float | None = None
    currency: str = ""
    notes: tuple[str, ...] = ()
    assumed: tuple[Assumption, ...] = ()
    storage: Storage | None = None
    own: int | None = None  # GPUs of the cluster that the user named
    compared: tuple[Compared, ...] = ()  # if several GPU types were given
    deadline_days: float | None = None
    in_time: Size | None = None  # the smallest count that trains the tokens within the deadline
    reliability: Reliability | None = None  # of the user's count, that in time, the soonest, or the most efficient

    def summary(self) -> Sequence[Row]:
        """Return the smallest and the most efficient count, and a line per count."""
        lines = [
            f"{gpu_count(one.gpus)}: {one.total_gib:.0f} GiB{'' if one.fits else ' (does not fit)'}, "
            f"{one.step_s:.2f} s per step, {one.layout}"
            for one in self.sizes
        ]
        chosen = (("Smallest", self.smallest), ("Best", self.most_efficient))
        found = [(title, f"{gpu_count(one.gpus)}: {one.layout}" if one else "none fits") for title, one in chosen]
        if self.deadline_days is not None and self.tokens is not None:
            soon = f"{gpu_count(self.in_time.gpus)}: {self.in_time.layout}" if self.in_time else "no count"
            found.append((f"In {self.deadline_days:g} days", soon))
        return [*found, *titled("Sizes", lines or ["none"])]


class Budgeted(NamedTuple):
    """What a count is sized for."""

    tokens: float | None
    price: Price | None
    days: float | None

    @property
    def has_deadline(self) -> bool:
        """Whether there are tokens to train within a number of days."""
        return self.tokens is not None and self.days is not None


class Choice(NamedTuple):
    """The counts that a sizing names, of all that were tried."""

    fitting: Sequence[Size]
    listed: tuple[Size, ...]  # the last count that does not fit, and the own one, and all from the smallest that fits
    most_efficient: Size | None
    in_time: Size | None  # the smallest in time
    chosen: Size | None  # the own count; else the smallest in time, the least late or the most efficient


def size(
    question: Question,
    overrides: Sequence[str] = (),
    tokens: float | None = None,
    price: Price | None = None,
    most: int | None = None,
    days: float | None = None,
    own: int | None = None,
) -> Sizing:
    """Return sizes for a question's model, goal, GPU type and node; a number of nodes is among those tried.

    `own` is the user's count; by default that of the question if it has several nodes.
    """
    gpu, asked = question.cluster.gpu, Budgeted(tokens, price, days)
    own, limit = own or (question.cluster.world if question.cluster.nodes > 1 else None), most or MAX_GPUS
    tried, found, baseline = _tried(question, overrides, asked, own, limit)
    choice = _choice(found, asked, own)
    divided = {s.gpus for s in found}
    return Sizing(
        sizes=choice.listed,
        smallest=choice.fitting[0] if choice.fitting else None,
        most_efficient=choice.most_efficient,
        gpu=gpu.name,
        node=question.cluster.gpus_per_node,
        tried=tuple(tried),
        no_layout=tuple(n for n in tried if n not in divided),
        tokens=tokens,
        price=None if price is None else price.per_gpu_hour,
        currency="" if price is None else price.currency,
        notes=(
            *calibration_notes(question.calibration, gpu, question.engine),
            *(() if tokens is None else batch_notes(baseline.case, tokens)),
            *_offload_notes(found),
            *(() if found else wrong_on_every_count(baseline_for(resized(question, 1, 1), overrides).case)),
            *_late_notes(choice.in_time, choice.fitting, days),
            *_batch_notes(
                question,
                overrides,
                asked,
                own,
                next((s for s in found if s.gpus == own), None),
                is_late=asked.has_deadline and (not choice.in_time or choice.in_time.gpus > (own or inf)),
            ),
        ),
        assumed=(
            *_taken_from_recipe(baseline, question, overrides),
            *question.assumed,
            *(host_assumed(question.cluster) if any(s.offloads for s in choice.fitting) else ()),
        ),
        storage=storage_of(baseline.case, choice.chosen.steps if choice.chosen is not None else None),
        own=own,
        deadline_days=days,
        in_time=choice.in_time,
        reliability=_reliability(question, baseline.case, choice),
    )


def _tried(
    question: Question, overrides: Sequence[str], asked: Budgeted, own: int | None, limit: int
) -> tuple[list[int], list[Size], Baseline]:
    """Return the counts that were tried, the sizes of those that have a layout, and the baseline of the largest."""
    node, found = question.cluster.gpus_per_node, list[Size]()

    def days_on(count: int) -> float | None:
        stage(f"size: {count:,} GPUs, near the deadline")
        sized = _size_for(baseline_for(resized(question, count, node), overrides), asked)
        found.extend([] if sized is None else [sized])
        return None if sized is None else sized.days

    whole = [limit - limit % node] if limit > node else []  # what the user can get, in whole nodes
    tried = sorted({*gpu_counts(node, limit), *whole, *([own] if own and own <= limit else ())})
    for place, count in enumerate(tried):
        stage(f"size: {count:,} GPUs ({place} of {len(tried)} counts done)")
        baseline = baseline_for(resized(question, count, node), overrides)
        sized = _size_for(baseline, asked)
        found.extend([] if sized is None else [sized])
    if asked.has_deadline and asked.days is not None:
        timed = {s.gpus: s.days for s in found if s.fits and s.days is not None}
        more = refine_deadline(timed, asked.days, node, baseline.case.global_batch_size, limit, days_on)
        tried = sorted({*tried, *more})
        found.sort(key=lambda s: s.gpus)
    return tried, found, baseline


def _choice(found: Sequence[Size], asked: Budgeted, own: int | None) -> Choice:
    """Return the counts to name, of all in rising order."""
    fitting = [s for s in found if s.fits]
    below = [s for s in found if not fitting or s.gpus < fitting[0].gpus]
    below = [s for s in below if s is below[-1] or s.gpus == own]
    most_efficient = max(fitting, key=lambda s: s.tokens_per_s_per_gpu * s.goodput.share, default=None)
    in_time = None if asked.tokens is None else next((s for s in fitting if _within(s, asked.days)), None)
    late = min(fitting, key=lambda s: s.days or inf, default=None) if asked.has_deadline else None
    chosen = next((s for s in fitting if s.gpus == own), in_time or late or most_efficient)
    listed = (*below, *(s for s in found if fitting and s.gpus >= fitting[0].gpus))
    return Choice(fitting, listed, most_efficient, in_time, chosen)


def _reliability(question: Question, case: Case, choice: Choice) -> Reliability | None:
    """Return what failures cost on the chosen count; None if none is chosen."""
    chosen = choice.chosen
    if chosen is None:
        return None
    return reliability(
        chosen.gpus,
        question.cluster.gpus_per_node,
        storage_of(case, chosen.steps).checkpoint_gib * GB_PER_GIB,
        chosen.step_s,
        chosen.steps or case.steps,
        choice.fitting[0].gpus,
        case.recipe.checkpoint.async_save,
        question.mtbf_hours,
        case.cluster.storage_gb_s,
    )


def _taken_from_recipe(baseline: Baseline, question: Question, overrides: Sequence[str]) -> tuple[Assumption, ...]:
    """Return the sequence length, the batch and the images that all sizes have, where the user set none."""
    return (*_batch_taken(baseline, question, overrides), *_images_taken(baseline, overrides))


def _images_taken(baseline: Baseline, overrides: Sequence[str]) -> tuple[Assumption, ...]:
    """Return that the samples have images, whose encoder takes memory and time."""
    recipe = baseline.case.recipe
    if not recipe.data.images or "data.images" in override.requested(recipe, override.split_auto(overrides)[0]):
        return ()
    text = f"samples with images, as in the recipe {baseline.base.name}; data.images=false for text only"
    return (Assumption("data.images", "true", text),)


def _batch_taken(baseline: Baseline, question: Question, overrides: Sequence[str]) -> tuple[Assumption, ...]:
    """Return the sequence length and the batch that all sizes have, where the user set neither."""
    recipe = baseline.case.recipe
    typed = override.requested(recipe, override.split_auto(overrides)[0])
    length, batch = recipe.data.seq_length, recipe.train.global_batch_size
    source = f"from the recipe {baseline.base.name}"
    tokens = f"{length:,} tokens"
    if length != baseline.base.data.seq_length:  # recommend explains the same change with the same words
        why = baseline.reasons.get("data.seq_length", "").partition(";")[0]
        source = f"the batch {source}, whose length is {baseline.base.data.seq_length:,}"
        tokens += f" ({why})" if why else ""
    if "data.seq_length" not in typed and question.seq_length is None:
        other = "--seq N and train.global_batch_size=N set others"
        text = f"{tokens} × {batch:,} sequences per step, {source}; {other}"
        return (Assumption("data.seq_length", str(length), text),)
    if "train.global_batch_size" not in typed:
        text = f"{batch:,} sequences of {length:,} tokens per step, {source}; train.global_batch_size=N sets another"
        return (Assumption("train.global_batch_size", str(batch), text),)
    return ()


GLOBAL_BATCH = "train.global_batch_size"


def _within(one: Size, days: float | None) -> bool:
    return days is not None and one.days is not None and one.days <= days


def _late_notes(in_time: Size | None, fitting: Sequence[Size], days: float | None) -> Iterator[str]:
    """Yield that the error band of the chosen count passes the deadline, and the smallest count whose band does not."""
    band = None if in_time is None else in_time.days_band
    if in_time is None or band is None or days is None or band.high <= days:
        return
    sure = next((s for s in fitting if s.days_band is not None and s.days_band.high <= days), None)
    safe = "no count that was tried has its whole band within it"
    if sure is not None and sure.days_band is not None:
        safe = f"{gpu_count(sure.gpus)} are in time also at the slow end ({duration(sure.days_band.high, days)})"
    yield (
        f"{gpu_count(in_time.gpus)} may miss the {days:g} days: the error band of their time ends at "
        f"{duration(band.high, days)}; {safe}"
    )


def _batch_notes(
    question: Question, overrides: Sequence[str], asked: Budgeted, own: int | None, now: Size | None, is_late: bool
) -> Iterator[str]:
    """Yield the batch with which the own GPUs are in time, or much faster, if theirs divides into few layouts."""
    typed = any(text.startswith(f"{GLOBAL_BATCH}=") for text in overrides)
    if own is None or own != question.cluster.world or (not is_late and (typed or now is None or not now.fits)):
        return
    batch = baseline_for(question, overrides).requested.train.global_batch_size
    others = [f"{GLOBAL_BATCH}={one}" for one in divisible_batches(batch, own)]
    sizes = [(text, _size_for(baseline_for(question, (*overrides, text)), asked)) for text in others]
    fitting = [(one.tokens_per_s, text, one) for text, one in sizes if one is not None and one.fits]
    if not fitting:
        return
    rate, text, found = max(fitting, key=lambda row: row[0])
    needed = "" if found.days is None else f": {duration(found.days)}"
    if is_late and _within(found, asked.days):
        yield f"your {gpu_count(own)} are enough with {text}{needed}; a new experiment"
    elif not is_late and now is not None and rate >= MIN_SLOWDOWN * now.tokens_per_s:
        before = "" if now.days is None else f" in place of {duration(now.days)}"
        yield (
            f"your {gpu_count(own)} train {rate / now.tokens_per_s:.2f} times the tokens per second with {text}"
            f"{needed}{before}; {batch} divides into few layouts of {gpu_count(own)}; a new experiment"
        )


def _offload_notes(found: Sequence[Size]) -> Iterator[str]:
    """Yield which counts are planned with offload, and the smallest count that is not."""
    fitting = [s for s in found if s.fits]
    offloaded = [s for s in fitting if s.offloads]
    if not offloaded:
        return
    plain = next((s.gpus for s in fitting if not s.offloads), None)
    counts = ", ".join(f"{s.gpus:,}" for s in offloaded[:LISTED]) + (" …" if len(offloaded) > LISTED else "")
    host = max(s.host_gib for s in offloaded)
    without = "no count is planned without" if plain is None else f"the smallest planned without is {gpu_count(plain)}"
    yield (
        f"offload is planned on {counts} GPU{'s' * (counts != '1')}, to fit or to be faster (up to {host:.0f} GiB of "
        f"host memory per GPU; copies take time, weights stay the same); {without}; layout.offload=none plans all "
        "without it"
    )


def compare(sizings: Sequence[Sizing]) -> Sizing:
    """Return the sizing of the first GPU type with the best counts of all types."""

    def compared(one: Sizing) -> Compared:
        timed = [size for size in one.sizes if size.fits and size.days is not None and one.tokens is not None]
        priced = [size for size in timed if size.cost is not None]
        cheapest = min(priced, key=lambda size: (size.cost, size.gpu_hours), default=None)  # own GPUs may be free
        best = (one.smallest, one.most_efficient, one.in_time, cheapest)
        soonest = min(timed, key=lambda s: s.days or 0.0, default=None)
        yours = next((size for size in one.sizes if size.gpus == one.own), None)
        return Compared(one.gpu, one.price, one.currency, *best, soonest, one.own, yours)

    named = [f"{one.gpu}: {note}" for one in sizings for note in one.notes]
    shared = sizings[0].notes if all(one.notes == sizings[0].notes for one in sizings) else None
    notes = tuple(named) if shared is None else shared
    return msgspec.structs.replace(sizings[0], compared=_with_best([compared(one) for one in sizings]), notes=notes)


def _with_best(named: Sequence[Compared]) -> tuple[Compared, ...]:
    """Return the types with the fastest and the cheapest of the counts that the user named; costs in one currency."""
    yours = [one.yours for one in named if one.yours is not None and one.yours.fits]
    priced = [one.cost for one in yours if one.cost is not None]
    comparable = len(priced) == len(yours) and len({one.currency for one in named}) == 1
    fastest = max((one.tokens_per_s for one in yours), default=None) if len(yours) > 1 else None
    cheapest = min(priced, default=None) if len(yours) > 1 and comparable else None

    def best(one: Compared) -> tuple[str, ...]:
        if one.yours is None or not one.yours.fits:
            return ()
        found = {
            "fastest": one.yours.tokens_per_s == fastest,
            "cheapest": cheapest is not None and one.yours.cost == cheapest,
        }
        return tuple(name for name, is_best in found.items() if is_best)

    return tuple(msgspec.structs.replace(one, best=best(one)) for one in named)


def describe_layout(layout: dict[str, Any], levers: Mapping[str, Any]) -> str:
    """Describe a layout in one line, with the levers it uses."""
    used = {**({} if layout["offload"] == "none" else {"offload": layout["offload"]}), **levers}
    more = "".join(f", {name} {str(value).lower()}" for name, value in used.items())
    degrees = " ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "ep") if layout[name] > 1)
    return f"{degrees or 'data parallel'}, micro {layout['micro_batch_size']}, recompute {layout['recompute']}{more}"


def _planned(baseline: Baseline, chosen: Candidate) -> Case:
    """Return the case that `recommend` plans: the recipe's layout where it is kept, and the fastest kernels."""
    layout = {} if keeps_recipe_layout(baseline, chosen) else {**chosen.layout, **baseline.pinned}
    recipe = with_layout(baseline.requested, layout)
    case = baseline.case.rebuild(recipe)
    quick = fast_values(baseline, case) if chosen.fits else {}
    return baseline.case.rebuild(with_layout(recipe, quick)) if quick else case


def _size_for(baseline: Baseline, asked: Budgeted) -> Size | None:
    chosen = best_with_levers(baseline)
    if chosen is None:  # no layout divides this count
        return None
    case = _planned(baseline, chosen)
    estimate = costs.estimate(case)
    gpus = case.cluster.world
    rate = float(estimate.tokens_per_s_per_gpu)
    is_timed = chosen.fits and (asked.tokens is not None or asked.days is not None)
    taken = budget(case, estimate, asked.tokens, asked.price, days=asked.days) if is_timed else None
    levers = levers_of(chosen, baseline.case)
    found = Size(
        gpus=gpus,
        layout=describe_layout({name: getattr(case, name) for name in SEARCHED_NAMES}, levers),
        fits=chosen.fits,
        total_gib=float(estimate.memory.total),
        step_s=float(estimate.step_s),
        tokens_per_s=rate * gpus,
        tokens_per_s_per_gpu=rate,
        mfu=float(estimate.mfu),
        goodput=goodput_of(case, float(estimate.step_s), case.steps),
        nodes=f"{case.cluster.nodes}x{case.cluster.gpus_per_node}",
        levers=as_overrides(levers),
        host_gib=float(estimate.memory.host),
        step_pct=float(estimate.band.step_pct),
    )
    more = {} if taken is None else {name: getattr(taken, name) for name in BUDGETED}
    return msgspec.structs.replace(found, **more)
