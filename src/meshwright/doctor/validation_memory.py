"""What to try if memory runs out while a run validates: its batches are not those of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.doctor import remedies
from meshwright.doctor.finding import Remedy
from meshwright.doctor.run import Fault, Run

TRAINER, TRAINER_BATCH = "transformers", "per_device_eval_batch_size"
BATCHES: Mapping[str, str] = {TRAINER: f"{TRAINER_BATCH}=1", "axolotl": "eval_batch_size: 1",
    "torchtitan": "validation.local_batch_size=1"}  # fmt: skip
"""Front ends and kinds of logs -> their smallest batch for validation."""
COLLECTED = "eval_accumulation_steps=8"


def reason(run: Run, fault: Fault) -> str:
    """Return that training steps fit, and which batch did not."""
    fits = ", and the training steps before it fit" if fault.step else ""
    batch = f": the Trainer's {TRAINER_BATCH} is 8 unless it is set" if run.kind == TRAINER else ""
    return (
        f"The allocation failed in validation, not in a training step{fits}. Validation has a batch of its own{batch}"
    )


def validation_remedies(run: Run) -> Iterator[Remedy]:
    """Yield a smaller batch for validation, and what else a validation of the Trainer keeps on the GPU."""
    batch = BATCHES.get(run.header.front_end) or BATCHES.get(run.kind) or "a smaller batch for validation"
    yield remedies.advice(batch, why="fewer samples at a time; the validation loss is the same")
    if run.kind == TRAINER:
        yield remedies.advice(COLLECTED, why="moves the logits for compute_metrics to host memory every 8 batches; "
            "without compute_metrics none are kept")  # fmt: skip
