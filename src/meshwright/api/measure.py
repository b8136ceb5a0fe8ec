"""The cost model against measurements, and fitted to a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.api.resolve import write_text

if TYPE_CHECKING:
    from meshwright.costs.accuracy import Report
    from meshwright.costs.calibrate import OwnProfile


def accuracy(path: str) -> Report:
    """The cost model against a table of measurements."""
    from meshwright.costs import accuracy as accuracies

    return accuracies.accuracy(path)


def shipped_measurements() -> str:
    """The table of published measurements: in the installed package, or in the repository it is run from."""
    package = Path(__file__).parents[1]
    places = (package / "costs" / "measurements.csv", package.parents[1] / "benchmarks" / "data" / "measurements.csv")
    return str(next((place for place in places if place.is_file()), places[0]))


def accuracy_to_dict(report: Report) -> dict[str, Any]:
    """The accuracy object of the outer contract."""
    from meshwright.costs import accuracy as accuracies

    return accuracies.to_dict(report)


def accuracy_points(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Measured and predicted values of every row behind an accuracy report."""
    from meshwright.costs import accuracy as accuracies

    return accuracies.points(report)


def calibrate_machine() -> tuple[OwnProfile, list[dict[str, Any]]]:
    """Measures this machine's GPU; imports torch."""
    from meshwright.engine.machine import measured

    return measured()


def calibrate_runs(path: str, *, one_type: bool = False) -> list[OwnProfile]:
    """Fits the speed of one's GPUs to a table of one's own runs; one_type refuses a table with several GPU types."""
    from meshwright.costs import calibrate

    return calibrate.from_runs(path, one_type=one_type)


def save_profile(profile: OwnProfile, path: str) -> None:
    """Writes a machine's profile."""
    write_text(path, profile_text(profile), "out")


def profile_text(profile: OwnProfile) -> str:
    """A machine's profile as the TOML file that --calibration reads."""
    from meshwright.costs import calibrate

    return calibrate.to_text(profile)


def profile_to_dict(profile: OwnProfile) -> dict[str, Any]:
    """A machine's profile as JSON."""
    built: dict[str, Any] = msgspec.to_builtins(profile)
    return built
