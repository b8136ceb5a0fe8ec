"""How many samples a user's own file has and how long they are: counted with its tokenizer, else estimated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from meshwright import extras, file_access, rules
from meshwright.api.data_findings import NO_VALIDATION, data_findings, without_validation
from meshwright.api.paths import looks_like_path, several_files
from meshwright.display import plural, short_number
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.planner import Plan, Suggestion, examine, held_in_a_search
from meshwright.planner.budget import Epochs
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.padding import padding_of
from meshwright.recipes.replacements import bytes_per_token
from meshwright.recipes.types import Data, Engine, Recipe, recipe_fields
from meshwright.rules import Finding
from meshwright.rules.data import few_steps, needs_equal_lengths, streams_unknown_lengths
from meshwright.rules.repeated_data import ENOUGH_STEPS, FEW_STEPS, MANY_PASSES, USUAL_EPOCHS, usual_epochs

MAX_COUNTED_BYTES = 2**28  # larger files are not read for an answer that should be instant
MAX_TOKENIZED_BYTES = 2**24  # larger files are tokenized by samples and train only
WINDOW_STEPS = 64  # in which the engine groups samples by length
OUR_ENGINE: Engine = "meshwright"
FEW_UPDATES, USUAL_UPDATES = 50, 100  # of a fine-tuning; with fewer, an adapter is hardly trained
SMALLEST_BATCH = 8  # that is recommended for more updates: gradients of fewer samples are noisy
WORTH_IT = 1.25  # times fewer tokens from which packing is suggested
BATCH = "train.global_batch_size"
FEW_UPDATES_RULE = "data.few-updates"
T = TypeVar("T")
_short = partial(short_number, digits=".1f", least=1e3)


class _Counted(msgspec.Struct, frozen=True):
    """The samples of one pass over a dataset."""

    samples: int
    text: str  # the same in words
    packed_tokens: float = 0.0  # of all documents, if they are packed


def epochs_of(recipe: Recipe, engine: Engine = OUR_ENGINE) -> Epochs | None:
    """Return the samples that a recipe's epochs over a local file or folder have; None if they are not known."""
    epochs = recipe.train.epochs
    counted = _count(recipe, engine) if epochs else None
    if counted is None:
        return None
    passes = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {recipe.data.dataset}"
    source = f"{passes}: {counted.text}"
    lengths = own_lengths(recipe) if counted.packed_tokens else None
    longest = 0 if lengths is None else ceil(lengths.max()) - 1  # the last token is a target only
    return Epochs(max(round(counted.samples * epochs), 1), source, counted.packed_tokens, longest)


def share_of_data(recipe: Recipe, engine: Engine = OUR_ENGINE) -> str:
    """Return how often the steps of a run pass over a local dataset, and the option for whole passes; empty if unknown.

    The steps of a recipe are those of its own data.
    """
    train = recipe.train
    counted = None if train.epochs or not looks_like_path(recipe.data.dataset) else _count(recipe, engine)
    if counted is None:
        return ""
    passes = train.steps * train.global_batch_size / counted.samples
    share = f"{passes:.3g} epochs" if passes > 1 else f"{passes:.0%}"
    each = plural(ceil(counted.samples / train.global_batch_size), "step")
    return (
        f"{plural(train.steps, 'step')} are {share} of {recipe.data.dataset} ({counted.text}): --epochs 1 "
        f"(train.epochs=1) is {each} of {plural(train.global_batch_size, 'sample')}"
    )


def epochs_beside(folder: Path | None) -> Callable[[Recipe], Epochs | None]:
    """Return epochs_of for the recipe of a file in `folder`: its program starts there, and so do relative paths."""

    def count(recipe: Recipe) -> Epochs | None:
        return epochs_of(with_data_beside(recipe, folder))

    return count


def with_data_beside(recipe: Recipe, folder: Path | None) -> Recipe:
    """Return the recipe of a file in `folder` with a relative path of its data as this process opens it."""
    name = recipe.data.dataset
    if folder is None or not name or file_access.closed() or Path(name).expanduser().exists():
        return recipe
    own = os.path.relpath(os.path.realpath(folder / name)) if (folder / name).exists() else name
    return _trained_on(recipe, ",".join(several_files(name, folder)) or own)


def _trained_on(recipe: Recipe, dataset: str) -> Recipe:
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, dataset=dataset))


def batch_for_updates(
    recipe: Recipe, world: int, engine: Engine = OUR_ENGINE, by_steps: bool = False
) -> tuple[int, str] | None:
    """Return a batch that gives a fine-tuning enough updates of the user's data, and why; None if it has enough.

    `by_steps`: also that of a run by steps, which repeats the data often, in the usual epochs.
    """
    if recipe.goal == "pretrain" or recipe.benchmark:
        return None
    epochs, passes = epochs_of(recipe, engine), recipe.train.epochs
    if epochs is None and by_steps and _repeats_often(recipe):  # its steps are those of other data
        epochs, passes = _usual_epochs(recipe, engine), float(USUAL_EPOCHS)
    now, least = recipe.train.global_batch_size, max(SMALLEST_BATCH, world)
    if epochs is None or _updates(epochs, now) >= FEW_UPDATES:
        return None
    batch = now
    while batch % 2 == 0 and batch // 2 >= least and _updates(epochs, batch) < USUAL_UPDATES:
        batch //= 2
    if batch == now:
        return None
    few = plural(_updates(epochs, now), "update")
    return batch, (
        f"{now} samples per step leave only {few} in {passes:g} epoch{'s' * (passes != 1)} of {recipe.data.dataset}, "
        f"{batch} leave {_updates(epochs, batch)}"
    )


def few_updates(recipe: Recipe, world: int, engine: Engine = OUR_ENGINE) -> tuple[Finding, ...]:
    """Return the advice for a fine-tuning of few updates, but those that the rule data.few-steps reports."""
    epochs = None if file_access.closed() else epochs_of(recipe, engine)
    found = batch_for_updates(recipe, world, engine) if epochs is not None else None
    if epochs is None or found is None:
        return ()
    updates = _updates(epochs, recipe.train.global_batch_size)
    if updates < FEW_STEPS or updates <= min(recipe.train.epochs, ENOUGH_STEPS - 1):
        return ()
    return (Finding(FEW_UPDATES_RULE, "advice", BATCH, found[1], (f"{BATCH}={found[0]}",)),)


def _repeats_often(recipe: Recipe) -> bool:
    """Return whether a run by steps repeats the user's data more often than is of use."""
    counted = _count(recipe) if looks_like_path(recipe.data.dataset) and not file_access.closed() else None
    return counted is not None and recipe.train.steps * recipe.train.global_batch_size > MANY_PASSES * counted.samples


def _updates(epochs: Epochs, batch: int) -> int:
    return ceil(epochs.samples / batch)


def sample_width(recipe: Recipe, engine: Engine = OUR_ENGINE) -> float | None:
    """Return the tokens per sample that steps of unequal width have on average; None if it is not known or constant.

    Samples are as wide as the longest one of their step or micro batch, where the engine pads to it.
    """
    padding = padding_of(recipe, engine)
    if padding.to not in ("step", "micro_batch"):
        return None
    lengths = own_lengths(recipe)
    if lengths is None:
        return None
    size = recipe.layout.micro_batch_size if padding.to == "micro_batch" else recipe.train.global_batch_size
    shuffled = np.random.default_rng(0).permutation(lengths)
    if len(shuffled) < size:
        shuffled = np.resize(shuffled, size)
    windows = np.split(shuffled, range(WINDOW_STEPS * size, len(shuffled), WINDOW_STEPS * size))
    if recipe.data.group_by_length:
        windows = [np.sort(window) for window in windows]
    widths = np.concatenate([np.maximum.reduceat(window, range(0, len(window), size)) for window in windows])
    rounded = np.ceil(widths / padding.multiple) * padding.multiple if padding.multiple > 1 else widths
    return float(np.minimum(rounded, recipe.data.seq_length).mean())


def dataset_notes(recipe: Recipe, dp: int) -> tuple[str, ...]:
    """Return how many samples the user's dataset has and how often the run repeats them, or that it is not here."""
    name = recipe.data.dataset
    if recipe.data.blend or file_access.closed() or not looks_like_path(name):
        return ()
    found = tuple(one for one in data_findings(recipe) if one.rule != NO_VALIDATION)
    if found:  # errors and missing validation data are findings of the plan
        missing = tuple(one.message for one in found if one.severity != "error")
        of_data = any(one.field.startswith("data.dataset") or one.severity == "error" for one in found)
        return missing if of_data else (*missing, *_delimiter_notes(recipe), *_count_notes(recipe, dp))
    return (*_delimiter_notes(recipe), *_count_notes(recipe, dp))


def _delimiter_notes(recipe: Recipe) -> Iterable[str]:
    path = Path(recipe.data.dataset).expanduser()
    found = _rows_of(path, recipe.data.split, lambda rows: rows.format_for(recipe.goal))
    return (found,) if found else ()


def _count_notes(recipe: Recipe, dp: int) -> tuple[str, ...]:
    """Return how many samples the user's dataset has and how often the run repeats them."""
    name, train = recipe.data.dataset, recipe.train
    counted = _count(recipe)
    if counted is None:
        return ()
    if train.epochs:
        repeated = f"{name}: train.epochs={train.epochs:g} repeats {counted.text} {train.epochs:g} times"
        advice = f"more than {MANY_PASSES} epochs mostly memorize the data: train.epochs={USUAL_EPOCHS}"
        return (f"{repeated}; {advice}",) if train.epochs > MANY_PASSES else ()
    passes = train.steps * train.global_batch_size / counted.samples
    if passes <= MANY_PASSES:
        return (f"{name}: {counted.text}",)
    fields, steps = usual_epochs(int(counted.samples), train.global_batch_size, recipe.layout.micro_batch_size, dp)
    usual = " ".join(f"{key}={value}" for key, value in fields.items())
    taken = f": {plural(steps, 'step')}" if len(fields) > 1 else ""
    return (
        f"{name}: {counted.text}; train.steps={train.steps} with {plural(train.global_batch_size, 'sample')} each "
        f"repeat them {passes:,.0f} times; {usual} is usual{taken}",
    )


def with_own_data(plan: Plan) -> Plan:
    """Return the plan with what the user's data adds: findings about its rows and steps, and less padding."""
    plan = _with_data_errors(_with_counted_steps(plan))
    epochs = epochs_of(plan.recipe, plan.case.engine) or _usual_epochs(plan.recipe, plan.case.engine)
    kept = tuple(one for one in plan.suggestions if epochs is None or not _leaves_few_updates(plan, one, epochs))
    found = (*_more_updates(plan), *list(_less_padding(plan))[:1])
    return plan if found + kept == plan.suggestions else msgspec.structs.replace(plan, suggestions=found + kept)


def _usual_epochs(recipe: Recipe, engine: Engine) -> Epochs | None:
    """Return the usual passes over the data of a run by steps: more updates than these repeat the samples."""
    train = msgspec.structs.replace(recipe.train, epochs=float(USUAL_EPOCHS))
    return epochs_of(msgspec.structs.replace(recipe, train=train), engine)


def _more_updates(plan: Plan) -> Iterable[Suggestion]:
    """Suggest a batch that gives a fine-tuning enough updates: one that the user names is not replaced."""
    world, engine = plan.question.cluster.world, plan.case.engine
    found = batch_for_updates(plan.recipe, world, engine, by_steps=True) if plan.exists else None
    if found is not None and not any(one.rule == "data.few-steps" for one in plan.findings):
        length = () if plan.recipe.train.epochs else (f"train.epochs={USUAL_EPOCHS}",)
        yield Suggestion("more updates of your data", (f"{BATCH}={found[0]}", *length), found[1])


def _leaves_few_updates(plan: Plan, suggestion: Suggestion, epochs: Epochs) -> bool:
    """Return whether a suggested batch leaves a fine-tuning few updates."""
    batch = override.requested(plan.recipe, suggestion.overrides).get(BATCH)
    return batch is not None and plan.recipe.goal != "pretrain" and _updates(epochs, batch) < FEW_UPDATES


def _with_data_errors(plan: Plan) -> Plan:
    """Return the plan with what train refuses of the user's own data, as check and train report it."""
    found = (*(_data_errors(plan.recipe) if has_own_data(plan) else ()), *_without_validation(plan.recipe))
    return msgspec.structs.replace(plan, findings=(*found, *plan.findings)) if found else plan


def _without_validation(recipe: Recipe) -> tuple[Finding, ...]:
    return () if file_access.closed() else tuple(without_validation(recipe))


def has_own_data(plan: Plan) -> bool:
    """Return whether the user named the dataset of a plan."""
    return any(change.field == "data.dataset" for change in plan.changes)


def _data_errors(recipe: Recipe) -> tuple[Finding, ...]:
    return tuple(one for one in data_findings(recipe, thorough=True) if one.severity == "error")


def _with_counted_steps(plan: Plan) -> Plan:
    """Return the plan with the findings that the steps of its epochs add: a search does not know them."""
    epochs = epochs_of(plan.recipe)
    if epochs is None:
        return plan
    counted = epochs.counted(plan.case)
    if not any(bool(one.broken(counted)) and not bool(one.broken(plan.case)) for one in rules.applicable(counted)):
        return plan
    typed = {recipe_fields()[change.field].flat for change in plan.changes if change.why.startswith("requested")}
    findings, repair = examine(counted, typed, stated=plan.question.stated)
    kept = tuple(one for one in plan.suggestions if not _leaves_few_steps(one, counted))
    held = held_in_a_search(findings, counted)
    return msgspec.structs.replace(plan, findings=held, repair=repair, repaired=None, suggestions=kept)


def _leaves_few_steps(suggestion: Suggestion, counted: Case) -> bool:
    """Return whether a suggested batch makes too few steps of the counted samples."""
    batch = override.requested(counted.recipe, suggestion.overrides).get(BATCH)
    return batch is not None and bool(few_steps(counted.replace(global_batch_size=batch)))


def _less_padding(plan: Plan) -> Iterable[Suggestion]:
    data, lengths = plan.recipe.data, own_lengths(plan.recipe)
    if lengths is None or data.packing or not plan.exists:
        return
    seq, mean = data.seq_length, float(np.minimum(lengths, data.seq_length).mean())
    engine = plan.case.engine
    padded = sample_width(plan.recipe, engine) or seq
    for title, changes in (
        ("pack the samples", ("data.packing=true", "data.group_by_length=false")),
        ("group samples by length", ("data.group_by_length=true",)),
    ):
        values = {key: value == "true" for key, _, value in (text.partition("=") for text in changes)}
        recipe, log = override.change(plan.recipe, values)
        width = mean if recipe.data.packing else sample_width(recipe, engine) or seq
        case = plan.case.rebuild(recipe)
        refused = bool(needs_equal_lengths(case)) or bool(streams_unknown_lengths(case))
        if padded < WORTH_IT * width or not log or refused or not bool(rules.legal(case)):
            continue
        changed = {change.key for change in log}
        chosen = tuple(text for text in changes if text.partition("=")[0] in changed)
        yield Suggestion(title, chosen, _saving(recipe, lengths, padded, width, mean))


def _saving(recipe: Recipe, lengths: Any, padded: float, width: float, mean: float) -> str:
    """Return what packing or grouping saves in one pass over the data, and what else it changes."""
    before, after = len(lengths) * padded, len(lengths) * width
    times = recipe.data.packing and padded == recipe.data.seq_length  # the same width of a step
    less = f"{before / after:.1f} times less time and cost" if times else "the rest is padding"
    text = (
        f"about {_short(after)} instead of {_short(before)} tokens per epoch, {less}: "
        f"samples have {_mean(recipe, mean)}, padded to {padded:,.0f}"
    )
    if not recipe.data.packing:
        return text
    held, batch = recipe.data.seq_length / mean, recipe.train.global_batch_size
    kept = max(1, round(batch / held))
    return text + (
        f"; a packed sample holds about {held:.0f} of them: train.global_batch_size={kept} keeps the updates per epoch"
        if kept < batch
        else ""
    )


def _mean(recipe: Recipe, tokens: float) -> str:
    """Return the tokens of a sample on average, and how they were counted."""
    name = _tokenized_with(recipe)
    how = f"counted with {name}" if name else f"at {bytes_per_token(recipe):g} bytes each"
    return f"about {tokens:,.0f} tokens ({how})"


def _count(recipe: Recipe, engine: Engine = OUR_ENGINE) -> _Counted | None:
    """Return the samples of a local file or folder; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if data.blend or file_access.closed():
        return None
    if not path.exists():
        return _count_of_several(recipe, engine)
    sizes = _sizes(path)
    kept = 1 - data.validation_part
    lengths, name = own_lengths(recipe), _tokenized_with(recipe)
    if recipe.goal == "pretrain" or (data.packing and lengths is None):
        tokens = kept * sum(sizes) / bytes_per_token(recipe)
        samples = max(ceil(tokens / data.seq_length), 1)
        return _Counted(samples, f"about {_packed(samples)}, at {bytes_per_token(recipe):g} bytes per token", tokens)
    if data.packing and lengths is not None:
        from meshwright.engine.data.packing import pack

        used = lengths if name else _part(lengths, kept)
        samples = len(pack(np.ceil(used).astype(np.int64), data.seq_length + 1))
        how = f"{_packed(samples)}, counted with {name}" if name else _estimated(recipe, samples)
        return _Counted(samples, how, float(used.sum()))
    countable = lengths is None and sum(sizes) <= MAX_COUNTED_BYTES
    rows = _rows_of(path, data.split, _row_count) if countable else None if lengths is None else len(lengths)
    if not rows:
        return None
    samples = rows if name else max(round(kept * rows), 1)
    shown = f"{samples:,} sample{'s' * (samples != 1)}"
    if lengths is None:
        return _Counted(samples, f"{shown} of at most {data.seq_length:,} tokens")
    mean = float(np.minimum(lengths, data.seq_length).mean())
    width = sample_width(recipe, engine)
    how = f"padded to {data.seq_length:,}"
    if width and padding_of(recipe, engine).to == "micro_batch":
        how = f"padded to the longest of a micro batch, {width:,.0f} on average"
        if recipe.layout.micro_batch_size == 1:
            how = "not padded in micro batches of one sample"
    elif width:
        how = f"in steps of {width:,.0f} on average"
    return _Counted(samples, f"{shown} of about {mean:,.0f} tokens, {how}")


def _count_of_several(recipe: Recipe, engine: Engine) -> _Counted | None:
    """Return the samples of all files that a dataset lists; None if it lists none, or one is not known."""
    parts = several_files(recipe.data.dataset)
    counts = [_count(_trained_on(recipe, part), engine) for part in parts]
    known = [one for one in counts if one is not None]
    if not known or len(known) < len(counts):
        return None
    samples = sum(one.samples for one in known)
    shown = f"about {_packed(samples)}" if recipe.data.packing else plural(samples, "sample")
    return _Counted(samples, f"{shown} of {len(parts)} files", sum(one.packed_tokens for one in known))


def _packed(samples: int) -> str:
    return f"{samples:,} packed sample{'s' * (samples != 1)}"


def _estimated(recipe: Recipe, samples: int) -> str:
    """Return a number of packed samples that was counted without the tokenizer, in words."""
    text = f"about {_packed(samples)}, at {bytes_per_token(recipe):g} bytes per token"
    lengths, most = _untruncated(recipe), recipe.data.seq_length
    longer = 0 if lengths is None else int((lengths > most + 1).sum())
    if not longer:
        return text
    return (
        f"{text}, {plural(longer, 'row')} longer than data.seq_length={most} {_CUT.get(recipe.data.truncation, 'cut')}"
    )


_CUT = {"drop": "dropped"}


def _part(lengths: Any, share: float) -> Any:
    """Return a share of the samples, drawn at random."""
    if share == 1:
        return lengths
    return np.random.default_rng(0).permutation(lengths)[: max(round(share * len(lengths)), 1)]


def _sizes(path: Path) -> list[int]:
    return [one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()]


def own_lengths(recipe: Recipe) -> Any | None:
    """Return the tokens of every fine-tuning sample of a local dataset, truncated; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if recipe.goal == "pretrain" or data.images or data.blend or file_access.closed() or not path.exists():
        return None
    if not 0 < sum(_sizes(path)) <= MAX_COUNTED_BYTES:
        return None
    counted = _token_lengths(recipe)
    if counted is not None:
        return counted
    lengths, most = _untruncated(recipe), data.seq_length + 1
    if lengths is None:
        return None
    fitting = lengths[lengths <= most] if data.truncation == "drop" else np.minimum(lengths, most)
    return fitting if len(fitting) else None


def _untruncated(recipe: Recipe) -> Any | None:
    """Return the tokens of every row by its bytes, however long; None if the rows are not known."""
    path = Path(recipe.data.dataset).expanduser()
    found = _lengths(str(path), recipe.data.split, sum(_sizes(path)), path.stat().st_mtime_ns)
    return None if found is None else np.maximum(found / bytes_per_token(recipe), 1.0)


def _tokenized_with(recipe: Recipe) -> str:
    """Return the tokenizer that own_lengths counts with; empty if it estimates."""
    return _local_tokenizer(recipe) if _token_lengths(recipe) is not None else ""


def _local_tokenizer(recipe: Recipe) -> str:
    """Return the name of a recipe's tokenizer if it is on this machine and can be loaded; else empty."""
    if recipe.data.streaming or any(map(extras.missing, ("transformers", "jinja2"))):
        return ""
    from meshwright.engine.data.tokenizers import local_folder, tokenizer_name

    try:
        name = tokenizer_name(recipe) or ""
    except InputError:
        return ""
    return name if name and local_folder(name) is not None else ""


def _token_lengths(recipe: Recipe) -> Any | None:
    """Return the tokens of the samples as train makes them; None without a tokenizer, or if train refuses the rows."""
    data, path = recipe.data, Path(recipe.data.dataset).expanduser()
    if recipe.goal == "pretrain" or data.images or data.blend or file_access.closed() or not path.exists():
        return None
    name = _local_tokenizer(recipe)
    if not name:
        return None
    sizes = _sizes(path)
    counted = msgspec.structs.replace(data, tokenizer=name, workers=1)
    return _tokenize(msgspec.json.encode(counted), sum(sizes), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _tokenize(data: bytes, size: int, changed: int) -> Any | None:
    """Return the tokens of the samples of a dataset; small ones are tokenized now, and cached for train."""
    del changed  # part of the cache key
    from meshwright.engine.data.rendered import training_lengths

    recipe = Recipe(name="", model="", goal="sft", cluster="", data=msgspec.json.decode(data, type=Data))
    try:
        with no_notes():
            found = training_lengths(recipe, build=size <= MAX_TOKENIZED_BYTES)
    except InputError:  # data_findings has what is wrong with rows and tokenizers
        return None
    return found if found is not None and len(found) else None


@lru_cache(maxsize=8)
def _lengths(path: str, split: str, size: int, changed: int) -> Any | None:
    """Return the bytes of every row; lines of JSON are measured without being parsed."""
    del changed  # part of the cache key
    if path.endswith((".jsonl", ".ndjson")):
        ends = np.flatnonzero(np.frombuffer(Path(path).read_bytes(), dtype=np.uint8) == ord("\n"))
        lengths = np.diff(np.concatenate([[-1], ends, [] if len(ends) and ends[-1] == size - 1 else [size]]))
        first, end = _slice(split)
        lengths = lengths[lengths > len("{}")][first:end]
    else:
        rows = _rows_of(Path(path), split, lambda found: [row for _, row in found])
        if rows is None:
            return None
        lengths = np.array([len(msgspec.json.encode(row, enc_hook=str)) for row in rows], dtype=float)
    return lengths if len(lengths) else None


def _slice(split: str) -> tuple[int, int | None]:
    """Return the rows of a split such as train[:100]; all of them if it has no valid slice."""
    from meshwright.engine.data.files import split_and_rows

    try:
        return split_and_rows(split)[1]
    except InputError:
        return 0, None


def _rows_of(path: Path, split: str, read: Callable[[Any], T]) -> T | None:
    """Return what `read` makes of a dataset's rows; None if they cannot be read, which train reports."""
    from meshwright.engine.data.files import find_rows  # 30 ms that answers without a dataset save

    try:
        return read(find_rows(path, split))
    except InputError:
        return None


def _row_count(rows: Any) -> int:
    found: int | None = rows.count()
    return sum(1 for _ in rows) if found is None else found
