"""How keys that only make sense together are read, and how those that two frameworks share are written."""

from __future__ import annotations

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps.key import MappedFields, Texts
from meshwright.recipes.key_maps.value_maps import PRECISION_NAMES
from meshwright.recipes.types import Recipe
from meshwright.recipes.values import as_int


def says(said: Texts, **implied: str) -> MappedFields:
    """What keys say outright, and what follows from it unless something else is said (layout__pp_schedule=…)."""
    return MappedFields(said, {key.replace("__", "."): text for key, text in implied.items()})


def null(text: str) -> bool:
    """Whether a text means nothing."""
    return text.strip().lower() in ("null", "none", "")


def truth(key: str, text: str) -> bool:
    """The truth that was typed for a key."""
    if text.strip().lower() not in ("true", "false"):
        raise InputError("true or false is wanted", field=key, value=text)
    return text.strip().lower() == "true"


def count(key: str, text: str, least: int = 0) -> int:
    """The whole number that was typed for a key."""
    if not (text.strip().isascii() and text.strip().isdigit()) or as_int(text.strip(), key) < least:
        raise InputError(f"a whole number of at least {least} is wanted", field=key, value=text)
    return int(text)


def number(key: str, text: str) -> float:
    """The number that was typed for a key."""
    try:
        return float(text)
    except ValueError:
        raise InputError("a number is wanted", field=key, value=text) from None


def virtual_stages(given: Texts, recipe: Recipe) -> MappedFields:
    """Megatron interleaves whenever there are virtual stages."""
    text = next(iter(given.values()))
    vp = "1" if null(text) else text
    schedule = recipe.layout.pp_schedule
    if vp != "1" and schedule == "1f1b":
        return says({"layout.vp": vp}, layout__pp_schedule="interleaved_1f1b")
    if vp == "1" and schedule == "interleaved_1f1b":
        return says({"layout.vp": vp}, layout__pp_schedule="1f1b")
    return says({"layout.vp": vp})


def recompute(given: Texts, recipe: Recipe) -> MappedFields:
    """Full recompute is of every layer (uniform, chunks of one) or of the first layers of each stage (block)."""
    keys = {key.rsplit("recompute_", 1)[1]: key for key in given}
    said: dict[str, str] = {}
    if "granularity" in keys:
        text = given[keys["granularity"]]
        said["layout.recompute"] = "none" if null(text) else text
    method, number = (given.get(keys.get(part, ""), "null") for part in ("method", "num_layers"))
    field = keys.get("num_layers", "model.recompute_num_layers")
    if method.lower() == "block":
        said["layout.recompute_layers"] = str(count(field, number, least=1))
    elif method.lower() == "uniform":
        if not null(number) and count(field, number) != 1:
            raise InputError(
                "chunks of several layers are not supported; use method block to recompute fewer layers",
                field=field,
                value=number,
                fix=[f"{field}=1", f"layout.recompute_layers={number}"],
            )
        said["layout.recompute_layers"] = "0"
    elif not null(method):
        raise unknown(keys["method"], method, ("uniform", "block"))
    elif not null(number):
        raise InputError(
            f"says nothing without {field.replace('num_layers', 'method')}",
            field=field,
            value=number,
            fix=[f"layout.recompute_layers={number}"],
        )
    return says(said)


def dispatcher(given: Texts, recipe: Recipe) -> MappedFields:
    """The flex dispatcher is whatever its backend is; DeepEP unless said."""
    texts = {key.rsplit("moe_", 1)[1]: text.lower() for key, text in given.items()}
    kind, backend = texts.get("token_dispatcher_type", "flex"), texts.get("flex_dispatcher_backend", "")
    if kind not in ("alltoall", "allgather", "flex"):
        raise unknown("model.moe_token_dispatcher_type", kind, ("alltoall", "allgather", "flex"))
    if backend and not null(backend) and kind != "flex":
        raise InputError(
            f"is only read by the flex dispatcher, and {kind} was chosen",
            field="model.moe_flex_dispatcher_backend",
            value=backend,
            fix=[f"moe.dispatcher={backend}"],
        )
    if kind != "flex":
        return says({"moe.dispatcher": kind})
    return says({"moe.dispatcher": "deepep" if null(backend) else backend})


def mixed_precision(given: Texts, recipe: Recipe) -> MappedFields:
    """One name for the format of compute and that inside linear layers."""
    ((key, text),) = given.items()
    known = {name: pair for table in PRECISION_NAMES.values() for pair, name in table.items()}
    if text.lower() not in known:
        raise unknown(key, text, known)
    compute, matmul = known[text.lower()]
    return says({"precision.compute": compute, "precision.matmul": matmul})


def offload(given: Texts, recipe: Recipe) -> MappedFields:
    wanted = {key for key, text in given.items() if truth(key, text)}
    if len(wanted) > 1:
        raise InputError("activations and optimizer cannot both be offloaded", field=" and ".join(sorted(wanted)))
    kind = "optimizer" if any("optimizer" in key for key in wanted) else "activations"
    return says({"layout.offload": kind if wanted else "none"})


def betas(given: Texts, recipe: Recipe) -> MappedFields:
    ((key, text),) = given.items()
    parts = [part.strip() for part in text.strip().strip("[]()").split(",")]
    if len(parts) != 2:
        raise InputError("two numbers are wanted, e.g. [0.9,0.95]", field=key, value=text)
    return says({"optimizer.beta1": parts[0], "optimizer.beta2": parts[1]})


def packed_size(given: Texts, recipe: Recipe) -> MappedFields:
    ((key, text),) = given.items()
    size = 0 if null(text) else count(key, text)
    return says({"data.packing": "true", "data.seq_length": str(size)} if size else {"data.packing": "false"})


def dp_size(given: Texts, recipe: Recipe) -> MappedFields:
    """All data-parallel ranks: those that share a copy times the copies."""
    ((key, text),) = given.items()
    if null(text):
        return says({"layout.dp_shard": "-1"})
    ranks, copies = count(key, text, least=1), recipe.layout.dp_replicate
    if ranks % copies:
        raise InputError(f"is not a multiple of the {copies} full copies", field=key, value=text)
    return says({"layout.dp_shard": str(ranks // copies)})


def local_batch(given: Texts, recipe: Recipe) -> MappedFields:
    """Under a pipeline the local batch is cut into micro batches; how many follows from the global batch."""
    local, micro = given.get("step_scheduler.local_batch_size"), given.get("distributed.pipeline.pp_microbatch_size")
    if local is None or micro is None:
        return says({"layout.micro_batch_size": local or micro or ""})
    if count("step_scheduler.local_batch_size", local, 1) % count("distributed.pipeline.pp_microbatch_size", micro, 1):
        raise InputError(
            f"is not a multiple of distributed.pipeline.pp_microbatch_size={micro}",
            field="step_scheduler.local_batch_size",
            value=local,
        )
    return says({"layout.micro_batch_size": micro})


def evaluation(given: Texts, recipe: Recipe) -> MappedFields:
    enabled = truth("eval.enabled", given["eval.enabled"]) if "eval.enabled" in given else True
    every = given.get("eval.interval", str(recipe.train.eval_every or 1000))
    return says({"train.eval_every": every if enabled else "0"})


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
