"""What the epochs of another trainer's file are on the user's data: steps, and intervals that they do not reach."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import ceil

from meshwright.api.dataset_length import MANY_PASSES, USUAL_EPOCHS, epochs_of, own_lengths
from meshwright.display import plural
from meshwright.frameworks import Settings
from meshwright.recipes.padding import padding_of
from meshwright.recipes.types import Engine, Recipe

FIRST_ROWS = "max_samples"
HELD_OUT = ("val_size", "val_set_size", "split_dataset_ratio")
"""Keys of front ends that hold rows out: a share below 1, else their number."""
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
    rows = None if epochs.packed_tokens else _rows_kept(round(epochs.samples / passes), settings, keys)
    each = Fraction(epochs.samples) / Fraction(passes) if rows is None else Fraction(rows)
    by_trainer = engine in TRAINER_ENGINES
    steps = ceil((ceil(each / batch) if by_trainer else each / batch) * Fraction(passes))
    listed = ", ".join(keys)
    left = f" ({listed} leave{'s' * (len(keys) == 1)} {plural(rows, 'sample')})" if keys and rows is not None else ""
    open_keys = f" (fewer with {listed})" if keys and rows is None else ""
    length = f"{'at most ' * bool(open_keys)}{plural(steps, 'step')} of {plural(batch, 'sample')}{open_keys}"
    many = f"; more than {MANY_PASSES} epochs mostly memorize the data, {USUAL_EPOCHS} are usual"
    yield f"{epochs.source}{left}: {length}{many * (passes > MANY_PASSES)}{_unreached(recipe, steps, text)}"
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


def _unreached(recipe: Recipe, steps: int, text: str) -> str:
    """Return the intervals that a file of transformers' Trainer states and that are longer than the run."""
    every = {"eval_steps": recipe.train.eval_every, "save_steps": recipe.checkpoint.save_every}
    long = [key for key, value in every.items() if key in text and value > steps]
    if not long:
        return ""
    keys = " and ".join(f"{key}={every[key]}" for key in long)
    done = " or ".join({"eval_steps": "validated", "save_steps": "saved"}[key] for key in long)
    return f"; {keys} {'is' if len(long) == 1 else 'are'} never reached: nothing is {done} before the end"


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
