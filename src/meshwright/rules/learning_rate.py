"""The learning rate and its schedule."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import RANDOM_WEIGHTS
from meshwright.rules.rule import rule
from meshwright.rules.search_values import not_, one_of

FAR_TOO_HIGH = 0.02
ADAPTERS_MOST = 1e-3  # the highest usual rate of adapters
DIVERGES = 1.0
USUAL_RATES = {"pretrain": 3e-4, "sft": 1e-5, "peft": 1e-4}


def short_warmup(updates: int) -> int:
    """Return the warmup of a run that is too short for its recipe's: a tenth of it."""
    return max(updates // 10, 1) if updates > 1 else 0


LONG_RUN = 1000  # updates; of the recipes of shorter runs, trials among them, one warms up for half of the run
"""Published runs that are longer warm up for at most a fifth of them."""


def is_long_warmup(warmup: Column, updates: Column) -> Column:
    """Return whether a warmup is more than half of a run, or more than a quarter of a long one."""
    share = np.where(np.asarray(updates) >= LONG_RUN, 4, 2)
    return (warmup > 0) & (share * warmup > updates)


@rule(
    "learning_rate.warmup-too-long",
    "warning",
    "warmup_steps",
    message="warmup_steps={warmup_steps}, but training has only {steps} step{s}",
    symptom="the learning rate reaches its peak late or never and hardly decays; some engines cap the warmup",
    cause="the warmup was set for a longer run: more than half of this one, or a quarter of 1,000 steps or more",
    fixes=({"warmup_steps": lambda c: [short_warmup(int(c.updates))]},),
    values={"s": lambda c: "s" * bool(c.steps != 1)},
)
def warmup_too_long(c: Case) -> Column:
    return is_long_warmup(c.warmup_steps, c.updates)


@rule(
    "learning_rate.no-warmup",
    "advice",
    "warmup_steps",
    message="pretraining starts at the full learning rate {lr}",
    symptom="a loss spike in the first hundred steps, sometimes permanent",
    cause="the optimizer's moments are empty at the first step",
    fixes=({"warmup_steps": lambda c: [max(c.steps // 100, 1)]},),
)
def no_warmup(c: Case) -> Column:
    return (c.warmup_steps == 0) & (c.goal == "pretrain") & (c.steps >= 1000) & not_(c.benchmark)


@rule(
    "learning_rate.minimum-above-peak",
    "error",
    "min_lr",
    message="min_lr={min_lr} is above lr={lr}",
    symptom="assertion that the minimum learning rate is at most the peak",
    cause="the schedule decays from lr to min_lr",
    fixes=({"min_lr": lambda c: [float(f"{c.lr / 10:.4g}")]},),
)
def min_lr_above_peak(c: Case) -> Column:
    return c.min_lr > c.lr


@rule(
    "learning_rate.no-decay",
    "warning",
    "min_lr",
    message="the {schedule_name} schedule has no effect: min_lr={min_lr} is the peak",
    symptom="the learning rate stays at its peak after the warmup, and the final loss is higher",
    cause="the schedule decays from lr to min_lr",
    fixes=({"min_lr": lambda c: [float(f"{c.lr / 10:.4g}")]}, {"schedule_name": ["constant"]}),
)
def decay_without_range(c: Case) -> Column:
    return (c.min_lr == c.lr) & (c.schedule_name != "constant") & not_(c.benchmark)


@rule(
    "learning_rate.decay-inside-warmup",
    "error",
    "decay_steps",
    message="the decay ends at step {decay_steps}, within the {warmup_steps} warmup steps",
    symptom="assertion that the decay is longer than the warmup",
    cause="decay_steps counts from the first step and includes the warmup",
    fixes=({"decay_steps": [0]},),
)
def decay_inside_warmup(c: Case) -> Column:
    return (c.decay_steps > 0) & (c.decay_steps <= c.warmup_steps)


@rule(
    "learning_rate.decay-unfinished",
    "advice",
    "decay_steps",
    message="the decay ends at step {decay_steps}, but training ends at step {steps}",
    symptom="the final learning rate is above min_lr, so part of the final loss improvement is lost",
    cause="decay_steps was set for a longer run",
    fixes=({"decay_steps": [0]},),
)
def decay_unfinished(c: Case) -> Column:
    return (c.decay_steps > c.steps) & (c.goal == "pretrain") & not_(c.benchmark)


@rule(
    "learning_rate.decay-ends-early",
    "warning",
    "decay_steps",
    message="the decay ends at step {decay_steps} of {steps}: the rest trains with min_lr={min_lr}",
    symptom="the loss hardly improves after the decay",
    cause="decay_steps was set for a shorter run",
    fixes=({"decay_steps": [0]},),
)
def decay_ends_early(c: Case) -> Column:
    # Published runs end the decay after 60 to 90 % of the steps.
    short = (c.decay_steps > c.warmup_steps) & (5 * c.decay_steps < 3 * c.steps)
    return short & (c.schedule_name != "constant") & (c.min_lr < c.lr) & not_(c.benchmark)


@rule(
    "learning_rate.wsd-decay-too-long",
    "warning",
    "wsd_decay_steps",
    message="wsd_decay_steps={wsd_decay_steps} is longer than the run after its {warmup_steps} warmup steps",
    symptom="the learning rate has no stable phase; Megatron-LM starts the decay below the peak",
    cause="the decay was set for a longer run",
    fixes=({"wsd_decay_steps": [0]},),
)
def wsd_decay_too_long(c: Case) -> Column:
    end = np.where(np.asarray(c.decay_steps) > 0, c.decay_steps, c.steps)
    return (c.schedule_name == "wsd") & (c.warmup_steps < end) & (c.wsd_decay_steps > end - c.warmup_steps)


@rule(
    "learning_rate.adapters",
    "advice",
    "lr",
    message="lr={lr} is unusual for adapters",
    symptom="slow learning if too small, a diverging loss if too large",
    cause="adapters start at zero and use about ten times the learning rate of full fine-tuning",
    fixes=({"lr": [1e-4], "min_lr": lambda c: [min(c.min_lr, 1e-5)]},),
)
def unusual_adapter_lr(c: Case) -> Column:
    unusual = (c.lr < 2e-5) | (c.lr > ADAPTERS_MOST)
    rate = (c.goal == "peft") & unusual & (c.lr <= FAR_TOO_HIGH)
    return rate & not_(adapter_lr_too_high(c)) & not_(lr_far_too_high(c))


ADAPTERS_WARNED = 2e-3  # times a scale below 1: no published training of LoRA has more


@rule(
    "learning_rate.adapters-too-high",
    "warning",
    "lr",
    message="lr={lr} is several times the usual learning rate of adapters",
    symptom="the loss diverges or stays on a plateau after some steps",
    cause="LoRA trains with 1e-5 to 1e-3; a scale alpha / rank below 1 allows a rate larger by its inverse",
    fixes=({"lr": [1e-4], "min_lr": lambda c: [min(c.min_lr, 1e-5)]},),
)
def adapter_lr_too_high(c: Case) -> Column:
    # The scale of rsLoRA does not decrease with the rank, and other optimizers have rates of their own.
    adam = one_of(c.optimizer_name, ("adamw", "adamw8bit"))
    high = c.lr * np.minimum(c.alpha / np.maximum(c.rank, 1), 1.0) > ADAPTERS_WARNED
    usual = (c.method != "rslora") & not_(c.is_diffusion) & not_(c.benchmark)
    return (c.goal == "peft") & adam & usual & high & not_(lr_far_too_high(c))


@rule(
    "learning_rate.fine-tuning",
    "warning",
    "lr",
    message="lr={lr} is high for full fine-tuning",
    symptom="the model forgets what it learned in pretraining",
    cause="pretrained weights need small updates: 5e-6 to 2e-5 is usual",
    fixes=({"lr": [1e-5], "min_lr": lambda c: [min(c.min_lr, 1e-6)]},),
)
def fine_tuning_lr_too_high(c: Case) -> Column:
    orthogonal = c.optimizer_name == "muon"  # Muon updates have one magnitude, independent of the gradients
    high = (c.lr > 1e-4) & (c.lr <= FAR_TOO_HIGH)
    high &= c.pretrained != RANDOM_WEIGHTS  # nothing learned can be forgotten
    return (c.goal == "sft") & high & not_(orthogonal) & not_(c.is_diffusion) & not_(c.benchmark)


@rule(
    "learning_rate.continued-pretraining",
    "advice",
    "lr",
    message="lr={lr} is high for pretraining that continues from {pretrained}",
    symptom="the loss jumps at the start, and the model forgets part of what it knew",
    cause="a pretrained model ended at a small learning rate: 1e-5 to 1e-4 is usual, after a new warmup",
    fixes=({"lr": [3e-5], "min_lr": lambda c: [min(c.min_lr, 3e-6)]},),
)
def continued_lr_too_high(c: Case) -> Column:
    adam = one_of(c.optimizer_name, ("adamw", "adamw8bit", "schedule_free_adamw"))
    continues = (c.goal == "pretrain") & (c.pretrained != "") & (c.pretrained != RANDOM_WEIGHTS)
    return adam & continues & (c.lr > 1e-4) & (c.lr <= FAR_TOO_HIGH) & not_(c.benchmark)


@rule(
    "learning_rate.pretraining",
    "advice",
    "lr",
    message="lr={lr} is high for a model with {size:.3g} billion active parameters",
    symptom="loss spikes or divergence",
    cause="the largest stable learning rate decreases with model size",
    fixes=({"lr": [3e-4], "min_lr": lambda c: [min(c.min_lr, 3e-5)]},),
    values={"size": lambda c: c.params_active / 1e9},
)
def pretraining_lr_too_high(c: Case) -> Column:
    limit = 6e-4 if c.params_active > 2e10 else 2e-3 if c.params_active > TINY else 6e-3
    return _pretrains_with_adam(c) & (c.lr > limit) & (c.lr <= FAR_TOO_HIGH) & not_(pretraining_lr_far_too_high(c))


def _pretrains_with_adam(c: Case) -> Column:
    adam = one_of(c.optimizer_name, ("adamw", "adamw8bit", "schedule_free_adamw"))
    return adam & (c.goal == "pretrain") & not_(c.benchmark)


@rule(
    "learning_rate.too-high-for-size",
    "warning",
    "lr",
    message="lr={lr} is several times the usual learning rate of a model with {size:.3g} billion active parameters",
    symptom="loss spikes or divergence",
    cause="models of more than a billion parameters train with 1e-4 to 1e-3; the stable rate decreases with size",
    fixes=({"lr": [3e-4], "min_lr": lambda c: [min(c.min_lr, 3e-5)]},),
    values={"size": lambda c: c.params_active / 1e9},
)
def pretraining_lr_far_too_high(c: Case) -> Column:
    large = c.params_active > LARGE
    return _pretrains_with_adam(c) & large & (c.lr > 2e-3) & (c.lr <= FAR_TOO_HIGH)


TINY = 3e7  # active parameters below which 3e-3 is usual
LARGE = 1.5e9  # active parameters from which the rates of published pretrainings are in a narrow range
USUAL_MOST = 1e-3  # of those pretrainings


def is_above_usual(c: Case) -> Column:
    """Return whether a rate is above those of published pretrainings of large models; no rule reports it yet."""
    return _pretrains_with_adam(c) & (c.params_active > LARGE) & (c.lr > USUAL_MOST)


def usual_rate(c: Case) -> float:
    """Return a usual learning rate of the case's goal."""
    return USUAL_RATES[str(c.goal)]


def _usual_rates(c: Case) -> list[float]:
    return [usual_rate(c)]


def _usual_minimum(c: Case) -> list[float]:
    return [min(float(c.min_lr), _usual_rates(c)[0] / 10)]


@rule(
    "learning_rate.far-too-high",
    "warning",
    "lr",
    message="lr={lr} is far above every usual learning rate",
    symptom="the loss diverges within some steps, or stays on a plateau",
    cause="an update of Adam, Lion or Muon has about the size of lr, and weights are around 0.02",
    fixes=({"lr": _usual_rates, "min_lr": _usual_minimum},),
)
def lr_far_too_high(c: Case) -> Column:
    far = (c.lr > FAR_TOO_HIGH) | ((c.goal == "peft") & (c.lr > 10 * ADAPTERS_MOST))
    return far & (c.lr <= DIVERGES) & (c.optimizer_name != "sgd")


@rule(
    "learning_rate.diverges",
    "error",
    "lr",
    message="lr={lr} moves every weight by more than its own size in each step",
    symptom="the loss is NaN or that of random weights after a few steps",
    cause="an update has about the size of lr (of lr × gradient with sgd), and weights are around 0.02",
    fixes=({"lr": _usual_rates, "min_lr": _usual_minimum},),
)
def lr_diverges(c: Case) -> Column:
    return c.lr > (1000 if c.optimizer_name == "sgd" else DIVERGES)


@rule(
    "learning_rate.too-small",
    "warning",
    "lr",
    message="lr={lr} is too small to change a weight",
    symptom="the loss stays where it starts",
    cause="updates below 1e-9 vanish in the rounding of fp32 weights",
    fixes=({"lr": _usual_rates, "min_lr": _usual_minimum},),
)
def lr_too_small(c: Case) -> Column:
    return (c.lr < 1e-9) & not_(c.benchmark)


@rule(
    "learning_rate.schedule-free",
    "warning",
    "schedule_name",
    message="schedule_free_adamw with a {schedule_name} decay",
    symptom="the learning rate decays twice; the averaged weights lag behind",
    cause="its weight averaging replaces the schedule",
    fixes=({"schedule_name": ["constant"]},),
)
def schedule_free_with_decay(c: Case) -> Column:
    return (c.optimizer_name == "schedule_free_adamw") & (c.schedule_name != "constant")
