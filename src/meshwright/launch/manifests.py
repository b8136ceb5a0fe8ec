"""What Kubernetes and SkyPilot files share: YAML, and the disks that a job's machines see."""

from __future__ import annotations

import re
from typing import Any

from meshwright.launch import values
from meshwright.launch.job import Job


def restart_note(job: Job) -> tuple[str, ...]:
    """What to know about a run whose folder does not outlive its machine."""
    words = job.program.argv
    kept = [one.path for one in map(values.mount, job.mounts) if one.options != "ro"]
    out = words[words.index("--out") + 1] if "--out" in words[:-1] else ""
    if "--tiny" in words or any(re.match(rf"{re.escape(path.rstrip('/'))}(/|$)", out) for path in kept):
        return ()
    return ("its checkpoints are lost with its machine: mount a disk and put the run there (--mount and --out)",)


def to_yaml(*documents: dict[str, Any]) -> str:
    """Documents as YAML, texts of several lines as blocks."""
    import io

    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import LiteralScalarString

    def readable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: readable(one) for key, one in value.items()}
        if isinstance(value, list):
            return [readable(one) for one in value]
        blocks = isinstance(value, str) and "\n" in value and all(c.isprintable() or c == "\n" for c in value)
        return LiteralScalarString(value) if blocks else value

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.representer.ignore_aliases = lambda data: True  # equal parts are written out
    yaml.indent(mapping=2, sequence=4, offset=2)
    buffer = io.StringIO()
    yaml.dump_all([readable(one) for one in documents], buffer)
    return buffer.getvalue()
