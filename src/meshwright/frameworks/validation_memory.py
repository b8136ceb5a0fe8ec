"""The memory of the Trainer's validation, whose batch is not that of training and whose logits no fused loss avoids."""

from __future__ import annotations

from meshwright import costs
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.trainer_fields import EVALUATIONS, LOADED_BY_UNSLOTH
from meshwright.frameworks.types import ProgramArguments

BATCH, DEFAULT = "per_device_eval_batch_size", 8
NEVER = ("no", "none", "false")
BYTES = 2 + 4  # of a logit: in the format of the computation, and in fp32 for the loss
BYTES_AT_PEAK = BYTES + 4  # and the log probabilities: what a fix has room for
GIB = 2**30


def _batch(ctx: RuleContext) -> int:
    """Return the samples that a GPU validates at a time; 0 if it is not known, or nothing is validated."""
    given = ctx.parsed.program.given
    when = next((given[name] for name in EVALUATIONS if name in given), None)
    if when is None or when.unresolved or str(when.value).lower() in NEVER or LOADED_BY_UNSLOTH in given:
        return 0
    stated = given.get(BATCH)
    found = DEFAULT if stated is None else stated.value
    return 0 if (stated is not None and stated.unresolved) or not isinstance(found, int) else found


def _validation_does_not_fit(ctx: RuleContext) -> Problem | None:
    batch, case = _batch(ctx), ctx.case
    if not batch or case is None or ctx.cluster is None or batch <= int(case.micro_batch_size):
        return None
    if int(case.tp) * int(case.cp) * int(case.pp) != 1:  # a rank has a part of the logits, or none
        return None
    memory, length, vocab = costs.estimate(case).memory, int(case.seq_length), case.model.vocab
    if not bool(memory.fits):
        return None
    kept = float(memory.weights + memory.optimizer + memory.overhead)
    sample = length * vocab * BYTES / GIB
    capacity = float(memory.capacity)
    if kept + batch * sample <= capacity:
        return None
    smaller = 1 << (max(int((capacity - kept) / (length * vocab * BYTES_AT_PEAK / GIB)), 1).bit_length() - 1)
    assumed = "" if BATCH in ctx.parsed.program.given else " (its default)"
    message = (
        f"validation takes {batch} samples of up to {length:,} tokens at a time{assumed}: their logits alone need "
        f"{batch * sample:.1f} GiB beside {kept:.1f} GiB of weights, optimizer and CUDA context, of {capacity:.1f} GiB"
    )
    return Problem(message, (_written(ctx.parsed.program, smaller),), key=BATCH)


def _written(program: ProgramArguments, batch: int) -> str:
    """Return the smaller batch as a program, a command or a YAML file of a front end has it."""
    if program.is_command:
        return f"--{BATCH} {batch}"
    return f"{BATCH}: {batch}" if program.is_front_end else f"{BATCH}={batch}"


def validation_memory_rule(framework: str) -> FrameworkRule:
    """Return the rule of a framework that validates with the Trainer's defaults."""
    return FrameworkRule(
        f"{framework}.validation-memory",
        "warning",
        (BATCH, *EVALUATIONS),
        _validation_does_not_fit,
        symptom="CUDA out of memory in evaluation_loop, after training steps that fit",
        cause="the Trainer validates with a batch of its own, and computes all logits there, also with a fused loss",
    )
