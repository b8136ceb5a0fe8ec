"""Parse a cluster: `8xH100`, `4x8xH100`, `h100:8`, `2 nodes of 8 H100`, `p5.48xlarge`, `auto` or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import gcd

import msgspec

from meshwright import file_access
from meshwright.clusters.assumptions import links_assumed, network_assumed, nodes_assumed, variant_assumed
from meshwright.clusters.catalogue import gpu, gpus, is_known
from meshwright.clusters.detect import this_machine
from meshwright.clusters.file import FILE_LOOKS, looks_like_path, read_cluster_file
from meshwright.clusters.instances import instance, instance_names
from meshwright.clusters.other_machines import EXAMPLES, instead_of
from meshwright.clusters.tables import MAX_GPUS
from meshwright.clusters.types import Assumption, Cluster, Gpu, nodes_of_racks
from meshwright.errors import InputError
from meshwright.similar import NUMBER_WORDS, misspelled

DEFAULT_GPU = "H100"
LARGEST_NODE = 72  # GPUs; without a GPU name, a larger second number is no node but probably a name

MAX_LENGTH = 200  # characters of a description

_N = r"[-+]?[0-9][0-9.,_]*(?:e[-+]?[0-9]+)?"
_NODE = r"(?:nodes?|machines?|servers?|hosts?|instances?|box(?:es)?)"
_OF = r"(?:of|with|x|,|:|having)"
_BY = r"(?:\s*[x:@]\s*|\s+|\s*-\s*)"
_FORMS = (
    rf"(?P<nodes>{_N})\s*{_NODE}\s*{_OF}?\s*(?P<each>{_N}){_BY}(?P<name>.+?)(?:\s*(?:each|per node))?",
    rf"(?P<nodes>{_N})\s*{_NODE}(?:\s*{_OF}\s*|\s+)(?P<name>(?!{_OF}\s)[a-z].*)",
    rf"(?P<nodes>{_N})\s*x?\s*(?P<name>[a-z].+?)\s+{_NODE}",
    rf"(?P<count>{_N}){_BY}(?P<name>.+?)\s*(?:on|in|over|across|,|\()\s*(?P<nodes>{_N})\s*{_NODE}\)?",
    rf"(?P<each>{_N}){_BY}(?P<name>.+?)\s*(?:per|/|a)\s*node\s*(?:x|,|on|and)?\s*(?P<nodes>{_N})\s*{_NODE}",
    rf"(?P<nodes>{_N})\s*x\s*(?P<each>{_N}){_BY}(?P<name>.+)",
    rf"(?P<nodes>{_N})\s*x\s*\(\s*(?P<each>{_N}){_BY}(?P<name>.+?)\s*\)",
    rf"(?P<count>{_N}){_BY}(?P<name>.+)",
    rf"(?P<count>{_N})(?P<name>(?!x(?:\s*[0-9]|$))[a-z].*)",
    rf"(?P<name>.+?)\s*[x:=,@]\s*(?P<count>{_N})",
    rf"(?P<name>.+?)\s*[x:=,@]?\s*(?P<nodes>{_N})\s*x\s*(?P<each>{_N})",
    rf"(?P<nodes>{_N})\s*x\s*(?P<each>{_N})",
    rf"(?P<nodes>{_N})\s*{_NODE}(?:\s*{_OF}\s*(?P<each>{_N}))?",
    rf"(?P<count>{_N})",
)
"""Compiled when tried: most descriptions match an early form."""
_TIMES_SIGNS = str.maketrans("×✕✖*", "xxxx")
_FILLERS = re.compile(
    r"^gpus?\s*[:=]\s*|\b(?:gpus?|cards?|accelerators?)\b|^(?:google |on )?(?:colab|kaggle|runpod|vast\.ai) (?=\S)"
)
_NUMBER_WORDS = {**NUMBER_WORDS, "single": 1, "dual": 2, "quad": 4}
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b")
_CARD_NUMBER = re.compile(r"[1-5]0[5-9]0|16[56]0|[45]500|[2-8]000|7900|9070")
_CARD = re.compile(rf"(?:{_CARD_NUMBER.pattern})\s*(?:ti|super|xt|xtx)+")  # 4090ti: a variant, not 4,090 of something
"""Numbers in the names of GeForce, RTX and Radeon cards."""


class _Parts(msgspec.Struct, frozen=True):
    """A cluster argument in parts; what is None was not written."""

    name: str | None
    count: int | None = None
    nodes: int | None = None
    each: int | None = None  # GPUs of one node


def cluster(text: str) -> Cluster:
    """Parse a cluster: `8xH100`, `4x8xH100` (nodes x GPUs), a count, `auto` (this machine) or a TOML file."""
    return _read(text)[0]


def assumptions(text: str) -> tuple[Assumption, ...]:
    """Return what this cluster argument leaves open and what was taken for it."""
    return _read(text)[1]


def default_nodes(count: int, known: Gpu) -> tuple[int, int]:
    """Return nodes and GPUs per node for a count: full nodes, one smaller node, or the largest that also divide one.

    64xH100 is 8 nodes of 8, 4xH100 one node of 4. 12xH200 is 3 nodes of 4: whether the GPUs are in nodes of 8 and 4
    or in three of 4, each group of 4 shares a node.
    """
    size = count if count <= known.gpus_per_node else gcd(count, known.gpus_per_node)
    return count // size, size


def _read(text: str | os.PathLike[str]) -> tuple[Cluster, tuple[Assumption, ...]]:
    text = os.fspath(text) if isinstance(text, os.PathLike) else str(text) if isinstance(text, int) else text
    if not isinstance(text, str):
        raise _bad(str(text), f"must be a string, not {type(text).__name__}", EXAMPLES)
    text = text.strip()
    if not text:
        raise _bad(text, "the cluster is empty; write a count and a GPU", EXAMPLES)
    if text.lower() == "auto":
        if file_access.closed():  # over HTTP, this machine is not the client's
            raise _bad(
                text, "auto is not allowed over HTTP, it would detect the server's GPUs; name the GPUs", EXAMPLES
            )
        return this_machine(), ()
    if looks_like_path(text):
        described = read_cluster_file(text)
        return described, (*described.unlikely, *_racks_in_file(text, described), *network_assumed(described))
    if len(several := [one.strip() for one in re.split(r"[,+]| and ", text)]) > 1 and all(map(_is_cluster, several)):
        reason = f"names {len(several)} clusters: GPUs of several kinds do not train together here, and one is planned"
        sizes = "compare their sizes with meshwright size MODEL --goal GOAL --gpu " + ",".join(
            dict.fromkeys(_read(one)[0].gpu.name for one in several)
        )
        raise _bad(text, f"{reason} at a time; {sizes}", several)
    if len(text) > MAX_LENGTH:  # the forms below take quadratic time
        raise _bad(text, f"more than {MAX_GPUS} GPUs" if text.isdigit() else "not a cluster: too long", EXAMPLES)
    return _instances(text) or _described(text)


def _is_cluster(text: str) -> bool:
    """Return whether a text with a count and a GPU is a cluster by itself."""
    if not text[:1].isdigit() or text.isdigit() or looks_like_path(text):
        return False
    try:
        _read(text)
    except InputError:
        return False
    return True


def _instances(text: str) -> tuple[Cluster, tuple[Assumption, ...]] | None:
    """Return a cluster of cloud instances: `p5.48xlarge`, `2xp5.48xlarge`."""
    counted = re.fullmatch(rf"({_N})\s*(?:[x×*]|\s|{_NODE}\s+of)\s*(.+)", text, re.IGNORECASE)
    if counted and is_known(counted[2]):
        return None
    after = re.fullmatch(rf"(\S.*?)\s*[x:×*]\s*({_N})", text, re.IGNORECASE)
    if after is not None and instance(after[1]) is not None:  # p5.48xlarge:24
        return _instances(f"{after[2]}x{after[1]}")
    alone = instance(text)
    found = alone or (instance(counted[2]) if counted else None)
    if found is None:
        return None
    nodes = 1 if alone or counted is None else _as_int(text, counted[1])
    per = f"{found.name} has {found.count} {found.gpu} ({found.cloud}, as of {found.checked})"
    message = f"{per}; links and network are those of the catalogue's {found.gpu}, not of the instance"
    made = Cluster(gpu(found.gpu), nodes, found.count)
    _check_size(text, made)
    return made, (Assumption("instance", f"{nodes}x{found.count}x{found.gpu}", message), *network_assumed(made))


def _similar_instances(name: str) -> list[str]:
    """Return the instances that a name may mean: misspelled, or of another size, the nearest size first."""
    family, _, size = name.lower().partition(".")
    others = [one for one in instance_names() if one.lower().partition(".")[0] == family] if size else []
    return misspelled(name, instance_names()) or sorted(others, key=lambda one: abs(_size(one) - _size(name)))


def _size(name: str) -> int:
    digits = re.search(r"[0-9]+", name.partition(".")[2])
    return int(digits[0]) if digits else 0


_COUNT = rf"(?:(?P<count>{_N})\s*(?:x|\s|(?:racks?|systems?)\s+(?:of\s+)?)?\s*)?"
_AFTER = rf"(?:\s+(?P<words>racks?|systems?|{_NODE}))?(?:\s*[x:=,@]\s*(?P<after>{_N}))?"
_RACK = re.compile(rf"{_COUNT}(?P<name>[a-z].*?[\s_-]*nvl\s*(?P<gpus>[0-9]+)){_AFTER}")
_RACK_FIRST = re.compile(rf"{_COUNT}nvl\s*(?P<gpus>[0-9]+)[\s_-]+(?P<name>[a-z].*?){_AFTER}")
_SYSTEM = re.compile(rf"{_COUNT}(?:nvidia\s+)?(?P<board>hgx|dgx)[\s_-]*(?P<name>[a-z].*?){_AFTER}")
_OF_RACKS = re.compile(rf"(?P<count>{_N})\s*(?:racks?\s+of\s+(?P<name>.+?)|x?\s*(?P<other>\S.*?)\s+racks?)")


class _Systems(msgspec.Struct, frozen=True):
    """Systems that are ordered as one: racks that NVLink connects, or nodes named by their board."""

    gpu: Gpu
    count: int
    size: int  # GPUs of one
    counts_gpus: bool = False  # 8xHGX-H100: the 8 GPUs of one board

    @property
    def is_rack(self) -> bool:
        return self.size > self.gpu.gpus_per_node


def usual_node(name: str) -> str:
    """Return the usual node of a GPU type as a cluster argument; the name of a rack or system would count those."""
    known = gpu(name)
    return f"{known.gpus_per_node}x{known.name if _systems(name) else name}"


def _systems(text: str) -> _Systems | None:
    """Return the racks or systems that a text names: `2xGB200-NVL72`, `GB200 NVL72 x 18`, `24xDGX-H100`."""
    plain = re.sub(r"\s+", " ", text.lower().translate(_TIMES_SIGNS)).strip()
    for form in (_RACK, _RACK_FIRST, _SYSTEM, _OF_RACKS):
        match = form.fullmatch(plain)
        groups = match.groupdict() if match is not None else {}
        name = groups.get("name") or groups.get("other") or ""
        counts = [one for one in (groups.get("count"), groups.get("after")) if one]
        if not is_known(name) or len(counts) > 1:
            continue
        known = gpu(name)
        racks = known.nvlink_domain > known.gpus_per_node > 1 and not known.nvlink_domain % known.gpus_per_node
        size = known.nvlink_domain if racks else known.gpus_per_node
        named_size = int(groups.get("gpus") or size)
        if form is _SYSTEM and not racks and (known.link != "nvlink" or size == 1):
            fix = [f"{size}x{known.name}"]
            raise _bad(text, "the number of GPUs of this system is not known here; write the GPUs", fix)
        if named_size == size and (racks or form is _SYSTEM):
            count = _as_int(text, counts[0]) if counts else 1
            # Nobody orders 72 racks at once, and 8xHGX-H100 is how one board of 8 is sold.
            of_board = groups.get("board") == "hgx" and count == size and not groups["words"]
            return _Systems(known, count, size, count >= size if racks else of_board)
    return None


def _named_systems(text: str) -> tuple[Cluster, tuple[Assumption, ...]] | None:
    """Return racks and systems as nodes: `GB200-NVL72` is 72 GPUs, `2xGB200-NVL72` are 144, `24xDGX-H100` 192."""
    found = _systems(text)
    if found is None:
        return None
    known, count, size = found.gpu, found.count, found.size
    if found.counts_gpus:
        made = Cluster(known, *default_nodes(count, known))
        _check_size(text, made)
        what = "racks" if found.is_rack else "systems"
        message = f"{text} is {count} GPUs, {made}; write {count}x{size}x{known.name} for {count} {what} of {size} GPUs"
        return made, (Assumption("nodes", f"{made.nodes}x{made.gpus_per_node}", message), *network_assumed(made))
    other = f"; write {count}x{known.name} for {'one GPU' if count == 1 else f'{count} GPUs'}"
    if found.is_rack:
        return _racks(text, known, count, other)
    made = Cluster(known, count, size)
    _check_size(text, made)
    message = f"{text} is {'one system' if count == 1 else f'{count} systems'} of {size} GPUs, {made}{other}"
    return made, (Assumption("nodes", f"{count}x{size}", message), *network_assumed(made))


def _racks(text: str, known: Gpu, count: int, more: str) -> tuple[Cluster, tuple[Assumption, ...]]:
    """Return the nodes of racks, on which a job runs, and what was assumed; one rack needs no network."""
    made = Cluster(known, count * known.nvlink_domain // known.gpus_per_node, known.gpus_per_node)
    _check_size(text, made)
    links = network_assumed(made) if count > 1 else ()
    return made, (_racks_assumed(text, made, count, more), *links)


def _racks_in_file(text: str, found: Cluster) -> Iterator[Assumption]:
    if found.racks:
        yield _racks_assumed(text, found, found.racks, f": a node of the rack has {found.gpus_per_node}")


def _racks_assumed(text: str, made: Cluster, count: int, more: str) -> Assumption:
    racks = f"{'one rack' if count == 1 else f'{count} racks'} of {made.gpu.nvlink_domain} GPUs"
    return Assumption("nodes", f"{made.nodes}x{made.gpus_per_node}", f"{text} is {racks}, {made}{more}")


def _described(text: str) -> tuple[Cluster, tuple[Assumption, ...]]:
    systems = _named_systems(text)
    if systems is not None:
        return systems
    parts = _parts(text)
    known = _gpu_in(text, parts)
    if parts.nodes and parts.count and parts.count % parts.nodes:
        raise _bad(text, f"{parts.count} GPUs cannot be in {parts.nodes} equal nodes", EXAMPLES)
    if parts.nodes:
        each = parts.each or (parts.count // parts.nodes if parts.count else known.gpus_per_node)
        if nodes_of_racks(known, parts.nodes, each) is not None:
            return _racks(text, known, parts.nodes, f": a node of the rack has {known.gpus_per_node}")
        made = Cluster(known, parts.nodes, each)
    else:
        made = Cluster(known, *default_nodes(parts.count or 1, known))
    _check_size(text, made)
    return made, tuple(_assumed(parts, made))


def _assumed(parts: _Parts, made: Cluster) -> Iterator[Assumption]:
    if parts.name is None:
        text = f"{made.gpu.name}, because no GPU was named; write {made.world}xA100-80, for example, for another"
        yield Assumption("gpu", made.gpu.name, text)
    else:
        yield from variant_assumed(parts.name, made)
    if parts.count is None and parts.nodes is None:
        yield Assumption("count", "1", _one_gpu(made.gpu))
    if parts.each is None and not (parts.nodes and parts.count):
        yield from nodes_assumed(made)
    yield from links_assumed(made)
    yield from network_assumed(made)


def _one_gpu(known: Gpu) -> str:
    more = f"2x{known.name} for two" if known.link == "pcie" else f"{known.gpus_per_node}x{known.name} for a node"
    return f"1 GPU, because no count was written; write {more}"


def _check_size(text: str, made: Cluster) -> None:
    if made.world > MAX_GPUS:
        raise _bad(text, f"more than {MAX_GPUS} GPUs")


def _parts(text: str) -> _Parts:
    """Return the parts of the first form that names a known GPU, or of counts alone."""
    plain = re.sub(r"\s+", " ", text.lower().translate(_TIMES_SIGNS))
    plain = _NUMBER_WORD.sub(lambda found: str(_NUMBER_WORDS[found[0]]), _FILLERS.sub("", plain)).strip()
    count, _, gpu_name = plain.partition("x")
    if count.isascii() and count.isdigit() and is_known(gpu_name):  # 8xh100: the usual form needs no pattern
        return _counted(text, {"count": count, "name": gpu_name})
    if is_known(plain) or _CARD.fullmatch(plain):
        return _Parts(plain)
    if found := (re.fullmatch(rf"({_N})?\s*x?\s*nvl\s*([0-9]+)(?:\s*racks?)?", plain)):
        raise _unnamed_rack(text, found[1] or "1", int(found[2]))
    unknown = None
    for form in _FORMS:
        groups = {} if (found := re.fullmatch(form, plain)) is None else found.groupdict()
        name = groups.get("name")
        if name is not None and not is_known(name):
            unknown = unknown or (groups if name[:1].isalpha() or _CARD.fullmatch(name) else None)
        elif groups and (name is not None or unknown is None or unknown["name"].startswith("node")):
            return _counted(text, groups)
    found = re.fullmatch(r"([0-9]+) ?x ?([a-z].*?) ?[x:] ?([0-9]+)", plain)
    if found and is_known(found[2]) and not is_known(f"{found[2]}-{found[3]}"):  # 2xA100x80 is of the memory
        raise _counts_around(text, *found.groups())
    if (other := instead_of(plain)) is not None:
        raise _bad(text, *other)
    if unknown is not None and (_unknown_gpu(unknown["name"]) or not _unknown_gpu(plain)):  # rtx40900 is not rt x 40900
        return _counted(text, unknown)
    if (found := re.fullmatch(rf"(.+) ({_N})", plain)) and is_known(found[1]):
        fix = f"{found[2]}x{gpu(found[1]).name}"
        raise _bad(text, f"write the count before the GPU: {fix}", [fix])
    near = _similar_instances(plain.split("x", 1)[-1] if plain[:1].isdigit() else plain)[:2]
    if not near and (error := _unknown_gpu(plain)) is not None:
        raise _bad(text, error.reason, [f"1x{name}" for name in error.fix])
    if plain.endswith(OTHER_FORMATS):
        raise _bad(text, FILE_LOOKS, EXAMPLES)
    reason = "not a cluster; write COUNTxGPU, NODESxGPUSxGPU, auto, or the path of a .toml file"
    raise _bad(text, reason, (*near, *EXAMPLES) if near else EXAMPLES)


OTHER_FORMATS = (".yaml", ".yml", ".json")


def _unknown_gpu(name: str) -> InputError | None:
    """Return the error for a text that is like the name of a GPU; None if it is like none."""
    try:
        gpu(name)
    except InputError as error:
        return error if error.fix and not name[:1].isdigit() else None
    return None


MAX_NODE = 15  # GPUs that a node has, at most, if another count beside it is larger


def _counts_around(text: str, first: str, name: str, last: str) -> InputError:
    """Return the error for a GPU between two counts: `16xH100x8`, `8xH100x16` and `4xH100x16` are 16 nodes."""
    known = gpu(name)
    is_node = int(first) == known.gpus_per_node or int(first) <= MAX_NODE < int(last)
    nodes, each = (last, first) if is_node else (first, last)
    fix = f"{nodes}x{each}x{known.name}"
    return _bad(text, f"both counts come before the GPU, nodes first: {fix}", [fix])


def _unnamed_rack(text: str, count: str, size: int) -> InputError:
    """Return the error for racks whose GPU is not named: `2xNVL72`."""
    names = [known.name for known in gpus() if known.nvlink_domain == size]
    fixes = [f"{count}x{name}-NVL{size}" for name in names if is_known(f"{name}-NVL{size}")]
    return _bad(text, "the GPU of the rack is missing", fixes or EXAMPLES)


def _counted(text: str, groups: dict[str, str]) -> _Parts:
    """Return matched parts with their counts as integers; a card's number is not taken for a count."""
    counts = {key: _as_int(text, groups[key]) for key in ("count", "nodes", "each") if groups.get(key)}
    name = groups.get("name")
    if name is None:
        _require_counts(text, counts)
    return _Parts(name=name, **counts)


def _require_counts(text: str, counts: dict[str, int]) -> None:
    """Raise if a number without a GPU name is probably a card's: `3070`, `2x6000`."""
    for key, value in counts.items():
        card = _CARD_NUMBER.fullmatch(str(value))
        if not card and (key != "each" or value <= LARGEST_NODE):
            continue
        what = f"{value} looks like the name of a card" if card else f"{value} GPUs are not one node"
        others = [n for other, n in counts.items() if other != key]
        near = [known.name for known in gpus() if str(value) in known.name]
        fixes = [f"{others[0] if others else 1}x{name}" for name in near] or list(EXAMPLES)
        more = "describe a card that the catalogue lacks in a .toml file"
        raise _bad(text, f"{what}; name the GPU (for {value:,} GPUs write {value}x{DEFAULT_GPU}); {more}", fixes)


def _as_int(text: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()):
        raise _bad(text, f"{number[:40]} is not a positive integer", EXAMPLES)
    if len(number.lstrip("0")) > len(str(MAX_GPUS)) or int(number) > MAX_GPUS:
        raise _bad(text, f"more than {MAX_GPUS} GPUs")
    if int(number) == 0:
        raise _bad(text, "a cluster has at least one GPU", EXAMPLES)
    return int(number)


def _gpu_in(text: str, parts: _Parts) -> Gpu:
    try:
        return gpu(parts.name or DEFAULT_GPU)
    except InputError as error:
        written = "x".join(str(n) for n in (parts.nodes, parts.each or parts.count) if n) or "1"
        raise _bad(text, error.reason, [f"{written}x{near}" for near in error.fix]) from None


def _bad(text: str, reason: str, fix: tuple[str, ...] | list[str] = ()) -> InputError:
    return InputError(reason, field="gpus", value=text[:200], fix=list(fix))
