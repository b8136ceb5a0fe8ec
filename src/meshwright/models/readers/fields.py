"""Read a config key by key: validate every value and record the keys that were read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from meshwright.errors import InputError
from meshwright.similar import closest

MAX_LAYERS = 10_000  # far above any model; a mistyped depth must not exhaust memory
MAX_SIZE = 1_000_000_000
MOST_LETTERS = 2  # that a mistyped key has more or less than the one that is meant; short forms have more

# Keys that change shapes in some architecture. If one is set that the architecture's reader does not support, the
# parameter count would be wrong, so it is an error.
SHAPE_KEYS = (
    "add_cross_attention",
    "attention_bias",
    "attention_out_bias",
    "block_configs",
    "experts_per_layer",
    "first_k_dense_replace",
    "full_attention_interval",
    "hidden_size_per_layer_input",
    "hybrid_override_pattern",
    "index_n_heads",
    "index_topk",
    "kv_lora_rank",
    "layers_block_type",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
    "mlp_bias",
    "mlp_only_layers",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "mtp_num_hidden_layers",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    "use_bias",
    "use_qk_norm",
)


class UnsupportedValueError(InputError):
    """A valid value of a key that makes other shapes than a reader knows; transformers may build them."""


_TAKEN: ContextVar[dict[str, Any] | None] = ContextVar("taken defaults", default=None)


@contextmanager
def collect_defaults() -> Iterator[dict[str, Any]]:
    """Collect the sizes and names that readers take from defaults because a file does not have them, by key."""
    taken: dict[str, Any] = {}
    before = _TAKEN.set(taken)
    try:
        yield taken
    finally:
        _TAKEN.reset(before)


def _record_default(key: str, value: Any) -> None:
    taken = _TAKEN.get()
    if taken is not None and value and isinstance(value, (int, str)) and not isinstance(value, bool):
        taken[key] = value


class Fields:
    """The keys of one config section, with the defaults that transformers would fill in."""

    def __init__(
        self,
        data: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        where: str = "",
    ) -> None:
        self.data = data
        self.defaults = defaults or {}
        self.aliases = aliases or {}
        self.where = where
        self.read: set[str] = set()
        self.passed: set[str] = set()  # shape keys of other architectures that are accepted and have no effect
        self.fallbacks: Mapping[str, Any] = {}  # of a config class: defaults of keys that may not be supported
        self.derived: dict[str, Any] = {}  # values that follow from other keys

    def at(self, overrides: Mapping[str, Any]) -> Fields:
        """Return the same section with other values of some keys, such as those of one layer."""
        if not overrides:
            return self
        other = Fields(self.data, self.defaults, self.aliases, self.where)
        other.read, other.passed, other.derived = self.read, self.passed, {**self.derived, **overrides}
        other.fallbacks = self.fallbacks
        return other

    def spelled(self, key: str) -> str:
        """Return the key as the config spells it: itself or the alias that is present."""
        return next((name for name in (key, *self.aliases.get(key, ())) if name in self.data), key)

    def error(self, key: str, reason: str) -> InputError:
        """Return the error for one key of this section, with its value."""
        key = self.spelled(key)
        value = self.data.get(key)
        shown = None if value is None else repr(value)[:80]
        return InputError(reason, field=self.where + key, value=shown)

    def unsupported(self, key: str, reason: str) -> UnsupportedValueError:
        """Return the error for a valid value of one key that this reader does not know."""
        error = self.error(key, reason)
        return UnsupportedValueError(error.reason, error.field, error.value)

    def raw(self, key: str) -> Any:
        """Return the value of the key or its aliases, or the default; raise if there is neither."""
        names = (key, *self.aliases.get(key, ()))
        self.read.update(names)
        if key in self.derived:
            return self.derived[key]
        present = [name for name in names if name in self.data]
        for other in present[1:]:
            if self.data[other] != self.data[present[0]]:
                raise self.error(other, f"contradicts {present[0]}={self.data[present[0]]!r}, its alias")
        if present:
            return self.data[present[0]]
        for values in (self.defaults, self.fallbacks):
            for name in names:
                if name in values:
                    _record_default(self.where + key, values[name])
                    return values[name]
        others = "".join(f" (or {name!r})" for name in names[1:])
        reason = f"the config is missing the key {key!r}{others}, which this architecture needs"
        near = self.mistyped(key)
        hint, fix = (f"; is {near} a typing error?", (f'"{key}": {json.dumps(self.data[near])}',)) if near else ("", ())
        raise InputError(reason + hint, field=self.where + key, fix=fix)

    def has(self, key: str) -> bool:
        """Return whether the key or an alias is set and not null."""
        return any(self.data.get(name) is not None for name in (key, *self.aliases.get(key, ())))

    def mistyped(self, key: str) -> str:
        """Return the key of the file that may be a typing error of an absent one; empty if there is none."""
        names = (key, *self.aliases.get(key, ()))
        unread = [name for name in self.data if name not in self.read and name not in self.defaults]
        found = (near for name in names for near in closest(name, unread) if abs(len(near) - len(name)) <= MOST_LETTERS)
        return next(found, "")

    def size(self, key: str, most: int = MAX_SIZE) -> int:
        """Return an integer of at least 1."""
        return self._integer(key, self.raw(key), least=1, most=most)

    def count(self, key: str, most: int = MAX_SIZE) -> int:
        """Return an integer of at least 0."""
        return self._integer(key, self.raw(key), least=0, most=most)

    def optional_size(self, key: str) -> int | None:
        """Return an integer of at least 1, or None for null."""
        value = self.raw(key)
        return None if value is None else self._integer(key, value, least=1, most=MAX_SIZE)

    def flag(self, key: str) -> bool:
        """Return a boolean; null counts as false."""
        value = self.raw(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str) -> str:
        """Return a non-empty string."""
        value = self.raw(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "must be a string")
        return value

    def words(self, key: str, allowed: Iterable[str]) -> tuple[str, ...] | None:
        """Return a list of names from a fixed set, or None for null."""
        value = self.raw(key)
        if value is None:
            return None
        known = tuple(allowed)
        if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
            raise self.error(key, "must be a list of strings")
        for word in value:
            if word not in known:
                raise self.error(key, f"unknown value {word!r}; known: {', '.join(known)}")
        return tuple(value)

    def places(self, key: str, length: int) -> frozenset[int]:
        """Return a list of layer indices below length; null counts as empty."""
        value = self.raw(key)
        if value is None:
            return frozenset()
        if not isinstance(value, (list, tuple, frozenset)):
            raise self.error(key, "must be a list of layer indices")
        for place in value:
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < length:
                raise self.error(key, f"{place!r} is not a layer index below {length}")
        return frozenset(value)

    def section(
        self, key: str, defaults: Mapping[str, Any] | None = None, aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> Fields:
        """Return the fields of a nested object; a missing or null one uses its defaults."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Fields(value, defaults, aliases, where=f"{self.where}{key}.")

    def reject_unread(self, architecture: str) -> None:
        """Raise for a shape key that this architecture does not have."""
        known = (
            self.read | self.passed | set(self.defaults) | {name for names in self.aliases.values() for name in names}
        )
        for key in SHAPE_KEYS:
            if key not in known and self.data.get(key):
                raise self.error(
                    key, f"{architecture} models do not have this key; the file describes another architecture"
                )

    def _integer(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            name = self.spelled(key)
            meant = _as_integer(value)
            fix = (f'"{name}": {meant}',) if meant is not None and least <= meant <= most else ()
            raise InputError("must be an integer", field=self.where + name, value=repr(value)[:80], fix=fix)
        if not least <= value <= most:
            raise InputError(f"must be between {least} and {most}", field=self.where + self.spelled(key), value=value)
        return value


def _as_integer(value: Any) -> int | None:
    """Return the integer that a text or a float is; None if it is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def require_divisible(
    fields: Fields, part_key: str, part: int, whole_key: str, whole: int, fix: tuple[str, ...] = ()
) -> None:
    """Raise if one size does not divide another."""
    if whole % part:
        raise _indivisible(fields, part_key, part, whole_key, whole, fix)


def _indivisible(
    fields: Fields, part_key: str, part: int, whole_key: str, whole: int, fix: tuple[str, ...]
) -> InputError:
    """Return the error for a size that does not divide another, with the nearest that do."""
    reason = f"{whole_key}={whole} is not divisible by {part_key}={part}"
    near = [max(n for n in range(1, min(part, whole) + 1) if whole % n == 0)]
    near += [n for n in range(part + 1, min(2 * part, whole) + 1) if whole % n == 0][:1]
    if not fields.has(part_key):
        reason += f", the default of a file without {part_key}"
        if mistyped := fields.mistyped(part_key):
            reason, near = f"{reason}; is {mistyped} a typing error?", [fields.data[mistyped]]
    values = tuple(f'"{fields.spelled(part_key)}": {json.dumps(one)}' for one in near)
    return InputError(reason, field=fields.where + part_key, value=part, fix=(*values, *fix))
