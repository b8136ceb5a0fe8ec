"""Changes of the contract a user may want on other hardware; each is a new experiment and is only offered."""

from __future__ import annotations

from math import sqrt
from typing import Literal

from meshwright.planner.plan import Offer
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

LrLaw = Literal["sqrt", "linear"]


def scaled_lr(lr: float, old_batch: int, new_batch: int, law: LrLaw = "sqrt") -> float:
    """The learning rate for another batch size: by the square root of the ratio (Adam) or linearly (SGD)."""
    ratio = new_batch / old_batch
    return float(f"{lr * (sqrt(ratio) if law == 'sqrt' else ratio):.3g}")


def scaled_batch(old_batch: int, old_dp: int, new_dp: int) -> int:
    """The global batch that keeps the number of samples per data-parallel rank."""
    return max(round(old_batch / old_dp * new_dp), 1)


def batch_for_tokens(old_batch: int, old_seq: int, new_seq: int) -> int:
    """The global batch that keeps the tokens per step when the sequence length changes."""
    return max(round(old_batch * old_seq / new_seq), 1)


def offers(base: Recipe, base_dp: int, case: Case) -> tuple[Offer, ...]:
    """What the user could change beyond the layout on this cluster."""
    return (*_batch_offers(base, base_dp, case), *_length_offers(base, case), *_fp8_offers(case))


def _whole_steps(batch: int, case: Case) -> int:
    """The batch in whole micro batches on every data-parallel rank."""
    step = int(case.micro_batch_size) * int(case.dp)
    return max(batch // step, 1) * step


def _batch_offers(base: Recipe, base_dp: int, case: Case) -> list[Offer]:
    batch = _whole_steps(scaled_batch(base.train.global_batch_size, base_dp, int(case.dp)), case)
    if batch == case.global_batch_size or int(case.dp) <= base_dp:
        return []
    lr = scaled_lr(base.optimizer.lr, base.train.global_batch_size, batch)
    linear = scaled_lr(base.optimizer.lr, base.train.global_batch_size, batch, "linear")
    per_rank = base.train.global_batch_size / base_dp
    why = (
        f"data parallelism went from {base_dp} to {int(case.dp)} ranks; a batch grown with it keeps {per_rank:g} "
        f"samples per rank and wants lr {lr:g} (sqrt law; {linear:g} by the linear one)"
    )
    return [Offer("scale the batch with the GPUs", (f"train.global_batch_size={batch}", f"optimizer.lr={lr:g}"), why)]


def _length_offers(base: Recipe, case: Case) -> list[Offer]:
    if case.seq_length == base.data.seq_length:
        return []
    batch = _whole_steps(batch_for_tokens(base.train.global_batch_size, base.data.seq_length, case.seq_length), case)
    if batch == case.global_batch_size:
        return []
    why = (
        f"samples went from {base.data.seq_length} to {case.seq_length} tokens; this batch keeps close to "
        f"{base.train.global_batch_size * base.data.seq_length:,} tokens per step"
    )
    return [Offer("keep the tokens per step", (f"train.global_batch_size={batch}",), why)]


def _fp8_offers(case: Case) -> list[Offer]:
    peaks = case.cluster.gpu.peak_tflops
    if case.matmul != "same" or "fp8" not in peaks or case.goal == "peft" or case.is_diffusion:
        return []
    kind = "mxfp8" if case.gpu_arch in ("blackwell", "rubin") else "fp8_tensor"
    ratio = peaks["fp8"] / peaks["bf16"]
    why = f"{case.gpu} has {ratio:.1f}× its bf16 peak in fp8; the trained weights differ, so compare loss curves first"
    return [Offer("compute linear layers in fp8", (f"precision.matmul={kind}",), why)]
