"""Answers as the JSON objects of the outer contract; one place for their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import costs, launch, planner
from meshwright.clusters import Gpu
from meshwright.frameworks import CheckResult, ExportedConfig, RecipeCheckResult
from meshwright.models import ModelSpec
from meshwright.planner import Candidate, Plan, Ranking, Sizing
from meshwright.recipes.index import IndexEntry
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding, Rule

if TYPE_CHECKING:
    from meshwright.launch.build_job import Started

SCHEMA = "meshwright/2"


def plan_to_dict(plan: Plan, explain: bool = False) -> dict[str, Any]:
    """The plan object."""
    out = _plan(plan)
    if not plan.estimate.fits:
        out["smallest_that_fits"] = planner.smallest_fit(plan)
    if explain:
        out["reasons"] = [{"field": r.field, "value": r.value, "why": r.why} for r in planner.reasons(plan)]
        out["memory_by_stage_gib"] = _memory_by_stage(plan)
    return out


def _plan(plan: Plan) -> dict[str, Any]:
    q, no_command = plan.question, launch.left_out(plan)
    return {
        "schema": SCHEMA,
        "question": {
            "model": q.model_ref,
            "gpus": str(q.cluster),
            "goal": q.goal,
            "seq_length": plan.recipe.data.seq_length,
            "engine": q.engine,
        },
        "recipe": {
            "name": plan.base.name,
            "match": plan.match,
            "goal": plan.recipe.goal,
            "benchmark": plan.recipe.benchmark,
            "made_for": plan.base.cluster,
            "approach": plan.approach,
        },
        "contract": plan.contract_dict(),
        "layout": plan.layout_dict(),
        "estimate": _estimate(plan),
        "changes": [{"field": c.field, "from": c.old, "to": c.new, "kind": c.kind, "why": c.why} for c in plan.changes],
        "findings": findings_to_dicts(plan.findings),
        "suggestions": [
            {"title": o.title, "overrides": list(o.overrides), "kind": o.kind, "why": o.why} for o in plan.suggestions
        ],
        "commands": launch.commands_of(plan, no_command),
        "no_command": no_command,
    }


def _estimate(plan: Plan) -> dict[str, Any]:
    """The estimate; a layout that cannot be built fits nowhere, whatever its arithmetic says."""
    made = costs.to_dict(plan.estimate)
    return made if plan.exists else {**made, "fits": False}


def estimate_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan object of one exact layout, without what only a search can say."""
    out = _plan(plan)
    del out["recipe"]["match"], out["recipe"]["approach"], out["suggestions"]
    return {**out, "memory_by_stage_gib": _memory_by_stage(plan)}


def _memory_by_stage(plan: Plan) -> dict[str, dict[str, float]]:
    return {str(i): _memory_parts(m) for i, m in enumerate(costs.memory_by_stage(plan.case))}


def _memory_parts(memory: costs.Memory) -> dict[str, float]:
    return {part: round(float(getattr(memory, part)), 4) for part in (*costs.PARTS, "total")}


def ranking_to_dict(ranking: Ranking) -> dict[str, Any]:
    """Ranked plans, what trades memory for speed, and what was dropped."""
    return {
        "schema": SCHEMA,
        "plans": [plan_to_dict(plan) for plan in ranking.plans],
        "pareto": [_candidate(c) for c in ranking.pareto],
        "dropped": [{"reason": d.reason, "count": d.count, "example": d.example} for d in ranking.dropped],
        "searched": ranking.searched,
        **({"fitting": [_candidate(c) for c in ranking.fitting]} if ranking.fitting else {}),
    }


def _candidate(c: Candidate) -> dict[str, Any]:
    return {"layout": c.layout, "step_s": c.step_s, "total_gib": c.total_gib}


def timeline_to_dict(line: costs.Timeline) -> dict[str, Any]:
    """The passes of a pipeline's step over time."""
    return {"schema": SCHEMA, **msgspec.to_builtins(line)}


def sizing_to_dict(sizing: Sizing) -> dict[str, Any]:
    """GPU counts with speed, goodput, days and cost."""
    built = msgspec.to_builtins(sizing)
    return {
        "schema": SCHEMA,
        "smallest": built["smallest"],
        "most_efficient": built["most_efficient"],
        "sizes": built["sizes"],
    }


def findings_to_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings, errors first."""
    return [
        {
            "rule": f.rule,
            "severity": f.severity,
            "field": f.field,
            "message": f.message,
            "fix": list(f.fix),
            **({"file": f.file, "line": f.line or None} if f.file else {}),
        }
        for f in findings
    ]


def check_to_dict(result: CheckResult) -> dict[str, Any]:
    """The check object: what was found, and whether anything stands against starting it."""
    return {
        "schema": SCHEMA,
        "framework": result.framework,
        "version": result.version,
        "ok": result.ok,
        "file": result.file or None,
        "recipe": result.recipe.name,
        "model": result.model.name if result.model else None,
        "gpus": str(result.cluster) if result.cluster else None,
        "engine": result.engine,
        "findings": findings_to_dicts(result.findings),
        "unresolved": [msgspec.to_builtins(one) for one in result.unresolved],
        "notes": list(result.notes),
        "estimate": costs.to_dict(result.estimate) if result.estimate else None,
    }


def export_to_dict(written: ExportedConfig, judged: RecipeCheckResult) -> dict[str, Any]:
    """The export object: files, the program that starts them, what could not be said, and what the rules say there."""
    built = msgspec.to_builtins(written)
    return {
        "schema": SCHEMA,
        "framework": written.framework,
        "ok": judged.ok,
        "gpus": str(judged.cluster),
        "files": built["files"],
        "command": launch.command_of(written.program, judged.cluster),
        "env": built["program"]["env"],
        "unmapped": built["unmapped"],
        "notes": built["notes"],
        "findings": findings_to_dicts(judged.findings),
    }


def entries_to_dicts(entries: Sequence[IndexEntry]) -> list[dict[str, Any]]:
    """Rows of the recipe index."""
    return [
        {
            "name": e.name,
            "family": e.family,
            "model": e.model,
            "goal": e.goal,
            "gpus": e.gpus,
            "gpu": e.gpu,
            "seq_length": e.seq_length,
            "benchmark": e.benchmark,
        }
        for e in entries
    ]


def launch_to_dict(started: Started) -> dict[str, Any]:
    """The launch object."""
    made = started.launch
    number, state = started.number, started.final_state
    ended = {} if state is None else {"state": state.state, "restarts": state.restarts}
    return {
        "schema": SCHEMA,
        "on": made.on,
        "files": dict(made.files),
        "commands": list(made.commands),
        "hosts": list(made.places),
        "notes": list(made.notes),
        "written": list(started.paths),
        "submitted": None if number is None else {"id": number, **ended},
        "findings": findings_to_dicts(started.findings),
    }


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """A recipe with every field."""
    built: dict[str, Any] = msgspec.to_builtins(recipe)
    return built


def model_to_dict(model: ModelSpec) -> dict[str, Any]:
    """A model's shape and exact parameter counts."""
    p = model.params
    return {
        "name": model.name,
        "family": model.family,
        "kind": model.kind,
        "hf_id": model.hf_id,
        "layers": model.num_layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "experts": model.moe.experts if model.moe else 0,
        "max_seq_length": model.max_seq_length,
        "parameters": {
            "total": p.total,
            "active": p.active,
            "embedding": p.embedding,
            "head": p.head,
            "routed_experts": p.routed,
            "vision": p.vision,
            "mtp": p.mtp,
        },
        "source": model.source,
    }


def gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    """A GPU's facts with their source."""
    return {
        "name": gpu.name,
        "arch": gpu.arch,
        "memory_gib": gpu.memory_gib,
        "peak_tflops_dense": gpu.peak_tflops,
        "hbm_gb_s": gpu.hbm_gb_s,
        "link": gpu.link,
        "nvlink_gb_s_per_direction": gpu.nvlink_gb_s,
        "nvlink_domain": gpu.nvlink_domain,
        "network_gb_s": gpu.network_gb_s,
        "gpus_per_node": gpu.gpus_per_node,
        "host_gib_per_gpu": gpu.host_gib,
        "source": gpu.source,
        "note": gpu.note,
    }


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """A rule as a person meets it."""
    return {
        "id": rule.id,
        "subject": rule.subject,
        "severity": rule.severity,
        "field": rule.field,
        "engines": list(rule.engines),
        "symptom": rule.symptom,
        "cause": rule.cause,
        "fix_fields": sorted({name for fix in rule.fixes for name in fix}),
        "pitfall": rule.pitfall,
    }


def to_json(result: msgspec.Struct, **more: Any) -> dict[str, Any]:
    """What a command found, as the JSON object of the outer contract."""
    return {"schema": SCHEMA, **more, **msgspec.to_builtins(result, enc_hook=str)}


def training_to_dict(done: Any) -> dict[str, Any]:
    """The training object: what was run, how it went, and the estimate beside it."""
    recipe, outcome = done.recipe, done.outcome
    estimate = costs.to_dict(done.estimate)
    on_gpu = outcome.mfu is not None
    return {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "model": recipe.model,
        "goal": recipe.goal,
        "ranks": done.case.world,
        "device": outcome.device,
        "layout": msgspec.to_builtins(recipe.layout),
        "precision": msgspec.to_builtins(recipe.precision),
        "seq_length": recipe.data.seq_length,
        "global_batch_size": recipe.train.global_batch_size,
        "steps": len(outcome.losses),
        "losses": outcome.losses,
        "grad_norms": outcome.grad_norms,
        "eval_losses": {str(step): loss for step, loss in outcome.eval_losses.items()},
        "skipped": outcome.skipped,
        "step_s": outcome.step_s,
        "step_parts_s": outcome.parts_s,
        "tokens_per_s_per_gpu": outcome.tokens_per_s_per_gpu,
        "tflops_per_gpu": outcome.tflops_per_gpu,
        "mfu": outcome.mfu,
        "mfu_convention": estimate["mfu_convention"],
        "memory_gib": outcome.memory_gib,
        "estimate": estimate if on_gpu else None,
        "folder": done.folder,
        "first_step": outcome.first_step,
        "checkpoint": outcome.checkpoint,
        "resumed_from": outcome.resumed_from,
        "exported": outcome.model,
    }
