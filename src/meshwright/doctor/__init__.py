"""Diagnoses a run from its log: what is wrong, the evidence, and remedies with their estimated effect."""

from meshwright.doctor.curves import Curve, curves_of
from meshwright.doctor.examine import DIAGNOSES, examine, meanings
from meshwright.doctor.finding import Checkup, Evidence, Figure, Finding, Remedy
from meshwright.doctor.formats import FORMATS
from meshwright.doctor.match_recipe import case_of_run
from meshwright.doctor.reading import read, read_text
from meshwright.doctor.run import ENGINE, Run, RunHeader, Step
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import TABLE as THRESHOLDS

__all__ = [
    "DIAGNOSES",
    "ENGINE",
    "FORMATS",
    "THRESHOLDS",
    "Checkup",
    "Curve",
    "Evidence",
    "Figure",
    "Finding",
    "Remedy",
    "Run",
    "RunHeader",
    "RunStats",
    "Step",
    "case_of_run",
    "curves_of",
    "examine",
    "meanings",
    "read",
    "read_text",
]
