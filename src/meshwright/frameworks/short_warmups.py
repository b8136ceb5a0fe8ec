"""Warm-ups of a few steps, because their length was written in another unit than the framework reads."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext, rule_of
from meshwright.frameworks.schedule_units import UNIT_KEYS, counts_samples, number
from meshwright.frameworks.types import as_int

LEAST = 10  # steps of a warm-up; shorter ones are of trials
LONG = 1000  # steps of a training that is no trial
USUAL = 100  # trainings of this length have one step of warm-up
MOST = 4  # a warm-up of more than this part of the training was not meant
RAMP_UP = "rampup_batch_size"  # its first steps have fewer samples


def _short_warmup(ctx: RuleContext) -> Iterator[Problem]:
    """A length in samples that was meant in steps, or a share of too few of them."""
    keys = UNIT_KEYS.get(ctx.framework.key_map)
    steps, batch = ctx.recipe.train.steps, ctx.recipe.train.global_batch_size
    if keys is None or steps < LONG or any(key.endswith(RAMP_UP) for key in ctx.parsed.settings):
        return
    warmup, samples = list(keys.samples.items())[2]
    found, share = as_int(ctx.parsed.settings.get(samples), 15), number(ctx.parsed.settings, keys.fraction[warmup])
    if found and found // batch < LEAST and counts_samples(ctx.framework.key_map, ctx.parsed.settings):
        meant = found if MOST * found <= steps else steps // USUAL
        many = f"{found // batch} steps" if found // batch != 1 else "1 step"
        text = f"{ctx.written(samples, found)} is a warm-up of {many} of {steps:,}: it counts samples, {batch:,} a step"
        yield Problem(text, (ctx.written(samples, max(meant, LEAST) * batch),), key=samples)
    end = ctx.recipe.schedule.decay_steps or steps
    if share and share * end < LEAST and end >= LONG:
        key = keys.fraction[warmup]
        text = f"{ctx.written(key, share)} is a warm-up of {share * end:.2g} of {end:,} steps: it is a share"
        yield Problem(text, (ctx.written(key, 1 / USUAL),), key=key)


def short_warmup_rule(framework: str) -> FrameworkRule:
    """Return the rule for a framework that also takes its warm-up in samples or as a share."""
    return rule_of(
        framework,
        "warm-up-too-short",
        " ".join(one for keys in UNIT_KEYS.values() for one in (*keys.samples.values(), *keys.fraction.values())),
        _short_warmup,
        "a loss spike in the first steps: the learning rate reaches its peak almost at once",
        "the warm-up is stated in samples or as a share, with the number of another unit",
        "warning",
        supersedes=("learning_rate.no-warmup",),
    )
