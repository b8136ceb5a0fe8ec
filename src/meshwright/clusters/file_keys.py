"""Keys of cluster files that are typed as an option or a KEY=VALUE of a command."""

from __future__ import annotations

from meshwright.clusters.file import FILE_KEYS, file_as_typed, looks_like_path

ELSEWHERE = ("gpu", "nodes", "gpus_per_node", "price", "currency", "name", "source", "note", "arch", "capability")
"""Keys that commands have as options, or that name the cluster."""


def in_cluster_file(key: str, value: str, gpus: str = "") -> tuple[str, str] | None:
    """Return that a key is one of cluster files, and what to write in which file; None for other keys."""
    name = key.lower().replace("-", "_").removeprefix("cluster.")
    if name not in FILE_KEYS or name in ELSEWHERE:
        return None
    line = f"{name} = {value if _is_number(value) else repr(value) if value else 'VALUE'}".replace("'", '"')
    if looks_like_path(gpus):
        fix = f"{line} in {file_as_typed(gpus)}"
    else:
        fix = f'{line} in a cluster file beside gpu = "NAME", nodes = N and gpus_per_node = N, and --gpus FILE.toml'
    return f"{name} is a key of a cluster file; write {fix}", fix


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
