"""The verbs: what the command line, Python users and agents call. Composed from the rooms, no logic of its own."""

from meshwright.api.catalogues import (
    find_recipes,
    model_catalogue,
    recipe,
    recipe_text,
    rule_catalogue,
    save_files,
    save_recipe,
    verification_reports,
)
from meshwright.api.checks import check, export
from meshwright.api.completion import COMPLETED, complete
from meshwright.api.diagnosis import checkup_to_dict, diagnose
from meshwright.api.dryrun import dryrun, dryrun_to_dict, prove_plan, refuse_other_engines
from meshwright.api.explanations import explain, explained_to_dict
from meshwright.api.measure import (
    accuracy,
    accuracy_points,
    accuracy_to_dict,
    calibrate_machine,
    calibrate_runs,
    profile_text,
    profile_to_dict,
    save_profile,
    shipped_measurements,
)
from meshwright.api.plan import estimate, find_goal, plan, question_of, recommend, size, timeline
from meshwright.api.run import bench, convert, evaluate, generate, launch, tokenize, train, watch
from meshwright.clusters import cluster as find_cluster
from meshwright.clusters import gpus as gpu_catalogue
from meshwright.frameworks import NAMES as FRAMEWORKS
from meshwright.models import find as find_model
from meshwright.models import names as model_names
from meshwright.recipes.index import names as recipe_names
from meshwright.recipes.types import ENGINES, GOALS
from meshwright.serialize import (
    SCHEMA,
    check_to_dict,
    entries_to_dicts,
    estimate_to_dict,
    export_to_dict,
    gpu_to_dict,
    launch_to_dict,
    model_to_dict,
    plan_to_dict,
    ranking_to_dict,
    recipe_to_dict,
    rule_to_dict,
    sizing_to_dict,
    timeline_to_dict,
    training_to_dict,
)

__all__ = [
    "COMPLETED",
    "ENGINES",
    "FRAMEWORKS",
    "GOALS",
    "SCHEMA",
    "accuracy",
    "accuracy_points",
    "accuracy_to_dict",
    "bench",
    "calibrate_machine",
    "calibrate_runs",
    "check",
    "check_to_dict",
    "checkup_to_dict",
    "complete",
    "convert",
    "diagnose",
    "dryrun",
    "dryrun_to_dict",
    "entries_to_dicts",
    "estimate",
    "estimate_to_dict",
    "evaluate",
    "explain",
    "explained_to_dict",
    "export",
    "export_to_dict",
    "find_cluster",
    "find_goal",
    "find_model",
    "find_recipes",
    "generate",
    "gpu_catalogue",
    "gpu_to_dict",
    "launch",
    "launch_to_dict",
    "model_catalogue",
    "model_names",
    "model_to_dict",
    "plan",
    "plan_to_dict",
    "profile_text",
    "profile_to_dict",
    "prove_plan",
    "question_of",
    "ranking_to_dict",
    "recipe",
    "recipe_names",
    "recipe_text",
    "recipe_to_dict",
    "recommend",
    "refuse_other_engines",
    "rule_catalogue",
    "rule_to_dict",
    "save_files",
    "save_profile",
    "save_recipe",
    "shipped_measurements",
    "size",
    "sizing_to_dict",
    "timeline",
    "timeline_to_dict",
    "tokenize",
    "train",
    "training_to_dict",
    "verification_reports",
    "watch",
]
