"""The verbs as Python functions. Names are imported on first use, so that each command loads only what it runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.catalogues import find_model as find_model
    from meshwright.api.catalogues import find_recipes as find_recipes
    from meshwright.api.catalogues import gpu_catalogue as gpu_catalogue
    from meshwright.api.catalogues import model_catalogue as model_catalogue
    from meshwright.api.catalogues import model_part as model_part
    from meshwright.api.catalogues import recipe as recipe
    from meshwright.api.catalogues import recipe_text as recipe_text
    from meshwright.api.catalogues import rule_catalogue as rule_catalogue
    from meshwright.api.catalogues import verification_reports as verification_reports
    from meshwright.api.checks import check as check
    from meshwright.api.checks import check_response as check_response
    from meshwright.api.checks import export as export
    from meshwright.api.completion import starting_with as starting_with
    from meshwright.api.diagnosis import diagnose as diagnose
    from meshwright.api.diagnosis import doctor_response as doctor_response
    from meshwright.api.dry_run import dryrun as dryrun
    from meshwright.api.dry_run import dryrun_plan as dryrun_plan
    from meshwright.api.dry_run import dryrun_response as dryrun_response
    from meshwright.api.dry_run import require_own_engine as require_own_engine
    from meshwright.api.explanations import explain as explain
    from meshwright.api.explanations import explain_response as explain_response
    from meshwright.api.measure import accuracy as accuracy
    from meshwright.api.measure import calibrate as calibrate
    from meshwright.api.measure import profile_text as profile_text
    from meshwright.api.measure import shipped_measurements as shipped_measurements
    from meshwright.api.planning import estimate as estimate
    from meshwright.api.planning import plan as plan
    from meshwright.api.planning import plan_response as plan_response
    from meshwright.api.planning import plans_response as plans_response
    from meshwright.api.planning import recommend as recommend
    from meshwright.api.planning import size as size
    from meshwright.api.planning import timeline as timeline
    from meshwright.api.responses import to_json as to_json
    from meshwright.api.run import bench as bench
    from meshwright.api.run import convert as convert
    from meshwright.api.run import evaluate as evaluate
    from meshwright.api.run import generate as generate
    from meshwright.api.run import launch as launch
    from meshwright.api.run import launch_response as launch_response
    from meshwright.api.run import tokenize as tokenize
    from meshwright.api.run import train as train
    from meshwright.api.run import train_response as train_response
    from meshwright.api.run import watch as watch
    from meshwright.choices import ENGINES as ENGINES
    from meshwright.choices import FRAMEWORKS as FRAMEWORKS
    from meshwright.choices import GOALS as GOALS
    from meshwright.clusters import cluster as cluster
    from meshwright.version import SCHEMA as SCHEMA

_NAMES = {
    "api.catalogues": "find_model find_recipes gpu_catalogue model_catalogue model_part recipe"
    " recipe_text rule_catalogue verification_reports",
    "api.checks": "check check_response export",
    "api.completion": "starting_with",
    "api.diagnosis": "diagnose doctor_response",
    "api.dry_run": "dryrun dryrun_plan dryrun_response require_own_engine",
    "api.explanations": "explain explain_response",
    "api.measure": "accuracy calibrate profile_text shipped_measurements",
    "api.planning": "estimate plan plan_response plans_response recommend size timeline",
    "api.responses": "to_json",
    "api.run": "bench convert evaluate generate launch launch_response tokenize train train_response watch",
    "choices": "ENGINES FRAMEWORKS GOALS",
    "clusters": "cluster",
    "version": "SCHEMA",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'meshwright.api' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_MODULES[name]}"), name)
