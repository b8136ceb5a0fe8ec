"""Their keys that only make sense together, or that stand for several of ours; and keys that are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from meshwright.errors import InputError, unknown
from meshwright.recipes.aliases import PRECISION_NAMES
from meshwright.recipes.types import Recipe
from meshwright.recipes.values import whole

Texts = Mapping[str, str]
"""Values as typed, by key."""


class Meaning(msgspec.Struct, frozen=True):
    """What foreign keys say of ours; what is only implied gives way to what is said outright."""

    said: Texts
    implied: Texts


Reader = Callable[[Texts, Recipe], Meaning]


def _says(said: Texts, **implied: str) -> Meaning:
    return Meaning(said, {key.replace("__", "."): text for key, text in implied.items()})


def _null(text: str) -> bool:
    return text.strip().lower() in ("null", "none", "")


def _truth(key: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise InputError("true or false is wanted", field=key, value=text)
    return text.strip().lower() == "true"


def _count(key: str, text: str, least: int = 0) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()) or whole(text.strip(), key) < least:
        raise InputError(f"a whole number of at least {least} is wanted", field=key, value=text)
    return int(text)


def _virtual_stages(given: Texts, recipe: Recipe) -> Meaning:
    """Megatron interleaves whenever there are virtual stages."""
    text = next(iter(given.values()))
    vp = "1" if _null(text) else text
    schedule = recipe.layout.pp_schedule
    if vp != "1" and schedule == "1f1b":
        return _says({"layout.vp": vp}, layout__pp_schedule="interleaved_1f1b")
    if vp == "1" and schedule == "interleaved_1f1b":
        return _says({"layout.vp": vp}, layout__pp_schedule="1f1b")
    return _says({"layout.vp": vp})


def _recompute(given: Texts, recipe: Recipe) -> Meaning:
    """Full recompute is of every layer (uniform, chunks of one) or of the first layers of each stage (block)."""
    texts = {key.rsplit("recompute_", 1)[1]: text for key, text in given.items()}
    said: dict[str, str] = {}
    if "granularity" in texts:
        said["layout.recompute"] = "none" if _null(texts["granularity"]) else texts["granularity"]
    method, count = texts.get("method", "null").lower(), texts.get("num_layers", "null")
    if method == "block":
        said["layout.recompute_layers"] = str(_count("model.recompute_num_layers", count, least=1))
    elif method == "uniform":
        if not _null(count) and _count("model.recompute_num_layers", count) != 1:
            raise InputError(
                "chunks of several layers are not supported; use method block to recompute fewer layers",
                field="model.recompute_num_layers",
                value=count,
                fix=["model.recompute_num_layers=1", f"layout.recompute_layers={count}"],
            )
        said["layout.recompute_layers"] = "0"
    elif not _null(method):
        raise unknown("model.recompute_method", method, ("uniform", "block"))
    elif not _null(count):
        raise InputError(
            "says nothing without model.recompute_method",
            field="model.recompute_num_layers",
            value=count,
            fix=[f"layout.recompute_layers={count}"],
        )
    return _says(said)


def _dispatcher(given: Texts, recipe: Recipe) -> Meaning:
    """The flex dispatcher is whatever its backend is; DeepEP unless said."""
    texts = {key.rsplit("moe_", 1)[1]: text.lower() for key, text in given.items()}
    kind, backend = texts.get("token_dispatcher_type", "flex"), texts.get("flex_dispatcher_backend", "")
    if kind not in ("alltoall", "allgather", "flex"):
        raise unknown("model.moe_token_dispatcher_type", kind, ("alltoall", "allgather", "flex"))
    if backend and not _null(backend) and kind != "flex":
        raise InputError(
            f"is only read by the flex dispatcher, and {kind} was chosen",
            field="model.moe_flex_dispatcher_backend",
            value=backend,
            fix=[f"moe.dispatcher={backend}"],
        )
    if kind != "flex":
        return _says({"moe.dispatcher": kind})
    return _says({"moe.dispatcher": "deepep" if _null(backend) else backend})


def _mixed_precision(given: Texts, recipe: Recipe) -> Meaning:
    """One name for the format of compute and that inside linear layers."""
    ((key, text),) = given.items()
    known = {name: pair for table in PRECISION_NAMES.values() for pair, name in table.items()}
    if text.lower() not in known:
        raise unknown(key, text, known)
    compute, matmul = known[text.lower()]
    return _says({"precision.compute": compute, "precision.matmul": matmul})


def _offload(given: Texts, recipe: Recipe) -> Meaning:
    wanted = {key for key, text in given.items() if _truth(key, text)}
    if len(wanted) > 1:
        raise InputError("activations and optimizer cannot both be offloaded", field=" and ".join(sorted(wanted)))
    kinds = {"model.cpu_offloading": "activations", "optimizer.optimizer_cpu_offload": "optimizer"}
    return _says({"layout.offload": kinds[wanted.pop()] if wanted else "none"})


def _betas(given: Texts, recipe: Recipe) -> Meaning:
    ((key, text),) = given.items()
    parts = [part.strip() for part in text.strip().strip("[]()").split(",")]
    if len(parts) != 2:
        raise InputError("two numbers are wanted, e.g. [0.9,0.95]", field=key, value=text)
    return _says({"optimizer.beta1": parts[0], "optimizer.beta2": parts[1]})


def _packed_size(given: Texts, recipe: Recipe) -> Meaning:
    ((key, text),) = given.items()
    size = 0 if _null(text) else _count(key, text)
    return _says({"data.packing": "true", "data.seq_length": str(size)} if size else {"data.packing": "false"})


def _dp_size(given: Texts, recipe: Recipe) -> Meaning:
    """All data-parallel ranks: those that share a copy times the copies."""
    ((key, text),) = given.items()
    if _null(text):
        return _says({"layout.dp_shard": "-1"})
    ranks, copies = _count(key, text, least=1), recipe.layout.dp_replicate
    if ranks % copies:
        raise InputError(f"is not a multiple of the {copies} full copies", field=key, value=text)
    return _says({"layout.dp_shard": str(ranks // copies)})


def _local_batch(given: Texts, recipe: Recipe) -> Meaning:
    """Under a pipeline the local batch is cut into micro batches; how many follows from the global batch."""
    local, micro = given.get("step_scheduler.local_batch_size"), given.get("distributed.pipeline.pp_microbatch_size")
    if local is None or micro is None:
        return _says({"layout.micro_batch_size": local or micro or ""})
    if _count("step_scheduler.local_batch_size", local, 1) % _count(
        "distributed.pipeline.pp_microbatch_size", micro, 1
    ):
        raise InputError(
            f"is not a multiple of distributed.pipeline.pp_microbatch_size={micro}",
            field="step_scheduler.local_batch_size",
            value=local,
        )
    return _says({"layout.micro_batch_size": micro})


def _evaluation(given: Texts, recipe: Recipe) -> Meaning:
    enabled = _truth("eval.enabled", given["eval.enabled"]) if "eval.enabled" in given else True
    every = given.get("eval.interval", str(recipe.train.eval_every or 1000))
    return _says({"train.eval_every": every if enabled else "0"})


JOINT: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("model.virtual_pipeline_model_parallel_size",), _virtual_stages),
    (("virtual_pipeline_model_parallel_size",), _virtual_stages),
    (("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers"), _recompute),
    (("recompute_granularity", "recompute_method", "recompute_num_layers"), _recompute),
    (("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"), _dispatcher),
    (("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"), _dispatcher),
    (("mixed_precision",), _mixed_precision),
    (("train.mixed_precision",), _mixed_precision),
    (("model.cpu_offloading", "optimizer.optimizer_cpu_offload"), _offload),
    (("optimizer.betas",), _betas),
    (("packed_sequence.packed_sequence_size",), _packed_size),
    (("distributed.dp_size",), _dp_size),
    (("step_scheduler.local_batch_size", "distributed.pipeline.pp_microbatch_size"), _local_batch),
    (("eval.enabled", "eval.interval"), _evaluation),
)
"""Foreign keys that are read together, and how."""

RETIRED: dict[str, tuple[str, str]] = {
    "train.grad_accum_steps": (
        "accumulation follows from the batch and the GPUs: set the samples per step",
        "train.global_batch_size=…",
    ),
    "scheduler.min_lr_ratio": ("is a ratio to the peak: set the final learning rate itself", "schedule.min_lr=…"),
    "lr_scheduler.min_lr_factor": ("is a ratio to the peak: set the final learning rate itself", "schedule.min_lr=…"),
    "model.pipeline_model_parallel_layout": (
        "is a drawing of the stages: list their layers",
        "layout.stage_layers=[…]",
    ),
    "model.num_layers_in_first_pipeline_stage": ("list the layers of every stage", "layout.stage_layers=[…]"),
    "model.num_layers_in_last_pipeline_stage": ("list the layers of every stage", "layout.stage_layers=[…]"),
    "model.hierarchical_context_parallel_sizes": (
        "set the inner all-to-all group; the ring takes the rest of cp",
        "layout.cp_inner=…",
    ),
    "model.fp8_hybrid": ("was removed upstream: name the number format", "precision.matmul=fp8_delayed"),
    "model.fp8_e4m3": ("was removed upstream: name the number format", "precision.matmul=fp8_delayed"),
    "model.fp8": ("name the number format and its scaling", "precision.matmul=fp8_tensor"),
    "model.fp8_recipe": ("name the number format and its scaling", "precision.matmul=mxfp8"),
    "model.enable_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=local"),
    "model.external_cuda_graph": ("was removed upstream", "kernels.cuda_graphs=transformer_engine"),
    "compile.enabled": ("is read by nothing under fsdp2: compile is a kernel setting", "kernels.compile=true"),
    "train.ce_chunk_size": ("chunks are sized by the engine", "kernels.loss=chunked"),
    "trainer.num_nodes": ("the GPUs belong to the question, not to the recipe", "--gpus 4x8xH100"),
    "trainer.devices": ("the GPUs belong to the question, not to the recipe", "--gpus 8xH100"),
    "cluster": ("the GPUs belong to the question, not to the recipe", "--gpus {value}"),
    "gpus": ("the GPUs belong to the question, not to the recipe", "--gpus {value}"),
    "goal": ("is chosen with the recipe", "--goal sft"),
    "model": ("is chosen with the recipe; its shape is changed in the architecture section", "architecture.layers=…"),
    "dp": ("follows from the GPUs and the other degrees; set how many ranks share one copy", "layout.dp_shard=…"),
}
"""Keys that are gone or that cannot be one value, with the reason and what to write instead."""


def joint_groups() -> dict[str, int]:
    """The number of the group that each jointly read key belongs to."""
    return {key: number for number, (keys, _) in enumerate(JOINT) for key in keys}


def dispatcher_keys(value: str) -> dict[str, str]:
    """Megatron's two keys for the way tokens travel to experts."""
    if value in ("deepep", "hybridep"):
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": value}
    return {"moe_token_dispatcher_type": value}


def recompute_keys(recipe: Recipe) -> dict[str, str | int]:
    """Megatron's keys for what is computed again in the backward pass."""
    layout = recipe.layout
    if layout.recompute == "full":
        how = ("block", layout.recompute_layers) if layout.recompute_layers else ("uniform", 1)
        return {"recompute_granularity": "full", "recompute_method": how[0], "recompute_num_layers": how[1]}
    return {} if layout.recompute == "none" else {"recompute_granularity": layout.recompute}
