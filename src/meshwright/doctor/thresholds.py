"""Every threshold that decides whether something is a finding, with its reason."""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """A value and the reason for it."""

    value: float
    unit: str
    why: str


TABLE: dict[str, Threshold] = {
    # Which steps count
    "warm_up_slower": Threshold(1.5, "×", "a first step that compiles or fills caches takes a multiple of the others"),
    "warm_up_most": Threshold(10, "lines", "a longer slow phase is not warm-up"),
    "enough_steps": Threshold(5, "lines", "a median of fewer lines is unreliable"),
    "enough_for_trends": Threshold(20, "lines", "five sections of four lines each, the minimum for a trend"),
    "after_warmup": Threshold(2, "×", "of a longer warm-up: with it, later trouble has the same learning rate"),
    # Speed
    "slower_than_estimate": Threshold(
        15, "%", "half of the estimate's own errors are smaller; its error band applies if wider"
    ),
    "data_share": Threshold(5, "%", "prefetched data costs no step time; the first batches cost a few per cent"),
    "network_share": Threshold(10, "%", "overlapped collectives expose less than that"),
    "network_times": Threshold(2, "×", "links at half the estimated speed are misconfigured, not busy"),
    "network_share_alone": Threshold(25, "%", "without an estimate: more than any usual layout spends"),
    "scaling_loss": Threshold(15, "%", "tokens/s/GPU lost to more nodes beyond what is estimated for both runs"),
    "bubble_share": Threshold(10, "%", "below it, other layouts gain less than they cost"),
    "worth_trying": Threshold(3, "%", "smaller gains are within the noise between two runs"),
    "slow_step": Threshold(1.5, "×", "steps of equal shape differ by a few per cent"),
    "slow_steps": Threshold(3, "lines", "one or two slow steps are not reproducible"),
    "slow_steps_time": Threshold(5, "%", "of the run time lost to slow steps; less is not worth investigating"),
    "spread": Threshold(10, "%", "median deviation of step times; healthy runs are below 3"),
    "slowdown": Threshold(15, "%", "gradually, from the start to the end; heat and fragmentation cost less"),
    "shift": Threshold(10, "%", "from one level to the next; levels of a healthy run differ by a few per cent"),
    "slowdown_s": Threshold(60, "s", "lost in all; on a CPU, and with short steps, other processes take that much"),
    "shift_s": Threshold(0.05, "s", "by which a step takes longer on GPUs, unless slowdown_s is lost; less is jitter"),
    "shift_lines": Threshold(8, "lines", "a shorter slow phase is a pause; its median is unreliable"),
    "better_layout": Threshold(
        20, "%", "of a step that another layout saves; smaller gains are within the estimates' errors"
    ),
    "recompiles": Threshold(3, "", "after the first steps; one or two come with a last batch or an evaluation"),
    "ranks_apart": Threshold(1.3, "×", "ranks with equal work differ by a few per cent"),
    "slow_rank": Threshold(1.07, "×", "the usual time of ranks with equal work; GPUs of a healthy run differ less"),
    "enough_ranks": Threshold(4, "ranks", "with equal work; the usual time of fewer is unknown"),
    # Memory
    "leak_gib": Threshold(0.5, "GiB", "caches and longer samples settle within less"),
    "leak_share": Threshold(2, "%", "of the memory in use, for small models"),
    "memory_jump": Threshold(10, "%", "from one level to the next; a first evaluation or checkpoint adds less"),
    "retries": Threshold(1, "", "each flushes the allocator's cache and stalls the GPU; a run that fits has none"),
    "fragments": Threshold(3, "%", "of the GPU lost to fragmentation; allocators usually lose 2 or 3"),
    # Loss
    "spike_sigmas": Threshold(
        8, "σ", "noise of the loss above the level just before; random noise reaches 5 once in a million"
    ),
    "spike_share": Threshold(10, "%", "above the level just before; smaller bumps are harmless"),
    "diverging_share": Threshold(10, "%", "above the run's best loss, at its end; a loss that recovers is a spike"),
    "far_above_usual": Threshold(4, "×", "the usual rate: half of it, the first remedy otherwise, is still too high"),
    "climb_factor": Threshold(2, "×", "the run's lowest loss, after a climb without a break in a log of few lines"),
    "climb_lines": Threshold(2, "lines", "one above the other: a single high one may be a hard batch"),
    "plateau": Threshold(
        20, "%", "a loss that varies by less of its rise, with gradients that small against those before, stays there"
    ),
    "diverged_share": Threshold(25, "%", "above the first loss; warm-up and new data raise it by less"),
    "diverged_sigmas": Threshold(4, "σ", "of the noise that one low first loss may be off by"),
    "diverged_lines": Threshold(5, "lines", "without a break above the first loss; a bump is shorter"),
    "diverged_part": Threshold(10, "%", "of the run's lines; in a long run, less is a spike"),
    "flat_drop": Threshold(1, "%", "a training that learns reduces its first loss by this within its first steps"),
    "trained_start": Threshold(
        40, "%", "a pretraining that starts below this share of ln(vocabulary) continues from trained weights"
    ),
    "flat_steps": Threshold(100, "steps", "the minimum before a training is expected to learn"),
    "flat_epochs": Threshold(
        0.5, "epochs", "the minimum of a shorter log, whose lines cover several steps or the whole of a small dataset"
    ),
    "tiny_rate": Threshold(100, "×", "below the usual learning rate; published runs stay within ten of it"),
    "small_rate": Threshold(10, "×", "below the usual learning rate, of a loss that does not move: the likely cause"),
    "flat_validation": Threshold(0.2, "%", "over three validations; even a slow training moves them by more"),
    "unmoved_sigmas": Threshold(3, "σ", "of the noise of a median of lines, within which a loss has not moved"),
    "above_guessing": Threshold(5, "%", "above ln(vocabulary); random weights start within a few per cent of it"),
    "random_start": Threshold(
        80, "%", "of ln(vocabulary); trained weights start a fine-tuning at less than half of it"
    ),
    "epoch_drop": Threshold(15, "%", "of the loss from one epoch to the next; varied data costs a few per cent"),
    "epoch_sigmas": Threshold(8, "σ", "of the noise of a median of lines on either side of the edge"),
    "no_warmup": Threshold(90, "%", "of the peak learning rate in the first line; a warm-up starts far below"),
    "early_share": Threshold(15, "%", "of the run, within which a missing warm-up shows"),
    "validations": Threshold(3, "", "two show a difference, not a trend; three epochs are usual in fine-tuning"),
    "overfitting": Threshold(3, "%", "above the best validation loss; on other samples it varies by less"),
    "overfitting_sigmas": Threshold(4, "σ", "of the noise between validations, if there are enough to know it"),
    "growing_gradients": Threshold(5, "×", "gradient norm of the last tenth over the median; it usually falls"),
    "norm_jump": Threshold(5, "×", "gradient norm of one line over the median of those before; noise stays below 3"),
    "scale_floor": Threshold(64, "", "fp16 loss scales settle between 2^10 and 2^17; below, gradients overflow"),
    "skipped_share": Threshold(2, "%", "a settled loss scale skips one step in a thousand"),
    # The run
    "checkpoint_share": Threshold(5, "%", "of the run time blocked by checkpoints; asynchronous ones cost under one"),
    "lost_share": Threshold(2, "%", "of all steps repeated after restarts"),
    "restarts": Threshold(3, "", "one or two restarts can be hardware; three point to the run"),
}


def limit(name: str) -> float:
    """Return the value of a threshold."""
    return TABLE[name].value


def share(name: str) -> float:
    """Return a percentage threshold as a fraction."""
    return TABLE[name].value / 100
