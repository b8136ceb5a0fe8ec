"""Validation during training: its data, when it is due, the best loss so far and early stopping."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.display import plural
from meshwright.engine.metrics.jsonl import log, warn
from meshwright.engine.metrics.record import ValidationRecord, perplexity

if TYPE_CHECKING:
    from meshwright.engine.trainer import StepCallbacks, Trainer
    from meshwright.recipes.types import Recipe


class ValidationState(msgspec.Struct, frozen=True):
    """What validation remembers; part of every checkpoint."""

    dataset: str = ""  # losses are compared only if data and number of samples are the same
    samples: int = 0
    records: list[ValidationRecord] = []
    best_step: int | None = None
    best_loss: float | None = None
    reference_loss: float | None = None  # of early stopping: lowered only by more than train.early_stop_delta
    reference_step: int | None = None
    waited: int = 0  # validations since the reference

    def after(self, record: ValidationRecord, delta: float) -> ValidationState:
        """Return the state after a validation; only a decrease by more than `delta` resets the wait."""
        finite = math.isfinite(record.loss)
        lower = finite and (self.best_loss is None or record.loss < self.best_loss)
        enough = finite and (self.reference_loss is None or record.loss < self.reference_loss - delta)
        return msgspec.structs.replace(
            self,
            records=[*self.records, msgspec.structs.replace(record, best=lower)],
            best_step=record.step if lower else self.best_step,
            best_loss=record.loss if lower else self.best_loss,
            reference_loss=record.loss if enough else self.reference_loss,
            reference_step=record.step if enough else self.reference_step,
            waited=0 if enough else self.waited + 1,
        )


class Validation:
    """Validates a run; without train.eval_every, never."""

    def __init__(self, recipe: Recipe, trainer: Trainer, first: bool) -> None:
        """Open the held-out data, so that an error is reported before training; rank 0 (`first`) logs what is used."""
        self.recipe, self.trainer, self.first = recipe, trainer, first
        self.state = ValidationState()
        self.source: Any = None
        self.name = ""
        if recipe.train.eval_every:
            self._open()
        elif first:
            self._log_unused()

    def _open(self) -> None:
        from meshwright.engine.data.finite import whole_set
        from meshwright.engine.data.held_out import held_out_set
        from meshwright.engine.model_families import family_of

        recipe, train = self.recipe, self.recipe.train
        opened = family_of(recipe).open_source(recipe, self.trainer.config, True, self.trainer.weights)
        batch, cuts = train.global_batch_size, not recipe.kernels.compile
        self.source, total = whole_set(opened, batch, train.eval_steps, cuts)
        self.name = str(held_out_set(recipe) or recipe.data.dataset)
        self.state = ValidationState(dataset=self.name, samples=self.source.size)
        if self.first:
            every = "step" if train.eval_every == 1 else f"{train.eval_every} steps and after the last"
            log(f"validation: {self._described(total)}, every {every}")

    def _described(self, total: int | None) -> str:
        used, batch = self.source.size, self.recipe.train.global_batch_size
        if total is None or total <= used:
            return f"{plural(used, 'sample')} of {self.name}"
        if self.source.in_order:  # a stream that was not read to its end
            return f"the first {plural(used, 'sample')} of {self.name}"
        uses_all = f"train.eval_steps={-(-total // batch)} uses all"
        return f"the first {used:,} of {total:,} samples of {self.name} ({uses_all})"

    def _log_unused(self) -> None:
        data = self.recipe.data
        field = "data.validation" if data.validation else "data.validation_part"
        if data.validation or data.validation_part:
            value = data.validation or data.validation_part
            log(f"validation: {field}={value} is not used while training; train.eval_every=N validates every N steps")

    def due(self, step: int) -> bool:
        """Return whether to validate after this many steps."""
        train = self.recipe.train
        done = bool(self.state.records) and self.state.records[-1].step >= step
        return bool(train.eval_every) and not done and (step % train.eval_every == 0 or step == train.steps)

    def restore(self, saved: ValidationState, data_changed: bool = False, same_data: bool = False) -> None:
        """Continue from a checkpoint; with other validation data, the best loss starts anew.

        With `same_data`, the contents are known to be equal: the files may have been copied or renamed.
        """
        data = self.recipe.data
        if not self.recipe.train.eval_every:
            self.state = saved
        elif saved.records and data_changed and data.validation_part and not data.validation:
            self.state = msgspec.structs.replace(self.state, records=saved.records)
            if self.first:
                warn(
                    f"validation: the data changed, so {self.name} are other samples now, some of which were trained "
                    "on: the best loss starts anew; data.validation=FILE keeps the samples"
                )
        elif not saved.records or (saved.samples == self.source.size and self._is_same_set(saved.dataset, same_data)):
            self.state = msgspec.structs.replace(saved, dataset=self.name, samples=self.source.size)
        else:
            self.state = msgspec.structs.replace(self.state, records=saved.records)
            if self.first:
                was, now = (
                    f"{plural(saved.samples, 'sample')} of {saved.dataset}",
                    f"{self.source.size:,} of {self.name}",
                )
                warn(f"validation used {was} before and uses {now} now: the best loss starts anew")

    def _is_same_set(self, saved: str, same_data: bool) -> bool:
        """Return whether a saved name means today's samples: an equal name, or the same part of copied files."""
        from meshwright.engine.data.held_out import part_of

        return saved == self.name or (same_data and part_of(saved) == part_of(self.name))

    def run(self, step: int, watch: StepCallbacks) -> ValidationRecord | None:
        """Validate after a step; None after a stop request."""
        from meshwright.engine.diffusion.config import is_diffusion

        start = time.perf_counter()
        steps = -(-self.source.size // self.recipe.train.global_batch_size)
        found = self.trainer.measure(self.source, steps, watch)
        if found is None:
            return None
        record = ValidationRecord(
            step=step,
            loss=found.loss,
            perplexity=None if is_diffusion(self.recipe) else perplexity(found.loss),
            tokens=found.tokens,
            samples=found.samples,
            seconds=time.perf_counter() - start,
            best=False,
        )
        self.state = self.state.after(record, self.recipe.train.early_stop_delta)
        return self.state.records[-1]

    @property
    def exhausted(self) -> bool:
        """Whether the loss has not decreased for train.early_stop_patience validations."""
        train = self.recipe.train
        return bool(train.eval_every and train.early_stop_patience) and self.state.waited >= train.early_stop_patience

    def why_stopped(self) -> str:
        """Describe an early stop."""
        state, delta = self.state, self.recipe.train.early_stop_delta
        loss = math.nan if state.reference_loss is None else state.reference_loss
        enough = f"lower by more than {delta:g}" if delta else "lower"
        return (
            f"stopped early: no validation loss {enough} in {plural(state.waited, 'validation')} since step "
            f"{state.reference_step} (loss {loss:.4f}); "
            f"train.early_stop_patience={state.waited + self.recipe.train.early_stop_patience} or 0 continues"
        )
