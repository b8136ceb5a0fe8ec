"""Keys of cluster files that are typed as an option or a KEY=VALUE of a command."""

from __future__ import annotations

import re

from meshwright.clusters.file import FILE_KEYS, NETWORK, file_as_typed, looks_like_path
from meshwright.clusters.tables import NODE_NETWORK, OTHER_KEYS
from meshwright.errors import InputError

ELSEWHERE = ("gpu", "nodes", "gpus_per_node", "price", "currency", "name", "source", "note", "arch", "capability")
"""Keys that commands have as options, or that name the cluster."""


def in_cluster_file(key: str, value: str, gpus: str = "") -> tuple[str, str] | None:
    """Return that a key is one of cluster files, and what to write in which file; None for other keys."""
    name = key.lower().replace("-", "_").removeprefix("cluster.")
    if name not in FILE_KEYS or name in ELSEWHERE:
        return None
    line = f"{name} = {value if _is_number(value) else repr(value) if value else 'VALUE'}".replace("'", '"')
    fix = _in_file(line, gpus)
    return f"{name} is a key of a cluster file; write {fix}", fix


def option_in_cluster_file(option: str, value: str, gpus: str) -> tuple[str, str] | None:
    """Return the same for an option, which may also be a word of other tools: --network 25GbE, --ib, --ram 512."""
    found = in_cluster_file(option, value, gpus)
    same = OTHER_KEYS.get(option.lower().replace("-", "_"), "")
    if found is not None or not same or same in ELSEWHERE:
        return found
    if same != NETWORK:
        return in_cluster_file(same, value, gpus)
    number = re.match(r"[0-9.]+", value)
    unit = "GB/s" if re.search("GB(/s|ps)", value) else "Gb/s"
    fix = _in_file(f'{NODE_NETWORK} = "{number[0] if number else "N"} {unit}"', gpus)
    return f"a cluster file has the network, of all GPUs of a node; write {fix}", fix


def _in_file(line: str, gpus: str) -> str:
    """Return where to write a line: in the typed cluster file, or in a new one for the typed cluster."""
    if looks_like_path(gpus):
        return f"{line} in {file_as_typed(gpus)}"
    from meshwright.clusters import cluster

    try:
        on = cluster(gpus)
    except InputError:
        return f'{line} in a cluster file beside gpu = "NAME", nodes = N and gpus_per_node = N, and --gpus FILE.toml'
    parts = f'gpu = "{on.gpu.name}", nodes = {on.nodes} and gpus_per_node = {on.gpus_per_node}'
    return f"{line} in a cluster file beside {parts}, and --gpus FILE.toml"


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
