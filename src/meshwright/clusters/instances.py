"""Cloud instance types and their GPUs."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec


class Instance(msgspec.Struct, frozen=True):
    """One instance type: its GPUs, and where that is published."""

    name: str
    count: int
    gpu: str
    cloud: str
    checked: str  # year and month


def instance(name: str) -> Instance | None:
    """Return an instance type by name, ignoring case and Azure's prefix."""
    return _by_key().get(_key(name))


def instance_names() -> list[str]:
    """Return the names of all instance types."""
    return [found.name for found in _by_key().values()]


def _key(name: str) -> str:
    return name.strip().lower().removeprefix("standard_")


@cache
def _by_key() -> dict[str, Instance]:
    with Path(__file__).with_name("instances.toml").open("rb") as file:
        tables = tomllib.load(file)
    checked = tables.pop("checked")
    found = {}
    for cloud, table in tables.items():
        for name, gpus in table["types"].items():
            count, _, gpu = gpus.partition("x")
            found[_key(name)] = Instance(name, int(count), gpu, cloud, checked)
    return found
