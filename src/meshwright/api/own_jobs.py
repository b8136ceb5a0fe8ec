"""Jobs that run our own `train`: the recipe, options and GPUs that a job script gives it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright import clusters
from meshwright.api.inputs import fields_of
from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.native import train_command
from meshwright.frameworks.types import SourcedValue, as_int

WRITTEN = re.compile(r"(?m)^# .* on (\S+), written by meshwright ")
"""The line of a job of ours that names its cluster; the scheduler's options have no GPU type."""


class OwnJob(msgspec.Struct, frozen=True):
    """The `meshwright train` command of a job script."""

    path: str
    target: str  # recipe or model, as it is found from here
    overrides: tuple[str, ...]
    options: dict[str, str]  # by field name
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
    options, words = _arguments(launch.args[1:])
    for word in words:
        if word.unresolved:
            reason = f"{word.value} in line {word.line} is known only when the job runs: {word.unresolved}"
            raise InputError(reason, field="file", value=content.path, fix=("meshwright check RECIPE KEY=VALUE",))
    target = next((str(word.value) for word in words if "=" not in str(word.value)), "")
    if not target:
        raise InputError("its meshwright train names no recipe", field="file", value=content.path)
    target = _from_here(target, content.folder)
    if "tiny" in options:
        reason = "trains a tiny version of its recipe, which is checked when it starts"
        raise InputError(reason, field="file", value=content.path, fix=(f"meshwright check {target}",))
    changes = [str(word.value) for word in words if "=" in str(word.value)]
    changes += [f"data.dataset={options['dataset']}"] if "dataset" in options else []
    written = WRITTEN.search(content.text)
    nodes, per_node = as_int(launch.nodes), as_int(launch.gpus_per_node)
    if launch.launcher in ("python", ""):  # one process, which starts the ranks of its node
        nodes, per_node = 1, int(options["nproc"]) if options.get("nproc", "").isdigit() else None
    return OwnJob(
        path=content.path,
        target=target,
        overrides=tuple(changes),
        options=options,
        nodes=nodes or (1 if launch.nodes is None else None),
        gpus_per_node=per_node,
        written_for=written[1] if written else "",
    )


def _from_here(target: str, folder: Path | None) -> str:
    """Return a recipe file by its path from the current folder: a job finds it beside itself."""
    beside = folder / target if folder is not None else None
    return str(beside) if beside is not None and beside.is_file() else target


def _arguments(args: Sequence[SourcedValue]) -> tuple[dict[str, str], list[SourcedValue]]:
    """Return the options of a `train` command by field, and its other words."""
    from meshwright.api.run_requests import Train

    by_flag = {
        flag: field
        for field in fields_of(Train)
        if not field.input.positional
        for flag in (field.flag, *field.input.other_flags)
    }
    options, words = dict[str, str](), list[SourcedValue]()
    left: Iterator[SourcedValue] = iter(args)
    for word in left:
        name, equals, value = str(word.value).partition("=")
        if not name.startswith("-"):
            words.append(word)
        elif name in by_flag and bool in by_flag[name].types:
            options[by_flag[name].name] = "true"
        elif name in by_flag:
            given = value if equals else next((str(one.value) for one in left), "")
            options[by_flag[name].name] = given
    return options, words
