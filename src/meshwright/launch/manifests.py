"""Helpers shared by Kubernetes and SkyPilot files: YAML, and a note on storage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.launch import values
from meshwright.launch.job import Job


def restart_note(job: Job) -> tuple[str, ...]:
    """Return a note if the run's folder does not outlive its machine."""
    if not job.finds_ranks:  # container_paths knows where other frameworks save
        return ()
    argv = job.program.argv
    writable = [one.path for one in map(values.mount, job.mounts) if one.options != "ro"]
    out = argv[argv.index("--out") + 1] if "--out" in argv[:-1] else ""
    if "--tiny" in argv or any(re.match(rf"{re.escape(path.rstrip('/'))}(/|$)", out) for path in writable):
        return ()
    return ("checkpoints are lost with the machine: mount a volume and put the run there (--mount and --out)",)


def to_yaml(*documents: dict[str, Any], comments: Sequence[str] = ()) -> str:
    """Return documents as YAML below comments, with multi-line texts as blocks."""
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import LiteralScalarString

    def with_blocks(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_blocks(one) for key, one in value.items()}
        if isinstance(value, list):
            return [with_blocks(one) for one in value]
        blocks = isinstance(value, str) and "\n" in value and all(c.isprintable() or c == "\n" for c in value)
        return LiteralScalarString(value) if blocks else value

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda data: True  # no anchors and aliases
    yaml.indent(mapping=2, sequence=4, offset=2)
    buffer = io.StringIO()
    yaml.dump_all([with_blocks(one) for one in documents], buffer)
    return "".join(f"{line}\n" for line in comments) + buffer.getvalue()
