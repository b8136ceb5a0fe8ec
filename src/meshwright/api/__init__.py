"""The verbs as Python functions. Names are imported on first use, so that each command loads only what it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_names import LazyNames

if TYPE_CHECKING:  # the names of the table below, for type checkers
    from meshwright.api.argument_names import *  # noqa: F403
    from meshwright.api.catalogues import *  # noqa: F403
    from meshwright.api.check_responses import *  # noqa: F403
    from meshwright.api.check_targets import *  # noqa: F403
    from meshwright.api.checks import *  # noqa: F403
    from meshwright.api.ci_formats import *  # noqa: F403
    from meshwright.api.compare_responses import *  # noqa: F403
    from meshwright.api.comparison import *  # noqa: F403
    from meshwright.api.completion import *  # noqa: F403
    from meshwright.api.diagnosis import *  # noqa: F403
    from meshwright.api.dry_run import *  # noqa: F403
    from meshwright.api.engine_configs import *  # noqa: F403
    from meshwright.api.evidence import *  # noqa: F403
    from meshwright.api.explanations import *  # noqa: F403
    from meshwright.api.exports import *  # noqa: F403
    from meshwright.api.hub_configs import *  # noqa: F403
    from meshwright.api.imports import *  # noqa: F403
    from meshwright.api.inspection import *  # noqa: F403
    from meshwright.api.job_launch import *  # noqa: F403
    from meshwright.api.measure import *  # noqa: F403
    from meshwright.api.model_list import *  # noqa: F403
    from meshwright.api.pipeline_schedule import *  # noqa: F403
    from meshwright.api.plan_responses import *  # noqa: F403
    from meshwright.api.planning import *  # noqa: F403
    from meshwright.api.post_training import *  # noqa: F403
    from meshwright.api.rehearsal import *  # noqa: F403
    from meshwright.api.responses import *  # noqa: F403
    from meshwright.api.shared_diagnosis import *  # noqa: F403
    from meshwright.api.sharing import *  # noqa: F403
    from meshwright.api.show_samples import *  # noqa: F403
    from meshwright.api.sizing import *  # noqa: F403
    from meshwright.api.suppression import *  # noqa: F403
    from meshwright.api.training import *  # noqa: F403
    from meshwright.choices import *  # noqa: F403
    from meshwright.clusters import cluster as cluster
    from meshwright.recipes.replacements import for_options as for_options
    from meshwright.version import *  # noqa: F403

__getattr__ = LazyNames(
    __name__,
    {
        "api.catalogues": "find_model find_recipes gpu_catalogue model_part recipe"
        " recipe_text rule_catalogue verification_reports",
        "api.check_targets": "SkippedFile expand is_checked nothing_checked why_skipped",
        "api.checks": "check",
        "api.check_responses": "check_response",
        "api.engine_configs": "engine_of",
        "api.exports": "export write_plan",
        "api.ci_formats": "distinct_findings github sarif",
        "api.suppression": "entries_of missing_entries read_baseline require_rules write_baseline",
        "api.compare_responses": "compare_response",
        "api.comparison": "compare",
        "api.completion": "starting_with",
        "api.diagnosis": "diagnose doctor_response",
        "api.dry_run": "dryrun dryrun_plan dryrun_response require_own_engine",
        "api.rehearsal": "rehearse rehearsal_response",
        "api.argument_names": "as_override is_removed_key recipe_key",
        "api.evidence": "evidence_for measured_points",
        "api.explanations": "explain",
        "api.hub_configs": "hub_texts",
        "api.inspection": "inspect inspect_response",
        "api.imports": "import_file import_response",
        "api.measure": "accuracy accuracy_response calibrate profile_text runs_template shipped_measurements",
        "api.model_list": "model_catalogue",
        "api.pipeline_schedule": "timeline",
        "api.plan_responses": "plan_response plans_response",
        "api.planning": "estimate plan recommend",
        "api.responses": "to_json",
        "api.resolve": "is_recipe",
        "api.shared_diagnosis": "SharedDiagnosis read_shared shareable",
        "api.sharing": "share",
        "api.show_samples": "samples",
        "api.sizing": "size",
        "api.targets": "is_target recipe_in_line",
        "api.run_comparison": "is_run",
        "api.training": "bench train train_response",
        "api.post_training": "convert evaluate generate tokenize",
        "api.job_launch": "launch launch_response watch",
        "choices": "CLOSED_KINDS ENGINES FRAMEWORKS GOALS",
        "clusters": "cluster",
        "recipes.replacements": "for_options",
        "version": "SCHEMA",
    },
)
