"""Checks that a run may resume from a checkpoint: their contract fields must be equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from meshwright import json_text
from meshwright.engine.checkpoint.folder import STATE, Folder
from meshwright.engine.data.fingerprint import WEIGHTS, Fingerprint
from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError, some
from meshwright.models import is_path
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Recipe, field_value, recipe_fields

SHOWN = 12
SHOWN_CHARACTERS = 80
SHOWN_FIXES = 3
SOURCE_FIELDS = ("data.dataset", "data.blend", "data.anneal_blend", "data.validation", "data.chat_template")
MODEL_FIELDS = ("model", "checkpoint.pretrained")  # their content is the initial weights and the model's config
SHAPE_FIELDS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "experts")  # of architecture
SHAPE_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"),
    *("vocab_size", "tie_word_embeddings"),
)
# Fields that change names or shapes of the saved tensors, and the values that do if not all: no resume can load those.
TENSOR_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((f"architecture.{name}" for name in SHAPE_FIELDS), ()),
    **dict.fromkeys((f"config.{name}" for name in SHAPE_KEYS), ()),
    **dict.fromkeys(("optimizer.name", "peft.rank", "peft.targets", "train.freeze"), ()),
    "peft.method": ("dora",),
    "goal": ("peft",),
}
# Config entries of transformers that do not describe the model.
IGNORED_CONFIG_KEYS = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")


def contract_of(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's contract fields and the model's config as JSON values: they determine the trained weights."""
    fields = recipe_fields()
    found: dict[str, Any] = {"model": recipe.model, "goal": recipe.goal}
    for key, field in fields.items():
        if field.kind == "contract":
            found[key] = field_value(recipe, key)
    found |= {f"config.{key}": value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
    plain: dict[str, Any] = json_text.decode_exact(json_text.encode(found))
    return plain


def changed_fields(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    saved_data: Mapping[str, Fingerprint] = {},
    data: Mapping[str, Fingerprint] = {},
) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ, with both values; a field missing on one side has its default there.

    Data or weights whose path differs but whose content is equal do not differ; those whose content differs do.
    """
    fields = recipe_fields()
    found: dict[str, tuple[Any, Any]] = {}
    same_weights = WEIGHTS in saved_data and saved_data[WEIGHTS] == data.get(WEIGHTS)
    for key in {**saved, **now}:
        if key.startswith("config.") and (key not in saved or key not in now):
            continue  # versions of transformers write different keys
        default = _plain(fields[key].default) if key in fields else None
        before, after = saved.get(key, default), now.get(key, default)
        if _same(before, after) or (key in SOURCE_FIELDS and _content(before, saved_data) == _content(after, data)):
            continue
        if key in MODEL_FIELDS and same_weights and (data[WEIGHTS].files or _are_paths(before, after)):
            continue  # fields of the model's config are compared by themselves
        found[key] = (before, after)
    for name in sorted(saved_data.keys() & data.keys()):
        if saved_data[name].hash != data[name].hash:
            found[f"the content of {name}"] = (saved_data[name], data[name])
    return found


def _same(before: Any, after: Any) -> bool:
    return bool(before == after) or repr(before) == repr(after)  # NaN is not equal to itself


def _are_paths(before: str, after: str) -> bool:
    return bool(before and after) and is_path(before) and is_path(after)


def _content(value: Any, fingerprints: Mapping[str, Fingerprint]) -> Any:
    """Return a dataset or blend with the hashes of its sources instead of their names, where they are known."""

    def known(name: str) -> str:
        return fingerprints[name].hash if name in fingerprints else name

    return known(value) if isinstance(value, str) else sorted((known(name), share) for name, share in value.items())


ACCEPTING = "--accept-changes resumes with the new values"


def check_contract(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    accepted: bool,
    warns: bool = True,
    saved_data: Mapping[str, Fingerprint] = {},
    data: Mapping[str, Fingerprint] = {},
    run: Path = Path("RUN"),
    epoch_samples: int | None = None,
) -> None:
    """Raise InputError if contract fields or data differ from the checkpoint, unless the user accepts the changes.

    A change of the tensors themselves cannot be accepted: the checkpoint has no values for the new ones.
    `epoch_samples`: the samples of an epoch, if the steps now were counted from epochs.
    """
    changed = changed_fields(saved, now, saved_data, data)
    if not changed:
        return
    changed = dict(sorted(changed.items(), key=lambda item: _order(item[0])))
    lines = [f"{key} was {_short(before)} and is {_short(after)}" for key, (before, after) in changed.items()]
    listed = some(lines, SHOWN, "; ")
    tensors = [key for key, values in changed.items() if _changes_tensors(key, values)]
    if accepted and not tensors:
        if warns:
            warn(f"resuming with changed contract fields: {listed}")
        return
    reason = f"contract fields differ from the checkpoints in the run folder: {listed}"
    if tensors:
        other = "other tensors than the checkpoint has, so it cannot be resumed with the new values"
        reason += f"; {some(tensors)} give{'s' * (len(tensors) == 1)} {other}"
        fix = ("another --out", _restored(changed, saved, epoch_samples), *_continued(saved, tensors, run))
    else:
        fix = ("another --out", _restored(changed, saved, epoch_samples), ACCEPTING)
    raise InputError(reason, field="--accept-changes" if accepted else "--out", fix=fix)


def _order(key: str) -> int:
    """Return the place of a changed field: another model or goal says more than the fields that differ with it."""
    return 0 if key in ("model", "goal") else 1 if key in TENSOR_FIELDS else 2


def _changes_tensors(key: str, values: tuple[Any, Any]) -> bool:
    """Return whether a changed field changes the names or shapes of the saved tensors."""
    if key not in TENSOR_FIELDS:
        return False
    only = TENSOR_FIELDS[key]
    return not only or any(value in only for value in values)


def _continued(saved: Mapping[str, Any], tensors: Collection[str], run: Path) -> tuple[str, ...]:
    """Return how a new run starts from the weights of the old one; empty if the model itself changed."""
    if any(key.startswith(("architecture.", "config.")) for key in tensors):
        return ()
    if saved.get("goal") != "peft":
        return (f"another --out with --model {run / 'model'} starts from its weights",)
    merged = f"{run}-merged"
    command = f"meshwright convert {quote(str(run))} {quote(merged)} --merge"
    return (f"{command}, then another --out with --model {merged}",)


def _restored(changed: Mapping[str, tuple[Any, Any]], saved: Mapping[str, Any], epoch_samples: int | None) -> str:
    """Return what restores a few changed fields: overrides, and the rest in words."""
    if len(changed) > SHOWN_FIXES:
        return "restore the fields"
    fields = recipe_fields()
    before = {key: old for key, (old, _) in changed.items() if key in fields}
    if epoch_samples and "train.steps" in before:
        batch = saved.get("train.global_batch_size", 1)
        before = {"train.epochs": _epochs(before.pop("train.steps"), batch, epoch_samples), **before}
    typed = " ".join(format_override(key, value) for key, value in before.items())
    named = [f"use the {key} {changed[key][0]}" for key in ("model", "goal") if key in changed]
    others = [f"restore {key}" for key in changed if key not in fields and key not in ("model", "goal")]
    return ", and ".join(filter(None, [typed, *named, *others]))


def _epochs(steps: int, batch: int, samples: int) -> float:
    """Return the roundest number of epochs that has these steps, as `with_steps` counts them."""
    exact = steps * batch / samples
    rounded = (round(exact, digits) for digits in range(8))
    return next((one for one in rounded if ceil(round(one * samples) / batch) == steps), exact)


CONFIG = "config."  # start of the contract's keys of the model's config


def saved_config(recipe: Recipe, run: Path) -> dict[str, Any]:
    """Return the model's config in the newest checkpoint of a run folder; empty if the recipe changes the model."""
    saved = _newest_contract(run)
    own = {key for key in recipe_fields() if key.startswith("architecture.")} | {"model", "train.init_std"}
    now = contract_of(recipe, {})
    if not saved or not recipe.checkpoint.resume or any(saved.get(key) != now.get(key) for key in own):
        return {}
    return {key.removeprefix(CONFIG): value for key, value in saved.items() if key.startswith(CONFIG)}


def _newest_contract(run: Path) -> dict[str, Any]:
    folder = Folder(run)
    steps = folder.steps()
    saved: dict[str, Any] = {}
    with suppress(OSError, msgspec.MsgspecError):  # a damaged checkpoint is reported at the resume
        saved = json_text.decode_exact((folder.step_path(steps[-1]) / STATE).read_bytes())["contract"] if steps else {}
    return saved


def check_before_start(recipe: Recipe, run: Path, kept: Collection[str] | None, accepted: bool = False) -> None:
    """Raise InputError if a recipe differs from the newest checkpoint of a run folder; takes no time and no torch.

    Only fields that are final before the model is built and the data is opened are compared: the rest follows at the
    resume. `kept` are the fields that --tiny keeps; None: all.
    """
    saved = _newest_contract(run)
    if not saved or not recipe.checkpoint.resume:
        return
    now = contract_of(recipe, {})
    moved = {key for key in MODEL_FIELDS if _are_paths(str(saved.get(key)), str(now[key]))}
    counted = ("train.epochs", "train.steps", "schedule.warmup_steps") if recipe.train.epochs else ()
    final = set(now) - {*SOURCE_FIELDS, *moved, *counted}
    final = {key for key in final if key in saved and (kept is None or key in kept)}
    before, after = ({key: values[key] for key in now if key in final} for values in (saved, now))
    check_contract(
        {"goal": saved.get("goal"), **before}, {"goal": saved.get("goal"), **after}, accepted, False, run=run
    )


def _plain(value: Any) -> Any:
    return json_text.decode_exact(json_text.encode(value))


def _short(value: Any) -> str:
    text = str(value) or "empty"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
