"""Jobs that run our own `train`: the recipe, options and GPUs that a job script gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import clusters
from meshwright.api.inputs import Field, fields_of
from meshwright.api.inputs import read as read_request
from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.native import train_command
from meshwright.frameworks.types import SourcedValue, as_int

if TYPE_CHECKING:
    from meshwright.api.run_requests import Train

SWITCHES = ("--json", "--offline")
"""Options of the command that change no training."""
WRITTEN = re.compile(r"(?m)^# .* on (\S+), written by meshwright ")
"""The line of a job of ours that names its cluster; the scheduler's options have no GPU type."""


class OwnJob(msgspec.Struct, frozen=True):
    """The `meshwright train` command of a job script."""

    path: str
    target: str  # recipe or model, as it is found from here
    overrides: tuple[str, ...]
    goal: str | None
    model: str | None
    framework: str | None
    nodes: int | None
    gpus_per_node: int | None
    written_for: str  # the cluster that the job was written for; empty if it does not say

    def cluster(self, own: str | None = None) -> str | None:
        """Return the job's cluster: the recipe's own if it has as many GPUs, else of its GPU type; None if not set."""
        if not self.nodes or not self.gpus_per_node:
            return own
        size = (self.nodes, self.gpus_per_node)
        for text in (self.written_for, own):
            with suppress(InputError):  # a GPU type of a cluster file has no name here
                found = clusters.cluster(text) if text else None
                if found is not None and (found.nodes, found.gpus_per_node) == size:
                    same = own is not None and text != own and str(clusters.cluster(own)) == str(found)
                    return own if same else text
        gpu = clusters.cluster(own).gpu.name if own else clusters.DEFAULT_GPU
        return f"{self.nodes}x{self.gpus_per_node}x{gpu}"


def read(content: Content) -> OwnJob | None:
    """Return the training of ours that a script starts, None if it starts none; raise if only the run knows it."""
    launch = train_command(content)
    if launch is None:
        return None
    request = _request(content, launch.args[1:])
    target = _from_here(str(request.recipe), content.folder)
    if request.tiny:
        reason = "trains a tiny version of its recipe, which is checked when it starts"
        raise InputError(reason, field="file", value=content.path, fix=(f"meshwright check {target}",))
    changes = [*request.overrides, *([f"data.dataset={request.dataset}"] if request.dataset else [])]
    written = WRITTEN.search(content.text)
    nodes, per_node = as_int(launch.nodes), as_int(launch.gpus_per_node)
    if launch.launcher in ("python", ""):  # one process, which starts the ranks of its node
        nodes, per_node = 1, request.nproc
    return OwnJob(
        path=content.path,
        target=target,
        overrides=tuple(changes),
        goal=request.goal,
        model=request.model,
        framework=request.framework,
        nodes=nodes or (1 if launch.nodes is None else None),
        gpus_per_node=per_node,
        written_for=written[1] if written else "",
    )


def _from_here(target: str, folder: Path | None) -> str:
    """Return a recipe file by its path from the current folder: a job finds it beside itself."""
    beside = folder / target if folder is not None else None
    return str(beside) if beside is not None and beside.is_file() else target


def _request(content: Content, args: Sequence[SourcedValue]) -> Train:
    """Return the request of a script's `train` command, read as the command line reads it."""
    from meshwright.api.run_requests import Train
    from meshwright.api.stray_words import accepted_words

    given = _values(content, fields_of(Train), args)
    if not given.get("recipe"):
        raise InputError("its meshwright train names no recipe", field="file", value=content.path)
    try:
        given = accepted_words("train", Train, given)
        return read_request(Train, given, "cli", strings=True)[0]
    except InputError as error:
        reason = f"{error.reason} (the meshwright train of {args[0].location})"
        raise InputError(reason, field=error.field, value=error.value, fix=error.fix) from None


def _values(content: Content, fields: Sequence[Field], args: Sequence[SourcedValue]) -> dict[str, Any]:
    """Return the values of a `train` command by field."""
    by_flag = {flag: field for field in fields for flag in (field.flag, *field.input.other_flags)}
    given, words = dict[str, Any](), list[str]()
    left: Iterator[SourcedValue] = iter(args)
    for word in left:
        name, equals, text = str(word.value).partition("=")
        field = by_flag.get(name)
        if not name.startswith("-"):
            words.append(_known(content, word))
        elif field is not None and bool in field.types:
            given[field.name] = True
        elif field is not None:
            value = word if equals else next(left, word)
            if _is_open(value, field):
                continue
            given[field.name] = text if equals else str(value.value)
            if field.input.choices or field.input.override or field.name == "model":
                _known(content, value)
        elif name not in SWITCHES:
            reason = f"meshwright train has no such option ({word.location})"
            raise InputError(reason, field="option", value=name, fix=("meshwright train --help",))
    target = next((word for word in words if "=" not in word), "")
    if target:
        words.remove(target)
    return {**given, "recipe": target, "overrides": tuple(words)}


def _is_open(value: SourcedValue, field: Field) -> bool:
    """Return whether only the job knows a number that no recipe depends on, such as its ranks."""
    return bool(value.unresolved) and str not in field.types and not field.input.override


def _known(content: Content, word: SourcedValue) -> str:
    """Return a word of the command; raise InputError for one that only the run knows."""
    if word.unresolved:
        reason = f"{word.value} in line {word.line} is known only when the job runs: {word.unresolved}"
        raise InputError(reason, field="file", value=content.path, fix=("meshwright check RECIPE KEY=VALUE",))
    return str(word.value)
