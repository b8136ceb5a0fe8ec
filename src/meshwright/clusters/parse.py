"""Parse a cluster: `8xH100`, `4x8xH100`, `64xGB200`, `auto` or a file."""

from __future__ import annotations

import re

from meshwright import file_access
from meshwright.clusters.catalogue import gpu, is_known
from meshwright.clusters.detect import this_machine
from meshwright.clusters.file import looks_like_path, read_cluster_file
from meshwright.clusters.tables import MAX_GPUS
from meshwright.clusters.types import Cluster, Gpu
from meshwright.errors import InputError

DEFAULT_GPU = "H100"
EXAMPLES = ("8xH100", "4x8xH100")

_TIMES_SIGNS = str.maketrans("×✕*", "xxx")
_NUMBER = r"[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?"
_COUNT_FIRST = re.compile(rf"({_NUMBER})(?:x({_NUMBER}))?(?:x([a-z].*))?", re.IGNORECASE)
_NAME_FIRST = re.compile(rf"([a-z].*)x({_NUMBER})", re.IGNORECASE)


def cluster(text: str) -> Cluster:
    """Parse a cluster: `8xH100`, `4x8xH100` (nodes x GPUs), a count, `auto` (this machine) or a TOML file."""
    text = text.strip()
    if not text:
        raise _bad(text, "the cluster is empty; write a count and a GPU", EXAMPLES)
    if text.lower() == "auto":
        if file_access.closed():  # over HTTP, this machine is not the client's
            raise _bad(
                text, "auto is not allowed over HTTP, it would detect the server's GPUs; name the GPUs", EXAMPLES
            )
        return this_machine()
    if looks_like_path(text):
        return read_cluster_file(text)
    return _parse_cluster(text)


def default_nodes(count: int, known: Gpu) -> tuple[int, int]:
    """Return nodes and GPUs per node for a count: equal nodes, as large as possible up to the GPU's usual node.

    64xH100 is 8 nodes of 8, 4xH100 one node of 4, 12xH200 two nodes of 6, 11xH100 eleven nodes of 1.
    """
    size = next(size for size in range(min(count, known.gpus_per_node), 0, -1) if count % size == 0)
    return count // size, size


def _parse_cluster(text: str) -> Cluster:
    compact = re.sub(r"\s*([x×✕*])\s*", r"\1", text, flags=re.IGNORECASE).translate(_TIMES_SIGNS)
    if is_known(compact):
        name = gpu(compact).name
        raise _bad(
            text,
            f"the number of GPUs is missing; write the count before {name}",
            [f"{gpu(compact).gpus_per_node}x{name}"],
        )
    if match := _COUNT_FIRST.fullmatch(compact):
        first, second, name = match.groups()
    elif match := _NAME_FIRST.fullmatch(compact):
        name, first, second = *match.groups(), None
    else:
        raise _bad(text, "not a cluster; write COUNTxGPU, NODESxGPUSxGPU, auto, or the path of a .toml file", EXAMPLES)
    counts = [_as_int(text, number) for number in (first, second) if number is not None]
    known = _gpu_in(text, name or DEFAULT_GPU, counts)
    nodes, gpus_per_node = (counts[0], counts[1]) if len(counts) == 2 else default_nodes(counts[0], known)
    if nodes * gpus_per_node > MAX_GPUS:
        raise _bad(text, f"more than {MAX_GPUS} GPUs")
    return Cluster(known, nodes, gpus_per_node)


def _as_int(text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()):
        raise _bad(text, f"{number[:40]} is not a positive integer", EXAMPLES)
    if len(number.lstrip("0")) > len(str(MAX_GPUS)) or int(number) > MAX_GPUS:
        raise _bad(text, f"more than {MAX_GPUS} GPUs")
    if int(number) == 0:
        raise _bad(text, "a cluster has at least one GPU", EXAMPLES)
    return int(number)


def _gpu_in(text: str, name: str, counts: list[int]) -> Gpu:
    try:
        return gpu(name)
    except InputError as error:
        written = "x".join(map(str, counts))
        raise _bad(text, error.reason, [f"{written}x{near}" for near in error.fix]) from None


def _bad(text: str, reason: str, fix: tuple[str, ...] | list[str] = ()) -> InputError:
    return InputError(reason, field="gpus", value=text[:200], fix=list(fix))
