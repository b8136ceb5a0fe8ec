"""A dataset whose name lists several sources: the error, with the blend to write instead."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError, some
from meshwright.recipes.format_override import format_override
from meshwright.recipes.values import sources_in, stated_weights

DATASET = "data.dataset"


def blend_of(sources: Mapping[str, float]) -> str:
    """Return the override that trains on several datasets with these weights, for a shell."""
    return shlex.quote(format_override("data.blend", sources))


def listed_sources(name: str) -> dict[str, float]:
    """Return the sources, with weights, that a name lists instead of naming one; empty if it names one."""
    sources = {} if _is_here(name) else sources_in(name)
    return sources if len(sources) > 1 else {}


def several_datasets_error(name: str, epochs: float) -> InputError | None:
    """Return the error for a dataset that lists several files, or several sources with their weights; None otherwise.

    Names without weights, none of which is here, may be the one name of a dataset elsewhere.
    """
    sources = listed_sources(name)
    absent = [one for one in sources if not _is_here(one)]
    if len(absent) == len(sources):
        if not sources or not stated_weights(name):
            return None
        reason, fix = "names several datasets with their weights; write them as a blend", blend_of(sources)
        if epochs:  # a blend is sampled without end
            reason, fix = f"{reason}, which has no epochs: set the steps", f"{fix} train.steps=N"
        return InputError(reason, field=DATASET, value=name, fix=(fix,))
    missing = f", of which {some(absent)} is not here" if absent else ""
    reason = f"names several files{missing}; write them as a blend with their weights, or put them into one folder"
    fix = blend_of(sources)
    if epochs:
        reason = f"names several files{missing}; put them into one folder: a blend has no epochs"
        fix = f"mkdir mixed && cp -r {shlex.join(sources)} mixed, then data.dataset=mixed"
    fix = f"once {some(absent)} is in place: {fix}" if absent else fix
    return InputError(reason, field=DATASET, value=name, fix=(fix,))


def _is_here(name: str) -> bool:
    return not file_access.closed() and Path(name).expanduser().exists()
