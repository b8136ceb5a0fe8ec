"""The recipe index: find recipes by name or query, and the closest one for a model without a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from math import log2, prod

import msgspec

from meshwright import file_access
from meshwright.clusters import DEFAULT_GPU
from meshwright.clusters import is_known as is_known_gpu
from meshwright.display import Entry
from meshwright.errors import InputError, unknown
from meshwright.models import GatedDelta, LinearMixer, Mamba2, ModelSpec, find, is_own_name
from meshwright.models import search as search_models
from meshwright.recipes import build
from meshwright.recipes.build import cluster_name
from meshwright.recipes.registry import Published, Purpose, Registered, library, registry
from meshwright.recipes.types import Goal, Recipe

COUNT = re.compile("[0-9]{1,6}")
_GAP = re.compile(r"[-\s.]+")
FAMILY_HEAD_START = 1.0
"""log2 of the size ratio that a recipe of the same family gains: it wins over one closer by up to a factor of two."""


SAME_GOAL = {"pretrain": {"pretraining"}, "sft": {"finetune", "finetuning"}, "peft": {"lora", "adapters"}}
SAME_KIND = {
    "causal_lm": {"text"},
    "vision_language": {"vision", "vl", "vlm", "multimodal", "images"},
    "diffusion": {"diffusion", "images", "video"},
}


class IndexEntry(Entry, msgspec.Struct, frozen=True, dict=True):
    """One recipe of the index."""

    name: str
    family: str
    model: str
    goal: Goal
    gpus: int
    gpu: str
    seq_length: int
    benchmark: bool
    published: Published
    purpose: Purpose = "production"
    matmul: str = "same"  # number format in linear layers
    optimizer: str = "adamw"

    @property
    def general(self) -> bool:
        """Whether another model may start from it: a full training in 16 bits."""
        return self.purpose == "production" and self.matmul == "same"

    @cached_property
    def params_total(self) -> int:
        """Parameters of the recipe's model."""
        return find(self.model).params.total

    @cached_property
    def search_terms(self) -> frozenset[str]:
        """Words that match the recipe besides those in its name."""
        kind, experts, mixer = architecture_class(find(self.model))
        gpu, length = _normalize(self.gpu), self.seq_length
        return frozenset(
            {
                *self.family.split("_"), *self.model.split("_"), self.goal, *SAME_GOAL[self.goal],
                *SAME_KIND[kind], experts, mixer, gpu, *gpu.split("_"), f"{self.gpus}x{gpu}",
                str(length), f"{length // 1024}k",
            }
        )  # fmt: skip


def names() -> list[str]:
    """Return the names of all recipes."""
    return list(registry())


def load(name: str) -> Recipe:
    """Return a recipe by name; `_config` is optional, case and dashes do not matter."""
    return _registered(resolve(name)).build()


def resolve(name: str) -> str:
    """Return the full name of a recipe from any usual form of it."""
    plain = _normalize(name)
    for benchmark in (False, True):  # the library first, so that benchmarks are not imported
        if plain in (aliases := _name_aliases(benchmark)):
            return aliases[plain]
    if file_access.exists(f"{name}/config.json"):
        reason = f"is no recipe, and a folder whose name may mean a shipped model: ./{name} is the folder's model"
        raise InputError(reason, "recipe", name, (f"./{name}",))
    raise unknown("recipe", name, names(), "meshwright recipes")


def is_known(name: str) -> bool:
    """Return whether a recipe of this name exists."""
    plain = _normalize(name)
    if plain in _name_aliases(False):
        return True
    return not is_own_name(name) and plain in _name_aliases(True)  # no benchmark has a model's name: none is imported


def published_recipe(name: str) -> Recipe:
    """Return a recipe with its originally published values, to compare with the shipped ones."""
    entry = _registered(resolve(name))
    shipped, published = entry.build(), entry.published
    stated = {
        "tp": published.tp,
        "pp": published.pp,
        "cp": published.cp,
        "ep": published.ep,
        "seq_length": published.seq,
    }
    values = {**published.start, **{flat: value for flat, value in stated.items() if value is not None}}
    gpus, gpu = _gpus(shipped.cluster)
    original = published.gpus or values.pop("gpus", gpus)
    return build.change(shipped, values, f"{original}x{gpu}" if original != gpus else shipped.cluster)


@lru_cache(maxsize=3)
def entries(benchmark: bool | None = None) -> tuple[IndexEntry, ...]:
    """Return the index of the library (False), the benchmarks (True) or both (None)."""
    if benchmark is None:
        return entries(False) + entries(True)
    chosen = library() if not benchmark else [name for name in registry() if name not in library()]
    return tuple(_entry(name) for name in chosen)


def _registered(name: str) -> Registered:
    return library()[name] if name in library() else registry()[name]


def search(
    query: str | None = None,
    *,
    goal: Goal | None = None,
    family: str | None = None,
    benchmark: bool | None = None,
    max_gpus: int | None = None,
    seq: int | None = None,
) -> list[IndexEntry]:
    """Return the recipes that match all criteria, best match of the query first.

    Words of a query match name, family, model, goal, GPUs (8xH100), tokens (128k) or features (moe, vision, lora).
    A family includes its branches (qwen: qwen_moe and qwen_vl too); seq is the minimum sequence length.
    """
    branches = _branches(family)
    found = [
        entry
        for entry in entries(benchmark)
        if (goal is None or entry.goal == goal)
        and (family is None or entry.family in branches)
        and (max_gpus is None or entry.gpus <= max_gpus)
        and (seq is None or entry.seq_length >= seq)
    ]
    return found if not query else _matching(query, found)


def family(name: str) -> str:
    """Return the family of a recipe."""
    return _registered(resolve(name)).family


def published(name: str) -> Published:
    """Return the published values of a recipe."""
    return _registered(resolve(name)).published


def families() -> list[str]:
    """Return the families of all recipes."""
    return sorted({entry.family for entry in registry().values()})


def _branches(family: str | None) -> set[str]:
    if family is None:
        return set()
    wanted = _normalize(family)
    found = {known for known in families() if known == wanted or known.startswith(f"{wanted}_")}
    if not found:
        raise unknown("family", family, families())
    return found


def for_model(model: str, goal: Goal) -> list[IndexEntry]:
    """Return the library recipes of one catalogue model, shortest sequences first."""
    found = [entry for entry in entries(False) if entry.model == model and entry.goal == goal]
    return sorted(found, key=lambda entry: entry.seq_length)


def closest(spec: ModelSpec, goal: Goal, seq: int | None = None) -> IndexEntry:
    """Return the recipe for a model without one: same type of architecture, nearest size, same family first."""
    every, known = entries(False), spec.__dict__.setdefault("_closest", {})  # `size` asks for every GPU count
    if (goal, seq) not in known or known[goal, seq][0] is not every:
        candidates = [entry for entry in every if entry.goal == goal and entry.general]
        known[goal, seq] = every, min(candidates, key=lambda entry: _distance(entry, spec, seq))
    found: IndexEntry = known[goal, seq][1]
    return found


def _distance(entry: IndexEntry, spec: ModelSpec, seq: int | None) -> tuple[float, ...]:
    other = find(entry.model)
    differing = sum(
        mine != theirs for mine, theirs in zip(architecture_class(spec), architecture_class(other), strict=True)
    )
    size = abs(log2(max(spec.params.total, 1) / max(other.params.total, 1)))
    bonus = FAMILY_HEAD_START if spec.family == other.family else 0.0
    return (
        differing,
        max(size - bonus, 0.0) if bonus else size,
        (spec.num_layers, spec.hidden, spec.vocab) != (other.num_layers, other.hidden, other.vocab),
        size,
        entry.family != spec.family,  # recipes of another trainer for a model of this family
        abs(log2((seq or entry.seq_length) / entry.seq_length)),
        entry.seq_length,
    )


def architecture_class(spec: ModelSpec) -> tuple[str, str, str]:
    """Return the modality, moe or dense, and hybrid or attention; these are compared before sizes."""
    hybrid = any(spec.mixers(kind) for kind in (Mamba2, GatedDelta, LinearMixer))
    return spec.kind, "moe" if spec.moe else "dense", "hybrid" if hybrid else "attention"


def _entry(name: str) -> IndexEntry:
    entry = _registered(name)
    built = entry.build()
    gpus, gpu = _gpus(built.cluster)
    return IndexEntry(
        name=name,
        family=entry.family,
        model=built.model,
        goal=built.goal,
        gpus=gpus,
        gpu=gpu,
        seq_length=built.data.seq_length,
        benchmark=built.benchmark,
        published=entry.published,
        purpose=entry.purpose,
        matmul=built.precision.matmul,
        optimizer=built.optimizer.name,
    )


@lru_cache(maxsize=256)
def _gpus(cluster: str) -> tuple[int, str]:
    """Return GPU count and type of a recipe's cluster string, e.g. 4x8xH100."""
    *counts, gpu = cluster_name(cluster).split("x")
    return prod(int(count) for count in counts), gpu or DEFAULT_GPU


def _normalize(name: str) -> str:
    return _GAP.sub("_", name.strip().lower())


@lru_cache(maxsize=2)
def _name_aliases(benchmark: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in registry() if benchmark else library():
        plain = _normalize(name)
        found[plain] = name
        found.setdefault(plain.removesuffix("_config"), name)
    return found


def _matching(query: str, found: Iterable[IndexEntry]) -> list[IndexEntry]:
    """Match the exact name; else names with the query as prefix, then with its words, then by search terms.

    If nothing matches, similar names, unless the query names a GPU type, which is not a typo.
    """
    pool = {_normalize(entry.name): entry for entry in found}
    wanted = _normalize(query)
    for exact in (wanted, f"{wanted}_config"):
        if exact in pool:
            return [pool[exact]]
    ranked: list[str] = []
    for text in dict.fromkeys((_with_version(query), wanted)):
        words = [_one_count(word) for word in text.split("_") if word]
        prefixed = [name for name in pool if name.startswith(text)]
        worded = [name for name in pool if all(_is_in(word, name) for word in words)]
        about = [
            name
            for name, entry in pool.items()
            if words and all(_is_in(w, name) or w in entry.search_terms for w in words)
        ]
        ranked = ranked or (list(dict.fromkeys(prefixed + worded + about)) if words else [])
    if not ranked and not models_named(query) and not any(is_known_gpu(word.split("x")[-1]) for word in words):
        ranked = _similar_names(wanted, list(pool))
    return [pool[name] for name in ranked]


def models_named(query: str) -> list[str]:
    """Return the shipped models that a query names, besides its words for goals: llama 3.2 lora."""
    goals = {word for goal, words in SAME_GOAL.items() for word in (goal, *words)}
    words = [word for word in _with_version(query).split("_") if word and word not in goals]
    return search_models(" ".join(words)) if any(re.search("[a-z]", word) for word in words) else []


def _with_version(query: str) -> str:
    """Return a query with versions and sizes as names have them: llama 3.2 is llama32, 1.7b is 1p7b."""
    sized = re.sub(r"(?<=\d)\.(?=\d+[bmt]\b)", "p", query.strip().lower())
    joined = re.sub(r"(?<=[a-z])[-_\s]+(?=\d+\.\d+(?![\da-z]))", "", sized)
    return _normalize(re.sub(r"(?<=\d)\.(?=\d)", "", joined))


def _is_in(word: str, name: str) -> bool:
    """Return whether a name contains a word; a number must be a whole one, which 2 is not in 128k."""
    return word in name if not word.isdigit() else re.search(rf"(?<!\d){word}(?!\d)", name) is not None


def _one_count(word: str) -> str:
    """Return a cluster with its total GPU count, as in the index: 4x8xh100 is 32xh100."""
    *counts, last = word.split("x")
    return f"{prod(map(int, counts))}x{last}" if len(counts) > 1 and all(COUNT.fullmatch(c) for c in counts) else word


def _similar_names(wanted: str, names: list[str]) -> list[str]:
    from rapidfuzz import fuzz, process

    near = process.extract(wanted, names, scorer=fuzz.token_set_ratio, limit=20, score_cutoff=70)
    if not near:
        near = process.extract(wanted, names, scorer=fuzz.WRatio, limit=20, score_cutoff=75)
    return [name for name, _, _ in near]
