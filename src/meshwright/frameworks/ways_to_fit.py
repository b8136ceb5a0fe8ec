"""What makes a training fit where no setting of its file does: 4-bit adapters, shorter samples, more GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster, cluster
from meshwright.errors import InputError
from meshwright.frameworks.tried_fixes import NOT_FOUND
from meshwright.planner import case_of
from meshwright.planner.missing_fixes import explain_missing
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.rules import Finding

MORE = (2, 4, 8, 16, 32, 64, 128)  # times the GPUs
SHORTEST = 512  # tokens of a sample
LEAN: Mapping[str, Any] = {"layout.micro_batch_size": 1, "layout.recompute": "full", "layout.recompute_modules": ()}
SHARDED: Sequence[Mapping[str, Any]] = (
    {},
    LEAN,
    {"layout.strategy": "fsdp2", "layout.reshard_after_forward": True, **LEAN},
)
"""Changes that cost no more GPUs, the smallest first."""
WORDS = {"layout.strategy": "fully sharded", "layout.recompute": "all activations recomputed"}
QLORA: Mapping[str, Any] = {"peft.method": "qlora"}


def with_ways(findings: Sequence[Finding], case: Case | None, options: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return the findings; an error of memory that no setting resolves says with numbers what does.

    A printed command repeats the user's `options`.
    """
    is_open = [one.severity == "error" and one.rule.startswith("memory.") and not one.fix for one in findings]
    if case is None or not any(is_open):
        return tuple(findings)
    found = " | ".join(_ways(case))
    text = f"no setting of the file resolves it; what fits by the estimate: {found}"
    open_ones = [msgspec.structs.replace(one, no_fix=text if found else "") for one in findings]
    if not found:
        open_ones = list(explain_missing(open_ones, case, options=options))
    return tuple(
        other if asked and one.no_fix in ("", NOT_FOUND) else one
        for one, other, asked in zip(findings, open_ones, is_open, strict=True)
    )


def _ways(case: Case) -> Iterator[str]:
    recipe = case.recipe
    if recipe.goal != "peft" or recipe.peft.method != "qlora":
        adapters = msgspec.structs.replace(recipe, goal="peft")
        yield from _first("QLoRA", (_case(case, {**QLORA, **one}, adapters) for one in SHARDED))
    length = recipe.data.seq_length // 2
    while length >= SHORTEST:
        found = list(
            _first(
                f"{length:,} tokens per sample", (_case(case, {"data.seq_length": length, **one}) for one in SHARDED)
            )
        )
        if found:
            yield from found
            break
        length //= 2
    for times in MORE:
        on = _larger(case.cluster, times)
        found = list(_first(f"--gpus {on}", (_case(case, one, on=on) for one in SHARDED)))
        if found:
            yield from found
            return


def _first(name: str, cases: Iterator[Case | None]) -> Iterator[str]:
    """Yield a way with its memory, and the changes that it needs, if one of its cases fits without an error."""
    for changes, one in zip(SHARDED, cases, strict=False):
        if one is None or not costs.memory(one).fits or any(rules.check(one, ("error",), fixes=False)):
            continue
        needs = [WORDS[field] for field in changes if field in WORDS]
        needs += [f"micro batch {one.recipe.layout.micro_batch_size}"] if changes else []
        with_ = f" with {', '.join(needs)}" if needs else ""
        yield f"{name}{with_} ({float(costs.memory(one).total):.0f} GiB per GPU)"
        return


def _case(case: Case, changes: Mapping[str, Any], recipe: Any = None, on: Cluster | None = None) -> Case | None:
    """Return the training with changes, in a batch that its ranks can split; None if they contradict each other."""
    on = on or case.cluster
    try:
        changed, _ = override.change(recipe or case.recipe, {**changes})
    except InputError:
        return None
    one = msgspec.structs.replace(changed, cluster=str(on))
    layout = one.layout
    ranks = max(1, on.world // (layout.tp * layout.pp * layout.cp)) * layout.micro_batch_size
    batch = -(-one.train.global_batch_size // ranks) * ranks
    train = msgspec.structs.replace(one.train, global_batch_size=batch)
    return case_of(msgspec.structs.replace(one, train=train), case.model, on, case.engine)


def _larger(on: Cluster, times: int) -> Cluster:
    """Return nodes of the same GPU with so many times the GPUs: nodes are filled before another is added."""
    world, size = on.world * times, max(on.gpus_per_node, on.gpu.gpus_per_node)
    nodes = world // size
    return cluster(f"{nodes}x{size}x{on.gpu.name}" if nodes > 1 else f"{world}x{on.gpu.name}")
