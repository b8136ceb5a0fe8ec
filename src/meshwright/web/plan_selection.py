"""Which plans the static site has: popular models, on the clusters that train models of their size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from meshwright import api
from meshwright.errors import InputError

POPULAR = "popular"
MODELS = (
    "llama31_8b llama31_70b llama31_405b llama32_1b llama32_3b"
    " qwen3_600m qwen3_4b qwen3_8b qwen3_14b qwen3_32b qwen3_30b_a3b qwen3_235b_a22b qwen3_next_80b_a3b"
    " qwen35_4b qwen35_9b qwen35_27b qwen35_35b_a3b qwen35_397b_a17b qwen3_vl_8b qwen25_7b qwen25_32b qwen25_72b"
    " deepseek_v3 deepseek_v2_lite kimi_k2 glm45_355b glm45_air_106b gpt_oss_20b gpt_oss_120b"
    " gemma3_vl_12b gemma3_vl_27b mistral_7b mixtral_8x7b ministral3_8b phi4_14b smollm2_1p7b"
    " nemotron_3_nano nemotron_3_super nemotron_3_ultra"
)
"""Names of the catalogue: the models most asked for, and the newest of each family."""
CLUSTERS: Mapping[float, Mapping[str, str]] = {
    3e9: {
        "pretrain": "8xA100-80 8xH100 8xB200",
        "sft": "1xRTX4090 1xH100 8xH100",
        "peft": "1xRTX4090 1xA100-40 1xH100",
    },
    12e9: {
        "pretrain": "8xH100 64xH100 64xA100-80 8xB200",
        "sft": "1xH100 8xH100 8xA100-80",
        "peft": "1xRTX4090 1xA100-80 1xH100",
    },
    40e9: {
        "pretrain": "32xH100 64xH100 64xA100-80 64xB200",
        "sft": "8xH100 16xH100 8xH200",
        "peft": "1xRTX5090 1xH100 8xH100",
    },
    130e9: {
        "pretrain": "64xH100 128xH100 256xH100 64xB200",
        "sft": "16xH100 8xH200 8xB200",
        "peft": "8xA100-80 8xH100 1xH200",
    },
    450e9: {
        "pretrain": "64xH100 256xH100 512xH100 72xGB200",
        "sft": "32xH100 64xH100 32xB200",
        "peft": "8xH100 16xH100 8xB200",
    },
    float("inf"): {
        "pretrain": "64xH100 256xH100 1024xH100 256xGB200",
        "sft": "64xH100 128xH100 64xH200",
        "peft": "32xH100 16xH200 8xB200",
    },
}
"""By the largest number of parameters: clusters of each goal, from what such models are usually trained on."""


class PlanKey(NamedTuple):
    """One page: a model by its Hugging Face id, a cluster and a goal."""

    model: str
    gpus: str
    goal: str

    @property
    def folder(self) -> str:
        """Return the page's folder, which is its address."""
        return f"{self.model}/{self.gpus}/{self.goal}"

    @property
    def world(self) -> int:
        """Return the number of GPUs."""
        return api.cluster(self.gpus).world

    @property
    def gpu(self) -> str:
        """Return the type of GPU."""
        return api.cluster(self.gpus).gpu.name


def popular(rows: Iterable[Mapping[str, object]]) -> list[PlanKey]:
    """Return the plans of popular models; `rows` are those of the model catalogue."""
    known = {str(row["name"]): row for row in rows}
    found = []
    for name in MODELS.split():
        row = known[name]
        total = row["parameters"]["total"]  # type: ignore[index]
        goals = next(clusters for most, clusters in CLUSTERS.items() if total <= most)
        for goal, clusters in goals.items():
            if goal == "pretrain" and row["kind"] == "vision_language":
                continue  # no recipe trains their vision encoder from scratch
            found += [PlanKey(str(row["hf_id"]), gpus, goal) for gpus in clusters.split()]
    return found


def selected(texts: Sequence[str], rows: Iterable[Mapping[str, object]]) -> list[PlanKey]:
    """Return the plans that texts name: `popular`, or MODEL:GPUS:GOAL."""
    found: dict[PlanKey, None] = {}
    rows = list(rows)
    for text in texts:
        if text == POPULAR:
            found |= dict.fromkeys(popular(rows))
            continue
        parts = [part.strip() for part in text.split(":")]
        if len(parts) != 3 or not all(parts):
            fix = ("--plans popular", "--plans Qwen/Qwen3-8B:8xH100:sft")
            raise InputError("is neither popular nor MODEL:GPUS:GOAL", field="plans", value=text, fix=fix)
        model, gpus, goal = parts
        if goal not in api.GOALS:
            raise InputError(
                f"has an unknown goal; known: {', '.join(api.GOALS)}", field="plans", value=text,
                fix=tuple(f"--plans {model}:{gpus}:{one}" for one in api.GOALS),
            )  # fmt: skip
        spec = api.find_model(name=model)
        place = api.cluster(gpus)
        known = f"{place.world}x{place.gpu.name}"
        same = str(api.cluster(known)) == str(place)  # 8x8xH100 is 64xH100; 16x4xH100 keeps its nodes
        found[PlanKey(spec.hf_id or spec.name, known if same else gpus, goal)] = None
    return list(found)


class Neighbours(NamedTuple):
    """Pages of the same model that differ in one thing."""

    counts: list[PlanKey]
    types: list[PlanKey]
    goals: list[PlanKey]


def neighbours(of: PlanKey, keys: Sequence[PlanKey]) -> Neighbours:
    """Return a page's neighbours: other counts of its GPU, other GPUs and other goals, each the nearest in count."""
    same = [key for key in keys if key.model == of.model and key != of]

    def nearest(candidates: Iterable[PlanKey], by: str) -> list[PlanKey]:
        best: dict[str, PlanKey] = {}
        for key in sorted(candidates, key=lambda key: abs(key.world - of.world)):
            best.setdefault(getattr(key, by), key)
        return list(best.values())

    counts = [key for key in same if (key.gpu, key.goal) == (of.gpu, of.goal)]
    return Neighbours(
        sorted(counts, key=lambda key: key.world),
        nearest((key for key in same if key.goal == of.goal and key.gpu != of.gpu), "gpu"),
        nearest(sorted((key for key in same if key.goal != of.goal), key=lambda key: key.gpu != of.gpu), "goal"),
    )
