"""The placement of a model that a program loads with device_map: one model over all GPUs, which ranks cannot train."""

from __future__ import annotations

from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext

KEY = "device_map"
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")
PER_RANK = 'device_map={"": PartialState().process_index}'  # each rank loads onto its own GPU
IMPORTED = "from accelerate import PartialState"


def _spread_over_ranks(ctx: RuleContext) -> Problem | None:
    found = ctx.parsed.program.given.get(KEY)
    ranks = 0 if ctx.cluster is None else ctx.cluster.world
    if found is None or found.unresolved or str(found.value) not in SPREADING or ranks < 2:
        return None
    quantized = ctx.recipe.goal == "peft" and ctx.recipe.peft.method in ("qlora", "lora8bit")
    fix = PER_RANK if quantized else f"without {KEY}"
    message = (
        f'{KEY}="{found.value}" spreads one copy of the model over the GPUs, but each of the {ranks} ranks needs one'
    )
    message += f"; the fix needs `{IMPORTED}`" if quantized else ""
    return Problem(message, (fix,), key=KEY)


def device_map_rule(framework: str) -> FrameworkRule:
    """Return the rule of a framework that trains with one process per GPU."""
    return FrameworkRule(
        f"{framework}.device-map",
        "error",
        (KEY,),
        _spread_over_ranks,
        symptom="ValueError: You can't train a model that has been loaded with device_map in any distributed mode",
        cause="every rank would hold layers on every GPU; a distributed run has one copy, or one shard, per rank",
    )
