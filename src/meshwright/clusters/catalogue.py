"""The catalogue of GPU types, found by any usual form of their name."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from meshwright import extensions
from meshwright.clusters.tables import BadTableError, read_gpu
from meshwright.clusters.types import Gpu
from meshwright.errors import closest, unknown

_VENDOR_WORDS = re.compile(r"^(?:nvidia|amd|geforce|instinct|tesla)+(?=.)")


def gpu(name: str) -> Gpu:
    """Return a GPU type by name, ignoring case, separators and vendor (`h100`, `NVIDIA H100 80GB HBM3`)."""
    if not is_known(name):
        names = [known.name for known in gpus()]
        error = unknown("GPU", name.strip()[:80], names, "meshwright gpus")
        error.fix = error.fix or closest(re.sub(r"x[0-9]+$", "", name.strip()[:80]), names)  # 8xH100x2 names an H100
        raise error
    return _by_key()[normalize_name(name)]


def is_known(name: str) -> bool:
    """Return whether this is the name of a GPU type."""
    return normalize_name(name) in _by_key()


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU type of the catalogue, in file order, then those of extensions."""
    with Path(__file__).with_name("gpus.toml").open("rb") as file:
        tables = tomllib.load(file)
    found = {normalize_name(name): read_gpu({"name": name, **table}) for name, table in tables.items()}
    for path, added in extensions.tables("gpus.toml"):
        try:
            entries = [(normalize_name(name), read_gpu({"name": name, **table})) for name, table in added.items()]
        except (BadTableError, TypeError) as error:
            raise extensions.invalid(path, str(error)) from error
        extensions.add_new(found, path, entries, "GPU type {}".format)
    return tuple(found.values())


def normalize_name(name: str) -> str:
    """Return a GPU name without case, separators and vendor."""
    return _VENDOR_WORDS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


@cache
def _by_key() -> dict[str, Gpu]:
    return {normalize_name(name): known for known in gpus() for name in (known.name, *known.aliases)}
