"""What is wrong with a run, from its log: the figures that show it, and what to try, with its estimated effect."""

from meshwright.doctor.binding import case_of_run
from meshwright.doctor.examine import DIAGNOSES, examine, meanings
from meshwright.doctor.finding import Checkup, Evidence, Figure, Finding, Remedy
from meshwright.doctor.formats import FORMATS
from meshwright.doctor.reading import read, read_text
from meshwright.doctor.run import ENGINE, Run, Step, Told
from meshwright.doctor.thresholds import TABLE as THRESHOLDS
from meshwright.doctor.view import View

__all__ = [
    "DIAGNOSES",
    "ENGINE",
    "FORMATS",
    "THRESHOLDS",
    "Checkup",
    "Evidence",
    "Figure",
    "Finding",
    "Remedy",
    "Run",
    "Step",
    "Told",
    "View",
    "case_of_run",
    "examine",
    "meanings",
    "read",
    "read_text",
]
