"""What the epochs of another trainer's file are on the user's data: steps, and intervals that they do not reach."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

from meshwright.api.dataset_length import epochs_of
from meshwright.api.sample_lengths import own_lengths
from meshwright.display import plural
from meshwright.frameworks import Settings
from meshwright.recipes.padding import padding_of
from meshwright.recipes.types import Engine, Recipe
from meshwright.rules.repeated_data import MANY_PASSES, USUAL_EPOCHS

FIRST_ROWS = "max_samples"
HELD_OUT = ("val_size", "val_set_size", "split_dataset_ratio")
"""Keys of front ends that hold rows out: a share below 1, else their number."""
PATIENCE = ("early_stopping_patience", "early_stopping_steps", "early_stop_interval")
"""Keys of front ends: evaluations without a better one after which a training ends."""
TRAINER_ENGINES = ("fsdp1", "deepspeed")  # of transformers' Trainer, whose epochs have whole steps
SHORT_ROWS = 2  # times shorter than seq_length from which the longest row is reported


def length_notes(recipe: Recipe, engine: Engine, settings: Settings, text: str) -> Iterator[str]:
    """Yield the steps that the epochs of a framework's file have on the user's data, and how long its rows are.

    `text` is that of the file: the settings of a Python program are only there.
    """
    epochs, batch = epochs_of(recipe, engine), recipe.train.global_batch_size
    if epochs is None:
        return
    passes = recipe.train.epochs
    keys = [key for key in (FIRST_ROWS, *HELD_OUT) if key in settings]
    all_rows = _rows_of_file(recipe) if epochs.packed_tokens else round(epochs.samples / passes)
    rows = _rows_kept(all_rows, settings, keys) if all_rows else None
    each = Fraction(epochs.samples) / Fraction(passes) * Fraction(rows or 1, all_rows if rows and all_rows else 1)
    by_trainer = engine in TRAINER_ENGINES
    steps = ceil((ceil(each / batch) if by_trainer else each / batch) * Fraction(passes))
    listed = ", ".join(keys)
    unit = "row" if epochs.packed_tokens else "sample"
    left = f" ({listed} leave{'s' * (len(keys) == 1)} {plural(rows, unit)})" if keys and rows is not None else ""
    open_keys = f" (fewer with {listed})" if keys and rows is None else ""
    length = f"{'at most ' * bool(open_keys)}{plural(steps, 'step')} of {plural(batch, 'sample')}{open_keys}"
    many = f"; more than {MANY_PASSES} epochs mostly memorize the data, {USUAL_EPOCHS} are usual"
    yield f"{epochs.source}{left}: {length}{many * (passes > MANY_PASSES)}{_unreached(recipe, steps, settings, text)}"
    yield from _short_rows(recipe, engine)


def _rows_kept(rows: int, settings: Settings, keys: list[str]) -> int | None:
    """Return the rows that a file trains on; None if a key of it is known only at run time."""
    for key in keys:
        value = settings[key].value
        if settings[key].unresolved or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if key == FIRST_ROWS:
            rows = min(rows, int(value))
        else:
            rows -= ceil(value * rows) if value < 1 else int(value)
    return max(rows, 1)


def _rows_of_file(recipe: Recipe) -> int:
    """Return the rows of a file whose samples are packed; 0 if they are not known."""
    lengths = own_lengths(recipe)
    return 0 if lengths is None else len(lengths)


def _unreached(recipe: Recipe, steps: int, settings: Settings, text: str) -> str:
    """Return the intervals and the patience that a file of transformers' Trainer states and the run does not reach."""
    every = {
        key: _number(settings, key) or (own if key in text else 0)
        for key, own in (("eval_steps", recipe.train.eval_every), ("save_steps", recipe.checkpoint.save_every))
    }
    long = [key for key, value in every.items() if value > steps]
    keys = " and ".join(f"{key}={every[key]:g}" for key in long)
    done = " or ".join({"eval_steps": "validated", "save_steps": "saved"}[key] for key in long)
    unreached = f"; {keys} {'is' if len(long) == 1 else 'are'} never reached: nothing is {done} before the end"
    patience = next((key for key in PATIENCE if _number(settings, key)), "")
    between = every["eval_steps"] * (steps if every["eval_steps"] < 1 else 1)
    times = int(steps / between) if between else 0
    if not patience or not times or times > _number(settings, patience):
        return unreached * bool(long)
    count = f"{_number(settings, patience):g} later ones, but there {'is' if times == 1 else 'are'} {times} in all"
    return f"{unreached * bool(long)}; {patience} compares an evaluation with {count}: it never stops the run"


def _number(settings: Settings, key: str) -> float:
    """Return a number that a file states; 0 if it states none."""
    setting = settings.get(key)
    is_number = setting is not None and not setting.unresolved and not isinstance(setting.value, bool)
    try:
        return float(setting.value) if setting is not None and is_number else 0.0
    except (TypeError, ValueError):
        return 0.0


def _short_rows(recipe: Recipe, engine: Engine) -> Iterator[str]:
    lengths, seq = own_lengths(recipe), recipe.data.seq_length
    if lengths is None or padding_of(recipe, engine).to != "micro_batch":
        return
    longest = ceil(lengths.max())
    if longest * SHORT_ROWS <= seq:
        yield (
            f"the longest row of {recipe.data.dataset} has about {plural(longest, 'token')}, and a batch is padded to "
            f"its longest row: memory and time are those of {seq:,} tokens, which no batch has; "
            f"data.seq_length={1 << (longest - 1).bit_length()} estimates this data"
        )
