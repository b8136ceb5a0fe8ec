"""A GPU type alone (`--gpus H100`) with the count that the file of a request states."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from meshwright import clusters, frameworks
from meshwright.api import own_jobs
from meshwright.api.resolve import is_file, recipe_from
from meshwright.api.targets import file_of
from meshwright.errors import InputError
from meshwright.notes import no_notes, note

R = TypeVar("R", bound=msgspec.Struct)


def with_stated_count(request: R, target: str) -> R:
    """Return a request on as many GPUs as its file states; unchanged if its GPUs have a count, or the file has none."""
    asked: Any = request
    gpus = str(asked.gpus).strip()
    if not clusters.is_known(gpus) or not is_file(target):
        return request
    try:
        with no_notes():
            found = _counted(target, gpus, getattr(asked, "framework", None))
    except InputError:  # the verb reports it
        return request
    if not found:
        return request
    on = clusters.cluster(found)
    if on.world > 1:
        note(f"--gpus {gpus} names no count: the file states {on}; write --gpus 1x{gpus} for another")
    return msgspec.structs.replace(request, gpus=found)


def _counted(target: str, gpus: str, framework: str | None) -> str:
    """Return the GPUs with the count of a script, of its job or of a recipe's cluster; empty if there is none."""
    content, theirs = file_of(target, framework)
    if content is not None and theirs is not None:
        found = frameworks.stated_gpus(theirs, content, gpus) or ""
        return "" if found == gpus else found
    job = own_jobs.read(content) if content is not None and content.format == "shell" else None
    if job is not None:
        return f"{job.nodes}x{job.gpus_per_node}x{gpus}" if job.nodes and job.gpus_per_node else ""
    own = recipe_from(target, cluster="").cluster if job is None else ""
    on = clusters.cluster(own) if own else None
    return "" if on is None else f"{on.nodes}x{on.gpus_per_node}x{gpus}"
