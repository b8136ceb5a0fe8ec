"""Every number that decides whether something is a finding, each with its reason, in one table."""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """A number and why it is that one."""

    value: float
    unit: str
    why: str


TABLE: dict[str, Threshold] = {
    # Which steps are looked at
    "warm_up_slower": Threshold(1.5, "×", "a first step that compiles or fills caches takes a multiple of the others"),
    "warm_up_most": Threshold(10, "lines", "warm-up that lasts longer is how the run is, not how it begins"),
    "enough_steps": Threshold(5, "lines", "a median of fewer says little"),
    "enough_for_trends": Threshold(20, "lines", "five sections of four lines each, the least that shows a direction"),
    # Speed
    "slower_than_estimate": Threshold(
        15, "%", "half of the estimate's own errors are smaller; its band holds if wider"
    ),
    "data_share": Threshold(5, "%", "prefetched data costs the step nothing; a few per cent are the first batches"),
    "network_share": Threshold(10, "%", "collectives that hide behind compute leave less than that"),
    "network_times": Threshold(2, "×", "links at half the speed of the estimate's are misconfigured, not busy"),
    "network_share_alone": Threshold(25, "%", "without an estimate, what no usual layout spends"),
    "scaling_loss": Threshold(15, "%", "tokens/s/GPU lost to more nodes beyond what the estimate says of both runs"),
    "bubble_share": Threshold(10, "%", "below it, other layouts win less than their own costs"),
    "worth_trying": Threshold(3, "%", "less is within the noise of two runs"),
    "slow_step": Threshold(1.5, "×", "steps of one shape differ by a few per cent"),
    "slow_steps": Threshold(3, "lines", "one or two slow steps are accidents, which no search will find again"),
    "slow_steps_time": Threshold(5, "%", "of all time lost to slow steps; less is not worth a search"),
    "spread": Threshold(10, "%", "median deviation of step times; healthy runs lie below 3"),
    "slowdown": Threshold(15, "%", "from the first to the last fifth of a run; heat and fragments cost less"),
    "ranks_apart": Threshold(1.3, "×", "ranks with equal work differ by a few per cent"),
    # Memory
    "leak_gib": Threshold(0.5, "GiB", "caches and longer samples settle within less"),
    "leak_share": Threshold(2, "%", "of the memory held, for small models"),
    "retries": Threshold(1, "", "each empties the allocator's cache and stops the GPU; a run that fits needs none"),
    "fragments": Threshold(3, "%", "of the GPU held in pieces that nothing fits in; allocators lose 2 or 3 as a rule"),
    # Loss
    "spike_sigmas": Threshold(
        8, "σ", "noise of the loss around its running median; chance alone reaches 5 in a million"
    ),
    "spike_share": Threshold(10, "%", "above the running median; smaller bumps heal unseen"),
    "diverging_share": Threshold(10, "%", "of the run's best loss, at its end; what comes back is a spike"),
    "flat_drop": Threshold(1, "%", "a training that learns loses this of its first loss within its first steps"),
    "flat_steps": Threshold(100, "steps", "the least that a training is given to show that it learns"),
    "growing_gradients": Threshold(5, "×", "gradient norm of the last tenth over the median; it falls as a rule"),
    "scale_floor": Threshold(64, "", "fp16 loss scales settle between 2^10 and 2^17; below, gradients are not numbers"),
    "skipped_share": Threshold(2, "%", "a loss scale that has settled skips one step in a thousand"),
    # The run
    "checkpoint_share": Threshold(5, "%", "of all time waited for checkpoints; asynchronous ones cost under one"),
    "lost_share": Threshold(2, "%", "of all steps computed twice after restarts"),
    "restarts": Threshold(3, "", "once or twice is a machine; three times is the run"),
}


def limit(name: str) -> float:
    """The number of that name."""
    return TABLE[name].value


def share(name: str) -> float:
    """A percentage as a share."""
    return TABLE[name].value / 100
