"""Readers and writers of composite keys that several frameworks share, and parsers for their raw values."""

from __future__ import annotations

from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps.key import MappedFields, RawValues
from meshwright.recipes.key_maps.value_maps import PRECISION_NAMES
from meshwright.recipes.types import Recipe
from meshwright.recipes.values import as_int

SHOWN = 40  # characters of a value that an error repeats


def plain(number: float) -> float:
    """Return a ratio or product without the noise of its floats: 1e-6 / 1e-5 is 0.1, and 2e-5 * 0.1 is 2e-6."""
    return float(f"{number:.12g}")


def is_null(text: str) -> bool:
    """Return whether a raw value means null."""
    return text.strip().lower() in ("null", "none", "")


def as_bool(key: str, text: str) -> bool:
    """Parse the boolean of a key."""
    if text.strip().lower() not in ("true", "false"):
        raise InputError("must be true or false", field=key, value=text)
    return text.strip().lower() == "true"


def as_count(key: str, text: str, least: int = 0) -> int:
    """Parse the integer of a key and check that it is at least `least`."""
    if not (text.strip().isascii() and text.strip().isdigit()) or as_int(text.strip(), key) < least:
        raise InputError(f"must be an integer of at least {least}", field=key, value=text)
    return int(text)


def as_float(key: str, text: str) -> float:
    """Parse the number of a key."""
    try:
        return float(text)
    except ValueError:
        raise InputError("must be a number", field=key, value=text) from None


def virtual_stages(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Megatron interleaves whenever there is more than one virtual stage per rank."""
    text = next(iter(raw.values()))
    vp = "1" if is_null(text) else text
    schedule = recipe.layout.pp_schedule
    if vp != "1" and schedule == "1f1b":
        return MappedFields({"layout.vp": vp}, {"layout.pp_schedule": "interleaved_1f1b"})
    if vp == "1" and schedule == "interleaved_1f1b":
        return MappedFields({"layout.vp": vp}, {"layout.pp_schedule": "1f1b"})
    return MappedFields({"layout.vp": vp})


def recompute(raw: RawValues, recipe: Recipe) -> MappedFields:
    """Full recompute covers every layer (uniform, chunks of one) or the first layers of each stage (block)."""
    keys = {key.rsplit("recompute_", 1)[1]: key for key in raw}
    fields: dict[str, str] = {}
    if "granularity" in keys:
        text = raw[keys["granularity"]]
        fields["layout.recompute"] = "none" if is_null(text) else text
    method, layers = (raw.get(keys.get(part, ""), "null") for part in ("method", "num_layers"))
    layers_key = keys.get("num_layers", "model.recompute_num_layers")
    if method.lower() == "block":
        fields["layout.recompute_layers"] = str(as_count(layers_key, layers, least=1))
    elif method.lower() == "uniform":
        if not is_null(layers) and as_count(layers_key, layers) != 1:
            raise InputError(
                "chunks of several layers are not supported; use method block to recompute fewer layers",
                field=layers_key,
                value=layers,
                fix=[f"{layers_key}=1", f"layout.recompute_layers={layers}"],
            )
        fields["layout.recompute_layers"] = "0"
    elif not is_null(method):
        raise unknown(keys["method"], method, ("uniform", "block"))
    elif not is_null(layers):
        raise InputError(
            f"has no effect without {layers_key.replace('num_layers', 'method')}",
            field=layers_key,
            value=layers[:SHOWN],
            fix=[f"layout.recompute_layers={layers[:SHOWN]}"],
        )
    return MappedFields(fields)


def dispatcher(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The flex dispatcher is selected by its backend, DeepEP by default."""
    texts = {key.rsplit("moe_", 1)[1]: text.lower() for key, text in raw.items()}
    dispatcher_type = texts.get("token_dispatcher_type", "flex")
    backend = texts.get("flex_dispatcher_backend", "")
    if dispatcher_type not in ("alltoall", "allgather", "flex"):
        raise unknown("model.moe_token_dispatcher_type", dispatcher_type, ("alltoall", "allgather", "flex"))
    if backend and not is_null(backend) and dispatcher_type != "flex":
        raise InputError(
            f"is only used by the flex dispatcher, but the dispatcher type is {dispatcher_type}",
            field="model.moe_flex_dispatcher_backend",
            value=backend,
            fix=[f"moe.dispatcher={backend}"],
        )
    if dispatcher_type != "flex":
        return MappedFields({"moe.dispatcher": dispatcher_type})
    return MappedFields({"moe.dispatcher": "deepep" if is_null(backend) else backend})


def mixed_precision(raw: RawValues, recipe: Recipe) -> MappedFields:
    """One name sets the compute dtype and the matmul dtype of linear layers."""
    ((key, text),) = raw.items()
    known = {name: pair for table in PRECISION_NAMES.values() for pair, name in table.items()}
    if text.lower() not in known:
        raise unknown(key, text, known)
    compute, matmul = known[text.lower()]
    return MappedFields({"precision.compute": compute, "precision.matmul": matmul})


def offload(raw: RawValues, recipe: Recipe) -> MappedFields:
    enabled = {key for key, text in raw.items() if as_bool(key, text)}
    if len(enabled) > 1:
        raise InputError("activations and optimizer cannot both be offloaded", field=" and ".join(sorted(enabled)))
    target = "optimizer" if any("optimizer" in key for key in enabled) else "activations"
    return MappedFields({"layout.offload": target if enabled else "none"})


def betas(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    parts = [part.strip() for part in text.strip().strip("[]()").split(",")]
    if len(parts) != 2:
        raise InputError("must be two numbers, e.g. [0.9,0.95]", field=key, value=text)
    return MappedFields({"optimizer.beta1": parts[0], "optimizer.beta2": parts[1]})


def packed_size(raw: RawValues, recipe: Recipe) -> MappedFields:
    ((key, text),) = raw.items()
    size = 0 if is_null(text) else as_count(key, text)
    return MappedFields({"data.packing": "true", "data.seq_length": str(size)} if size else {"data.packing": "false"})


def dp_size(raw: RawValues, recipe: Recipe) -> MappedFields:
    """The data-parallel size is shard ranks × replicas."""
    ((key, text),) = raw.items()
    if is_null(text):
        return MappedFields({"layout.dp_shard": "-1"})
    ranks, replicas = as_count(key, text, least=1), recipe.layout.dp_replicate
    if ranks % replicas:
        raise InputError(f"is not a multiple of layout.dp_replicate={replicas}", field=key, value=text)
    return MappedFields({"layout.dp_shard": str(ranks // replicas)})


def local_batch(raw: RawValues, recipe: Recipe) -> MappedFields:
    """A pipeline splits the local batch into micro batches; their number follows from the global batch."""
    local, micro = raw.get("step_scheduler.local_batch_size"), raw.get("distributed.pipeline.pp_microbatch_size")
    if local is None or micro is None:
        return MappedFields({"layout.micro_batch_size": local or micro or ""})
    if as_count("step_scheduler.local_batch_size", local, 1) % as_count(
        "distributed.pipeline.pp_microbatch_size", micro, 1
    ):
        raise InputError(
            f"is not a multiple of distributed.pipeline.pp_microbatch_size={micro}",
            field="step_scheduler.local_batch_size",
            value=local,
        )
    return MappedFields({"layout.micro_batch_size": micro})


def evaluation(raw: RawValues, recipe: Recipe) -> MappedFields:
    enabled = as_bool("eval.enabled", raw["eval.enabled"]) if "eval.enabled" in raw else True
    every = raw.get("eval.interval", str(recipe.train.eval_every or 1000))
    return MappedFields({"train.eval_every": every if enabled else "0"})


def dispatcher_keys(value: str) -> dict[str, str]:
    """Return Megatron's dispatcher keys for a value of moe.dispatcher."""
    if value in ("deepep", "hybridep"):
        return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": value}
    return {"moe_token_dispatcher_type": value}


def recompute_keys(recipe: Recipe) -> dict[str, str | int]:
    """Return Megatron's activation-recompute keys for a recipe."""
    layout = recipe.layout
    if layout.recompute == "full":
        method, layers = ("block", layout.recompute_layers) if layout.recompute_layers else ("uniform", 1)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    return {} if layout.recompute == "none" else {"recompute_granularity": layout.recompute}
