"""The work of an answer is bounded: estimates are counted, as CPU seconds depend on the machine."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from meshwright import clusters, models, rules
from meshwright.planner import Question
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.levers import fits_with_levers, with_levers
from meshwright.planner.search import any_fits, best
from meshwright.recipes.case import Case
from meshwright.rules.many_changes import breaks_any

HARD = {  # estimates of memory, their layouts, and estimates of step time: at most a fifth more than today
    "recommend qwen35_122b_a10b --gpus 2xA10G --goal sft": (123, 13_800, 45),
    "recommend llama31_405b --gpus 48xRTX4090 --goal peft --seq 32768": (400, 35_000, 185),
    "recommend kimi_k2 --gpus 32xGB200 --goal sft --engine megatron": (135, 17_200, 41),
    "recommend qwen2_72b --gpus 16xA10G --goal pretrain layout.pp=4": (197, 6_200, 36),
    "recommend deepseek_v3 --gpus 4096xH100 --goal pretrain": (68, 16_300, 35),
    "recommend nemotron_nano_v2_vl_12b --gpus 128xRTX4090 --goal sft --seq 131072": (180, 15_500, 42),
    "recommend glm_45v --gpus 4xL4 --goal sft --seq 131072": (109, 48_800, 8),
}


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count estimates and the layouts in them."""
    work: Counter[str] = Counter()

    def counting(module: Any, name: str, kind: str) -> None:
        compute = getattr(module, name)

        def wrapped(case: Case, *rest: Any) -> Any:
            work[kind] += 1
            work["layouts"] += np.size(case.tp) if kind == "memory" else 0
            return compute(case, *rest)

        monkeypatch.setattr(module, name, wrapped)

    counting(import_module("meshwright.costs.memory"), "_on_stage", "memory")
    counting(import_module("meshwright.costs.time"), "_step_time", "time")
    return work


def baseline(model: str, gpus: str, goal: str, overrides: tuple[str, ...] = ()) -> Baseline:
    """Return the baseline of a question."""
    question = Question(model=models.find(model), model_ref=model, cluster=clusters.cluster(gpus), goal=goal)
    return baseline_for(question, overrides)


@pytest.mark.parametrize("command", HARD)
def test_a_hard_question_needs_few_estimates(command: str, meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work, limits = counted(monkeypatch), dict(zip(("memory", "layouts", "time"), HARD[command], strict=True))
    assert meshwright(*command.split(), "--json").code in (0, 1)
    assert all(0 < work[kind] <= limit for kind, limit in limits.items()), (work, limits)


def test_whether_a_layout_fits_is_what_the_search_finds() -> None:
    ways = set()
    for model, gpus, goal, overrides in (
        ("qwen25_72b", "16xH100", "pretrain", ("layout.micro_batch_size=4",)),
        ("qwen2_1p5b", "1xL40S", "sft", ("data.seq_length=32768",)),
        ("llama3_8b", "1xH100", "sft", ()),
        ("llama3_70b", "8xA100-40", "pretrain", ()),
    ):
        asked = baseline(model, gpus, goal, overrides)
        case, pinned, found = asked.case, asked.pinned, best(asked.case, asked.pinned)
        assert found is not None
        fits, plain, offloaded = any_fits(case, pinned), found.fits, found.fits
        assert fits == found.fits
        if not fits:
            plain = fits_with_levers(case, pinned, offloads=False)
            assert plain == with_levers(case, pinned, found, offloads=False).fits
            offloaded = plain or fits_with_levers(case, pinned, offloads=True)
            assert offloaded == with_levers(case, pinned, found).fits
        ways.add((fits, plain, offloaded))
    assert len(ways) == 4  # as asked, with a leaner step, with host memory, not at all


def test_many_changes_break_the_rules_that_each_breaks_alone() -> None:
    case = baseline("qwen3_30b_a3b", "8xA100-40", "sft").case
    checked = [r for r in rules.applicable(case, ("error", "warning")) if r.subject == "memory"]
    changes: list[dict[str, Any]] = [
        {"tp": tp, "sp": tp > 1, "recompute": recompute, "loss": loss}
        for tp in (1, 2, 4, 8)
        for recompute in ("none", "full")
        for loss in ("plain", "chunked")
    ]
    changes += [{"offload": "optimizer"}, {"pp": 2, "micro_batch_size": 4}, {"ep": 8, "recompute_modules": ("moe",)}]
    alone = [any(bool(r.broken(case.replace(**one))) for r in checked) for one in changes]
    assert breaks_any(checked, case, changes) == alone
    assert set(alone) == {True, False}
