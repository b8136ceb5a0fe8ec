"""A flat view of a recipe on a cluster, which rules check and costs estimate.

Every recipe field has one flat name (`tp`, `seq_length`, `cuda_graphs`), next to facts of the model and the cluster.
Each may hold one value or a numpy column, so the function that explains one bad layout also masks a million
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from itertools import groupby
from math import ceil, gcd
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.models import MLA, Attention, Dense, GatedDelta, LinearMixer, Mamba2, ModelSpec, find, reshape
from meshwright.recipes.adapter_targets import groups_of
from meshwright.recipes.model_changes import require_numbers, sizes
from meshwright.recipes.stage_layers import Balanced, stages_of
from meshwright.recipes.types import Engine, Recipe, recipe_fields

UNKNOWN_STEPS = 1_000_000_000  # of a run by epochs, before its data is counted: no rule finds it too short
Value = TypeVar("Value")
Column = Any  # int, float, bool or str, or a numpy array of them

VECTORIZED_NAMES = (
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "etp",
    "dp_shard",
    "dp_replicate",
    "sp",
    "micro_batch_size",
    "recompute",
    "strategy",
    "pp_schedule",
    "offload",
    "cp_comm",
    "world",
    "global_batch_size",
    "seq_length",
    "recompute_layers",
    "pp_micro_batches",
)
"""Fields that may be columns: the estimate of many layouts at once accepts them."""


class Case:
    """A recipe, its model, a cluster and an engine, with attributes by flat name."""

    def __init__(
        self,
        recipe: Recipe,
        model: ModelSpec,
        cluster: Cluster,
        engine: Engine = "meshwright",
        columns: dict[str, Column] | None = None,
        memory_of: Callable[[Case], Any] | None = None,
    ) -> None:
        self.recipe, self.model, self.cluster, self.engine = recipe, model, cluster, engine
        self._columns = columns or {}
        self._memory_of = memory_of
        self._memo: dict[Callable[[Case], Any], Any] = {}
        self._values = _readable(self._facts | self._recipe_values)
        vars(self).update(self._values)
        vars(self).update(_readable(self._columns))  # those of `replace` take precedence

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Column:
            """Recipe fields by flat name, and facts of the model and the cluster."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what defines the case: its cache has keys that cannot be pickled, such as functions of rules."""
        return (Case, (self.recipe, self.model, self.cluster, self.engine, self._columns, self._memory_of))

    def cached(self, compute: Callable[[Case], Value]) -> Value:
        """Return `compute(case)`, computed once per case: a case never changes."""
        if compute not in self._memo:
            self._memo[compute] = compute(self)
        value: Value = self._memo[compute]
        return value

    def replace(self, **columns: Column) -> Case:
        """Return the case with other values or numpy columns for some names."""
        other = Case.__new__(Case)
        merged = {**self._columns, **columns}
        values = other.__dict__
        values.update(self._values)  # of the recipe, model and cluster, which are the same
        values.update(_readable(merged))
        for name in _KEPT_NAMES:
            values[name] = getattr(self, name)
        values["_columns"], values["_memo"] = merged, {}
        return other

    def rebuild(self, recipe: Recipe | None = None, cluster: Cluster | None = None) -> Case:
        """Return a case with another recipe or cluster, without columns but calibration and failure rate."""
        kept: dict[str, Column] = {
            name: self._columns[name] for name in ("calibration", "mtbf_hours") if name in self._columns
        }
        where = cluster or self.cluster
        return Case(recipe or self.recipe, self.model, where, self.engine, kept, self._memory_of)

    def rows(self, chosen: Any) -> Case:
        """Select candidates by mask or index; a scalar index returns a case of plain values."""
        columns = {name: value[chosen] for name, value in self._columns.items() if isinstance(value, np.ndarray)}
        if np.ndim(columns.get("pp", ())) == 0 and isinstance(self.stage_layers, Balanced):
            columns["stage_layers"] = stages_of(self.stage_layers, self.layers, int(columns["pp"]))
        return self.replace(**{n: v.item() if isinstance(v, np.generic) else v for n, v in columns.items()})

    @cached_property
    def _recipe_values(self) -> dict[str, Column]:
        values: dict[str, Column] = {"goal": self.recipe.goal, "benchmark": self.recipe.benchmark}
        for section, names in _flat_names().items():
            part = getattr(self.recipe, section)
            values.update({flat: getattr(part, name) for name, flat in names})
        values["targets"] = self._target_groups()
        values["samples"] = 0  # of all epochs; not known until the data is counted
        values["packed_tokens"], values["packed_length"], values["longest_sample"] = 0.0, 0, 0
        values["mtbf_hours"] = None  # of one GPU; None for the planner's own
        values["rope_theta"], values["norm_eps"] = (
            self.recipe.architecture.rope_theta,
            self.recipe.architecture.norm_eps,
        )
        if self.recipe.train.epochs:
            values["steps"] = UNKNOWN_STEPS
        return values

    def _target_groups(self) -> tuple[str, ...]:
        """Return the groups of the adapters' targets; all-linear and patterns only those that the model has."""
        named = self.recipe.peft.targets
        facts = self._facts
        absent = () if facts["mamba_heads"] else ("mamba_in", "mamba_out")
        absent = absent if facts["heads"] or facts["delta_v_heads"] else (*absent, "qkv", "proj")
        return tuple(group for group in groups_of(named) if group in named or group not in absent)

    @cached_property
    def _facts(self) -> dict[str, Column]:
        return {**model_facts(self.model), **cluster_facts(self.cluster)}

    def with_samples(self, samples: int, tokens: float = 0.0, longest: int = 0) -> Case:
        """Return the case with the counted samples of all its epochs, and their steps.

        `tokens` of one epoch say how many packed samples another seq_length makes; `longest` is the longest document.
        """
        packed = bool(self.packing) or self.goal == "pretrain"
        known = tokens or samples * int(self.seq_length) / max(float(self.epochs), 1e-9)
        return self.replace(
            samples=samples,
            steps=ceil(samples / int(self.global_batch_size)),
            packed_tokens=known if packed and self.epochs else 0.0,
            packed_length=self.seq_length,
            longest_sample=longest,
        )

    @property
    def epoch_samples(self) -> Column:
        """Counted samples of all epochs with this seq_length: packed ones hold so many tokens; 0 if not counted."""
        if not self.packed_tokens:
            return self.samples
        each = np.maximum(np.ceil(self.packed_tokens / self.seq_length), 1)
        other = np.maximum(np.round(each * self.epochs), 1).astype(int)
        return np.where(self.seq_length == self.packed_length, self.samples, other)

    @property
    def updates(self) -> Column:
        """Steps of the run: those of its counted samples with this batch, else as the recipe says."""
        if isinstance(self.samples, int) and not self.samples:
            return self.steps
        samples = self.epoch_samples
        return np.where(samples > 0, -(-samples // self.global_batch_size), self.steps)

    @cached_property
    def memory(self) -> Any:
        """Memory of this case by part, in GiB, or None without a memory function."""
        return self._memory_of(self) if self._memory_of else None

    # Mesh arithmetic. Quotients round down; rules check divisibility.

    @cached_property
    def model_ranks(self) -> Column:
        """Ranks of one model replica; only KempnerForge multiplies them by ep."""
        return self.tp * self.pp * self.cp * (self.ep if self.engine == "kempnerforge" else 1)

    @cached_property
    def dp(self) -> Column:
        """Data-parallel ranks: the ranks that the other axes leave."""
        return _at_least_one(self.world // self.model_ranks)

    @cached_property
    def shard(self) -> Column:
        """Data-parallel ranks that shard one replica of the state, with -1 resolved."""
        rest = _at_least_one(self.dp // self.dp_replicate)
        if isinstance(self.dp_shard, int):
            return rest if self.dp_shard == -1 else _at_least_one(self.dp_shard)
        return np.where(self.dp_shard == -1, rest, _at_least_one(self.dp_shard))

    @cached_property
    def accumulation(self) -> Column:
        """Micro batches per step on one rank (gradient accumulation)."""
        return _at_least_one(self.global_batch_size // (self.micro_batch_size * self.dp))

    @cached_property
    def pass_micro_batches(self) -> Column:
        """Micro batches of one pass through the pipeline schedule: all of the step, unless the layout has fewer."""
        if isinstance(self.pp_micro_batches, int) and not self.pp_micro_batches:
            return self.accumulation
        is_limited = (self.pp > 1) & (self.pp_micro_batches > 0)
        return np.where(is_limited, np.minimum(self.accumulation, self.pp_micro_batches), self.accumulation)

    @cached_property
    def pipeline_passes(self) -> Column:
        """Passes through the pipeline schedule per step; each fills and drains the stages."""
        return -(-self.accumulation // self.pass_micro_batches)

    @cached_property
    def expert_ranks(self) -> Column:
        """Ranks of one pipeline stage, which expert parallelism regroups."""
        return _at_least_one(self.world // self.pp)

    @cached_property
    def expert_dp(self) -> Column:
        """Replicas of each expert: ranks of a stage over ep × etp."""
        return _at_least_one(self.expert_ranks // (self.ep * self.etp))

    @cached_property
    def stages(self) -> Column:
        """Stage chunks in the pipeline."""
        return self.pp * self.vp

    @cached_property
    def listed_stages(self) -> Column:
        """Stage chunks that stage_layers lists; 0 if every chunk has the same number of layers."""
        given = self.stage_layers
        return (self.layers % self.pp != 0) * self.pp if isinstance(given, Balanced) else len(given)

    @property
    def listed_layers(self) -> int:
        """Layers of all chunks that stage_layers lists."""
        given = self.stage_layers
        return int(self.layers) if isinstance(given, Balanced) else sum(given)

    @cached_property
    def split_layers(self) -> Column:
        """Layers to split into stages, with embedding and head if they count as layers."""
        return self.layers + self.embedding_as_layer * 1 + self.head_as_layer * 1

    @cached_property
    def fp8(self) -> Column:
        """Whether linear layers compute in 8 bits or fewer."""
        return self.matmul != "same"


_KEPT_NAMES = ("recipe", "model", "cluster", "engine", "_memory_of", "_values", "_recipe_values", "_facts")
_OWN_NAMES = frozenset((*vars(Case), *_KEPT_NAMES))
"""Attributes of a case that are not values by flat name."""


def _readable(values: dict[str, Column]) -> dict[str, Column]:
    if values.keys().isdisjoint(_OWN_NAMES):
        return values
    return {name: value for name, value in values.items() if name not in _OWN_NAMES}


@cache
def _flat_names() -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the fields of every section by name and flat name; model facts already include the architecture."""
    return {
        section: tuple((key.partition(".")[2], info.flat) for key, info in fields)
        for section, fields in groupby(recipe_fields().items(), lambda field: field[0].partition(".")[0])
        if section != "architecture"
    }


def _at_least_one(value: Column) -> Column:
    """Return the value, at least 1; plain integers avoid numpy, which is many times faster."""
    return max(value, 1) if isinstance(value, int) else np.maximum(value, 1)


def model_of(recipe: Recipe) -> ModelSpec:
    """Return the model of a recipe, with its architecture changes applied."""
    return resized(recipe, find(recipe.model))


def resized(recipe: Recipe, model: ModelSpec) -> ModelSpec:
    """Return a model with the architecture changes of a recipe applied."""
    changes = sizes(recipe)
    require_numbers(recipe, model)
    try:
        return reshape(model, **changes) if changes else model
    except InputError as error:
        if error.field not in changes:
            raise
        key = f"architecture.{error.field}"
        raise InputError(error.reason, key, error.value, error.fix or [f"{key}=null"]) from error


def _gcd(values: list[int]) -> int:
    """Return the greatest common divisor, or 0 for an empty list."""
    return gcd(*values) if values else 0


def model_facts(model: ModelSpec) -> dict[str, Column]:
    """Return the model facts for rules; a degree that divides the gcd of heads divides those of every layer."""
    attention = [m for m, _ in model.mixers(Attention)]
    mla = [m for m, _ in model.mixers(MLA)]
    mamba = [m for m, _ in model.mixers(Mamba2)]
    delta = [m for m, _ in model.mixers(GatedDelta)]
    scans = [m for m, _ in model.mixers(LinearMixer) if isinstance(m, LinearMixer) and not m.per_key]
    unusual = [m for m, _ in model.mixers(LinearMixer) if isinstance(m, LinearMixer) and m.per_key]
    linear = [m.heads for m in scans if isinstance(m, LinearMixer) and m.kind != "mamba"]
    channels = [m.heads for m in scans if isinstance(m, LinearMixer) and m.kind == "mamba"]
    # one compressed key head serves all query heads, and groups of heads share output projections: tp divides none
    whole = any(isinstance(m, Attention) and m.compressor is not None for m in attention)
    beside = [g.layer.cross for g in model.groups if model.kind != "diffusion" and g.layer.cross is not None]
    dense = [g.layer.ffn.width for g in model.groups if isinstance(g.layer.ffn, Dense)]
    moe = model.moe
    return {
        "layers": model.num_layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "tied": model.tied,
        "max_seq_length": model.max_seq_length,
        "mtp_layers": model.mtp_layers,
        "heads": 1 if whole else _gcd([m.heads for m in attention + mla + beside + unusual]),  # type: ignore[union-attr]
        "kv_heads": _gcd([m.kv_heads for m in attention + beside if isinstance(m, Attention)]),
        "is_mla": bool(mla),
        "is_hybrid": bool(mamba or delta or scans),
        "mamba_heads": _gcd([m.heads for m in mamba if isinstance(m, Mamba2)] + channels),
        "mamba_groups": _gcd([m.groups for m in mamba if isinstance(m, Mamba2)]),
        "delta_k_heads": _gcd([m.k_heads for m in delta if isinstance(m, GatedDelta)] + linear),
        "delta_v_heads": _gcd([m.v_heads for m in delta if isinstance(m, GatedDelta)] + linear),
        "has_sliding": any(isinstance(m, Attention) and m.window for m in attention),
        "has_compressed_keys": whole,
        "ffn": _gcd(dense),
        "is_moe": moe is not None,
        "experts": moe.experts if moe else 0,
        "topk": moe.topk if moe else 0,
        "expert_width": moe.width if moe else 0,
        "expert_bias": moe.bias if moe else False,
        "balance_bias": moe.balance_bias if moe else False,
        "has_shared_experts": bool(moe and moe.shared_width),
        "has_vision": model.vision is not None,
        "is_diffusion": model.kind == "diffusion",
        "family": model.family,
        "params_total": model.params.total,
        "params_active": model.params.active,
        "params_routed": model.params.routed,
    }


def cluster_facts(cluster: Cluster) -> dict[str, Column]:
    """Return the cluster facts for rules."""
    return {
        "world": cluster.world,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "nvlink_domain": cluster.nvlink_domain,
        "gpu": cluster.gpu.name,
        "gpu_arch": cluster.gpu.arch,
        "capability": cluster.gpu.capability,
        "capacity_gib": cluster.gpu.memory_gib,
        "host_gib": cluster.gpu.host_gib,
        "gpu_precisions": frozenset(cluster.gpu.peak_tflops),
    }
