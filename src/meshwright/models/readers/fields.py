"""Reading a config key by key: every value is checked, and what was read is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import InputError

MAX_LAYERS = 10_000  # far above any model; keeps a mistyped depth from eating the memory
MAX_SIZE = 1_000_000_000

# Keys that change shapes in some architecture. One that is set and that the architecture's reader does not know is an
# error: the file describes another model than the one we would count.
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

    def error(self, key: str, reason: str) -> InputError:
        """The error for one key of this section, naming the value it has."""
        value = self.data.get(key)
        shown = None if value is None else repr(value)[:80]
        return InputError(reason, field=self.where + key, value=shown)

    def raw(self, key: str) -> Any:
        """The value under any of the key's spellings, or its default; a key without either is an error."""
        spellings = (key, *self.aliases.get(key, ()))
        self.read.update(spellings)
        given = [name for name in spellings if name in self.data]
        for other in given[1:]:
            if self.data[other] != self.data[given[0]]:
                raise self.error(
                    other, f"contradicts {given[0]}={self.data[given[0]]!r}; they are two names of one thing"
                )
        if given:
            return self.data[given[0]]
        if key in self.defaults:
            return self.defaults[key]
        raise InputError(
            f"the config does not have the key {key!r}, which this architecture needs", field=self.where + key
        )

    def has(self, key: str) -> bool:
        """Whether the key, under any spelling, is there and not null."""
        return any(self.data.get(name) is not None for name in (key, *self.aliases.get(key, ())))

    def size(self, key: str, most: int = MAX_SIZE) -> int:
        """A whole number of at least 1."""
        return self._whole(key, self.raw(key), least=1, most=most)

    def count(self, key: str, most: int = MAX_SIZE) -> int:
        """A whole number of at least 0."""
        return self._whole(key, self.raw(key), least=0, most=most)

    def optional_size(self, key: str) -> int | None:
        """A whole number of at least 1, or None for null."""
        value = self.raw(key)
        return None if value is None else self._whole(key, value, least=1, most=MAX_SIZE)

    def flag(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.raw(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.raw(key)
        if not isinstance(value, str) or not value:
            raise self.error(key, "must be a string")
        return value

    def words(self, key: str, allowed: Iterable[str]) -> tuple[str, ...] | None:
        """A list of words from a fixed set, or None for null."""
        value = self.raw(key)
        if value is None:
            return None
        known = tuple(allowed)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(key, "must be a list of strings")
        for word in value:
            if word not in known:
                raise self.error(key, f"holds {word!r}; known: {', '.join(known)}")
        return tuple(value)

    def places(self, key: str, length: int) -> frozenset[int]:
        """A list of layer numbers below length; null counts as empty."""
        value = self.raw(key)
        if value is None:
            return frozenset()
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "must be a list of layer numbers")
        for place in value:
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < length:
                raise self.error(key, f"holds {place!r}, which is not a layer number below {length}")
        return frozenset(value)

    def section(
        self, key: str, defaults: Mapping[str, Any] | None = None, aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> Fields:
        """The fields of a nested object; a missing or null one is empty, so its defaults speak."""
        self.read.add(key)
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return Fields(value, defaults, aliases, where=f"{self.where}{key}.")

    def refuse_unread(self, architecture: str) -> None:
        """Stop at a key that would change shapes and that this architecture does not have."""
        known = self.read | set(self.defaults) | {name for names in self.aliases.values() for name in names}
        for key in SHAPE_KEYS:
            if key not in known and self.data.get(key):
                raise self.error(
                    key, f"{architecture} models have no such key; the file describes another architecture"
                )

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError("must be a whole number", field=self.where + key, value=repr(value)[:80])
        if not least <= value <= most:
            raise InputError(f"must be between {least} and {most}", field=self.where + key, value=value)
        return value


def require_divisible(fields: Fields, part_key: str, part: int, whole_key: str, whole: int) -> None:
    """Stop when one size does not divide another."""
    if whole % part:
        raise InputError(
            f"{whole_key}={whole} is not divisible by {part_key}={part}", field=fields.where + part_key, value=part
        )
