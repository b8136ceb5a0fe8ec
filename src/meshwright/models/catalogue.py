"""The model catalogue: find a model by any usual form of its name, or read a user's config.json."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright import extensions, file_access, hub
from meshwright.errors import InputError, unknown
from meshwright.notes import note
from meshwright.similar import closest

from .class_names import note_unknown_class
from .reader import load_config, spec_from_config
from .readers.unread import collect_unread
from .spec import ModelSpec

_SIZE = re.compile(r"(a?)(\d+(?:[.p]\d+)?)([bmt])")
SHOWN = 3  # models of a type that a name may mean
_SIZE_IN_MILLIONS = {"m": 1, "b": 1_000, "t": 1_000_000}
SAME_SIZE = 0.04  # share by which the parameters of a model without a size in its name may differ from a size
_PARENTHESES = re.compile(r"\(.*?\)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GAP = re.compile(r"[\s\-_:]+")
_PIECES = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
# Words that name a checkpoint, not an architecture; ignored if nothing matches with them.
_CHECKPOINT_WORDS = frozenset(
    ("meta", "nvidia", "instruct", "it", "pt", "chat", "base", "hf", "bf16", "fp8", "diffusers", "thinking")
)

# Words of a checkpoint whose weights are quantized: the shape is the model's, the weights are its own.
_QUANTIZATIONS = frozenset(
    (
        *("gptq", "awq", "gguf", "ggml", "exl2", "hqq", "autoround", "quantized", "bnb", "nf4", "fp4", "nvfp4"),
        *("mxfp4", "int4", "int8", "3bit", "4bit", "6bit", "8bit", "w4a16", "w8a8", "w8a16"),
        *("q2", "q3", "q4", "q5", "q6", "q8", "iq4"),
    )
)
_QUANTIZED_WORDS = _QUANTIZATIONS | {"k", "m", "s", "l", "xs", "mlx", "dynamic", "unsloth"}
_RELEASE = re.compile(r"(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])|2[3-9](?:0[1-9]|1[0-2])")  # 0324 or 2507: a date
_HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([\w.-]+/[\w.-]+)(?:/.*)?")

_WEIGHTS_WORDS = frozenset(("instruct", "it", "pt", "chat", "base", "thinking"))  # of them, those of other weights
_SAME_WEIGHTS_WORDS = frozenset(("meta", "nvidia", "hf", "bf16"))

# Suffixes and keys that distinguish a recipe file from a model config.
_RECIPE_FILES = (".toml", ".yaml", ".yml")
CONFIG = "config.json"
_MODEL_KEYS = frozenset(("model_type", "architectures", "_class_name"))
_RECIPE_KEYS = frozenset(("base", "goal", "cluster", "layout"))
SIZE_BAND = 0.25


def find(text: str) -> ModelSpec:
    """Return a model by name in any usual form, Hugging Face id, or path to a config.json or its folder.

    A common size alone (1.3b, 7b, 13b, 70b, 175b) means the plain GPT of that size.
    """
    text = without_hub_url(text.strip())
    if text.lower().endswith(_RECIPE_FILES):
        raise _recipe_as_model(text)
    if is_path(text):
        file_access.text_of(text, "model")
        return _from_path(os.path.expanduser(text))
    text = with_organization(text)
    own = hub_config(text)
    if own is not None:
        return _from_hub(text, str(own))
    name = _resolve(text)
    if name is not None:
        return _with_weights(name, text) if _names_other_weights(name, text) else _spec(name)
    size = _SIZE.fullmatch(text.lower().replace(" ", ""))
    raise _unknown_size(text, size) if size and not size[1] else _unknown_name(text[:80])


def hub_config(text: str) -> Path | None:
    """Return the config.json of a hub id that is not a shipped model's: cached, or downloaded if no shape fits.

    A shipped shape is assumed for the id of other weights only while their own config.json is not on this machine.
    """
    if not hub.is_model_id(text) or text.lower() in _hub_ids():
        return None
    listed = _is_listed(text)
    if listed and quantized_words(text):  # the weights are those of the model before quantization
        return None
    cached = hub.cached_config(text)
    if cached is not None or listed or file_access.closed():
        return cached
    try:
        return hub.config_of(text)
    except InputError as error:
        raise _unknown_name(text, error) from None


@lru_cache(maxsize=64)
def _from_hub(hub_id: str, path: str) -> ModelSpec:
    """Return the model of a hub id: the shipped one of the same shape with its weights, else one of that id's name."""
    try:
        spec = spec_from_config(load_config(path), hub_id, hf_id=hub_id, source=f"{CONFIG} of the hub")
    except InputError as error:
        raise InputError(f"{error.reason} (in {path})", error.field, error.value, error.fix) from error
    name = None
    with suppress(InputError):  # several shipped models
        name = _resolve(hub_id)
    if name is None or not _same_shape(_spec(name), spec):
        return spec
    return msgspec.structs.replace(_spec(name), hf_id=hub_id, max_seq_length=spec.max_seq_length)


def _same_shape(one: ModelSpec, other: ModelSpec) -> bool:
    shapes = [(spec.kind, spec.hidden, spec.groups, spec.vocab, spec.tied, spec.params) for spec in (one, other)]
    return shapes[0] == shapes[1]


def without_hub_url(text: str) -> str:
    """Return the id that an address of the Hugging Face hub names; any other text as it is."""
    found = _HUB_URL.fullmatch(text.strip())
    return text if found is None else found[1]


def quantized_words(text: str) -> list[str]:
    """Return the words of a hub id that say that its weights are quantized: gptq, awq, gguf, bnb, 4bit."""
    name = without_hub_url(text.strip()).rpartition("/")[2].lower()
    return [word for word in re.split(r"[\s\-_:.]+", name) if word in _QUANTIZATIONS]


def quantized_bits(text: str) -> int:
    """Return the bits of a hub id's quantized weights, on which adapters can be trained; 0 if its name has none."""
    words = quantized_words(text)
    if any(word in ("int8", "8bit", "w8a16") for word in words):  # also of GPTQ
        return 8
    return 4 if any(word in ("gptq", "awq", "bnb", "nf4", "int4", "4bit", "w4a16", "hqq") for word in words) else 0


def _unknown_name(text: str, not_on_hub: InputError | None = None) -> InputError:
    """Return the error for a model that is not in the catalogue, with the way to plan it anyway."""
    error = unknown("model", text, _meant_by(text), "meshwright models")
    if not error.fix and (near := _of_type(text)):
        error = InputError(f"unknown model {text}; did you mean {' or '.join(near)}?", "model", text, near)
    other, fix = "for any other model give its config.json", error.fix
    if not_on_hub is not None:
        other, fix = f"{not_on_hub.reason}; {other}", (*error.fix, *not_on_hub.fix)
    return InputError(f"{error.reason.removesuffix('?')}; {other}", error.field, error.value, fix)


def _meant_by(text: str) -> tuple[str, ...]:
    """Return the models that a mistyped name may mean: only those for text if the nearest one is."""
    nearest = closest(text, names(), 1)
    texts = tuple(name for name in names() if not _has_images(name))
    return texts if nearest and nearest[0] in texts else names()


def _has_images(name: str) -> bool:
    return "vision_config" in _entries()[name]["config"]


def _of_type(text: str) -> list[str]:
    """Return some shipped models of the Hugging Face type that a text names, such as qwen3-moe."""
    wanted = re.sub(r"[\W_]+", "", text.lower())
    return [name for name, one in _entries().items() if _type_of(one["config"]) == wanted][:SHOWN] if wanted else []


def _type_of(config: dict[str, Any]) -> str:
    return re.sub(r"[\W_]+", "", str(config.get("model_type", "")).lower())


def is_config(path: str) -> bool:
    """Return whether a JSON file is a model's config rather than a recipe or another config."""
    if not path.lower().endswith(".json") or not file_access.exists(os.path.expanduser(path)):
        return False
    try:
        config = load_config(os.path.expanduser(path))
    except InputError:
        return False
    return bool(_MODEL_KEYS & config.keys()) and not _RECIPE_KEYS & config.keys()


def catalogue_name(text: str) -> str | None:
    """Return the name of the shipped model that a text refers to; None for a path, or a hub id of another shape."""
    text = without_hub_url(text.strip())
    if is_path(text):
        return None
    name = find(text).name
    return name if name in _entries() else None


def reference(text: str) -> str | None:
    """Return how a recipe refers to a model: its shipped name, or the typed hub id of others; None for a path."""
    text = without_hub_url(text.strip())
    if is_path(text):
        return None
    text = with_organization(text)
    name = find(text).name
    return text if name not in _entries() or _names_other_weights(name, text) else name


NOT_OF_LAYERS = ("name", "hf_id", "aliases", "max_seq_length")
"""Fields of a model that say nothing about its layers."""


def same_model(one: str, other: str) -> bool:
    """Return whether two references are the same catalogue model or path; their weights may differ."""
    return one == other or (catalogue_name(one) or one) == (catalogue_name(other) or other)


def same_shape(model: ModelSpec, other: str) -> bool:
    """Return whether a model has the layers of a shipped one: Llama 3.3 those of Llama 3, for longer samples."""
    name = catalogue_name(other)
    return name is not None and all(
        getattr(model, field) == getattr(_spec(name), field)
        for field in ModelSpec.__struct_fields__
        if field not in NOT_OF_LAYERS
    )


def has_other_weights(model: ModelSpec) -> bool:
    """Return whether a model has the shape of a shipped one, but another hub id."""
    return model.name in _entries() and model.hf_id != shipped_id(model)


def shipped_id(model: ModelSpec) -> str:
    """Return the hub id of the shipped model of this name; the model's own if there is none."""
    entry = _entries().get(model.name)
    return model.hf_id if entry is None else str(entry.get("hf_id", ""))


def _names_other_weights(name: str, text: str) -> bool:
    """Return whether a text is a hub id that is not the shipped model's: an -Instruct model, or another's upload."""
    other = bool(_HUB_ID.fullmatch(text)) and text.lower() != str(_entries()[name].get("hf_id", "")).lower()
    return other and not quantized_words(text)


def with_organization(text: str) -> str:
    """Return the hub id of known weights that have a shipped model's shape but are not its own; other texts unchanged.

    They are instruct, base, thinking, coder or dated releases: `Qwen3-4B-Instruct-2507`, in any usual form of the name.
    Quantized weights mean those they were made from.
    """
    if is_own_name(text):
        return text
    plain, quantized = text.rpartition("/")[2], bool(quantized_words(text))
    known = _other_weights().get(_release_words(plain, quantized))
    if known is None and text == plain:
        known = _only_release(plain)
    named = quantized or text == plain or (known or "").lower() == text.lower()
    return known if known is not None and named else text


def is_own_name(text: str) -> bool:
    """Return whether a text is a shipped model's name or that of its own weights, in any usual form."""
    if text in _entries():
        return True
    words = _normalize(text)
    if "/" in text or words not in _index():
        return False
    name = _index()[words]
    return words in (_normalize(name), _normalize(_entries()[name].get("hf_id", "")))


def _release_words(text: str, quantized: bool = False) -> tuple[str, ...]:
    """Return the normalized name of weights without the words that no release differs in: meta, hf."""
    ignored = _SAME_WEIGHTS_WORDS | (_QUANTIZED_WORDS if quantized else frozenset[str]())
    return _normalize("-".join(word for word in _GAP.split(text.rpartition("/")[2]) if word.lower() not in ignored))


def releases(name: str) -> list[str]:
    """Return the hub ids of known weights that have the shape of a shipped model, without its own."""
    entry = _entries()[name]
    return [one for one in entry.get("aliases", ()) if "/" in one and one != entry.get("hf_id")]


@cache
def _other_weights() -> dict[tuple[str, ...], str]:
    """Map the normalized names of known weights to their hub ids; a shipped model's name means its own weights."""
    own = {_release_words(one) for name, entry in _entries().items() for one in (name, entry.get("hf_id", "")) if one}
    found: dict[tuple[str, ...], str] = {}
    for hub_id in (one for name in _entries() for one in releases(name)):
        if (words := _release_words(hub_id)) not in own:
            found.setdefault(words, hub_id)
    return found


def _only_release(text: str) -> str | None:
    """Return the hub id of weights published in one release only: Llama-3.3-70B is Llama-3.3-70B-Instruct."""
    words = _normalize(text)
    found = [
        hub_id
        for hub_id in _other_weights().values()
        if _normalize(hub_id, _CHECKPOINT_WORDS) == words and _spec_words(hub_id) != words
    ]
    return found[0] if len(found) == 1 else None


def _spec_words(hub_id: str) -> tuple[str, ...]:
    """Return the name of the shipped weights with the shape of others, without the words of a checkpoint."""
    return _normalize(str(_entries()[_index()[_normalize(hub_id)]].get("hf_id", "")), _CHECKPOINT_WORDS)


def dropped_words(text: str) -> list[str]:
    """Return the words of a name without ORG/ that name other weights than the shipped model's: instruct, chat, it."""
    name = text.strip()
    if "/" in with_organization(name) or name in _entries():
        return []
    known = str(_entries().get(catalogue_name(name) or "", {}).get("hf_id", "")).lower()
    return [word for word in _GAP.split(name.lower()) if word in _WEIGHTS_WORDS and word not in _GAP.split(known)]


@cache
def _with_weights(name: str, hub_id: str) -> ModelSpec:
    return msgspec.structs.replace(_spec(name), hf_id=hub_id)


def config_named(text: str) -> dict[str, Any]:
    """Return the Hugging Face config of a shipped model by any form of its name, of a hub id, or at a path."""
    own = config_file(text)
    return load_config(own) if own is not None else config_of(find(without_hub_url(text.strip())).name)


def config_file(text: str) -> str | None:
    """Return the path of a model's own config: a file, a folder, or that of a hub id; None for a shipped model."""
    text = without_hub_url(text.strip())
    if is_path(text):
        return os.path.expanduser(text)
    own = hub_config(with_organization(text))
    return None if own is None else str(own)


def names() -> tuple[str, ...]:
    """Return the names of all shipped models, in catalogue order."""
    return tuple(_entries())


def hub_ids() -> tuple[str, ...]:
    """Return the Hugging Face ids of the shipped models, in catalogue order."""
    return tuple(dict.fromkeys(str(entry["hf_id"]) for entry in _entries().values() if entry.get("hf_id")))


def search(query: str) -> list[str]:
    """Return the names that contain every word of a query, e.g. `qwen3 vl`; a size such as 8b is that of the model.

    Names that start with the first word come first: tinyllama is no answer to `llama` but a late one.
    """
    typed = [word for word in _GAP.split(query.strip().lower()) if word]
    sizes = [size for word in typed if (size := _typed_size(word)) is not None]
    words = [word.replace(".", "") for word in typed if _typed_size(word) is None]
    found = [name for name in names() if all(_has_word(name, word) for word in words)]
    found = [name for name in found if all(_has_size(name, size) for size in sizes)]
    return sorted(found, key=lambda name: bool(words) and not name.startswith(words[0]))


def _has_word(name: str, word: str) -> bool:
    """Return whether a name contains a word; a number is a version, which 5 is not in glm45_355b."""
    if not word.isdigit():
        return word in name
    unsized = "_".join(part for part in name.split("_") if _typed_size(part) is None)
    return re.search(rf"(?<!\d){word}", unsized) is not None


def _typed_size(word: str) -> float | None:
    """Return the parameters that 8b, 1.7b, 3p8b, 500m or 1t names; None for any other word, a3b (active) included."""
    found = _SIZE.fullmatch(word)
    return None if not found or found[1] else _millions(found)


def _has_size(name: str, millions: float) -> bool:
    """Return whether a model has this size: by its name, or by its parameters if its name has none."""
    joined = re.sub(r"_(\d)_(\d+b)\b", r"_\1p\2", name)  # wan_1_3b
    named = [size for word in re.split(r"_|(?<=\d)x", joined) if (size := _typed_size(word)) is not None]
    known = named or [_spec(name).params.total / 1e6]
    return any(abs(one - millions) <= (1e-3 if named else SAME_SIZE) * millions for one in known)


def all_specs() -> tuple[ModelSpec, ...]:
    """Return all shipped models, in catalogue order."""
    return tuple(_spec(name) for name in names())


def find_by_shape(hidden: int, layers: int) -> tuple[ModelSpec, ...]:
    """Return the shipped models of this width and depth, without building every spec."""
    return tuple(_spec(name) for name, entry in _entries().items() if _has_shape(entry["config"], hidden, layers))


def _has_shape(config: dict[str, Any], hidden: int, layers: int) -> bool:
    text = config.get("text_config", config)
    return hidden in (text.get("hidden_size"), text.get("n_embd")) and layers in (
        text.get("num_hidden_layers"), text.get("n_layer")
    )  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """Return the Hugging Face config of a shipped model, with the keys that determine its shape."""
    if name not in _entries():
        raise unknown("model", name, names(), "meshwright models")
    config: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(_entries()[name]["config"]))  # a copy
    return config


@cache
def _entries() -> dict[str, dict[str, Any]]:
    found = _named(Path(__file__).with_name("catalogue.json"))
    for path in extensions.files("models.json"):
        try:
            added = _named(path)
        except (msgspec.MsgspecError, TypeError, KeyError) as error:
            raise extensions.invalid(path, f"expected a list of objects with name and config ({error})") from error
        extensions.add_new(found, path, added.items(), "model {}".format)
    return found


def _named(path: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: {"config": entry["config"], **entry} for entry in msgspec.json.decode(path.read_bytes())}


@cache
def _spec(name: str) -> ModelSpec:
    entry = _entries()[name]
    facts: dict[str, Any] = {key: entry[key] for key in ("hf_id", "family", "source") if key in entry}
    facts |= {key: float(entry[key]) for key in ("published_total", "published_active") if key in entry}
    return spec_from_config(entry["config"], name, aliases=tuple(entry.get("aliases", ())), **facts)


@cache
def _hub_ids() -> frozenset[str]:
    return frozenset(str(entry["hf_id"]).lower() for entry in _entries().values() if "hf_id" in entry)


@cache
def _organizations() -> frozenset[str]:
    return frozenset(one.split("/", 1)[0] for one in _hub_ids())


@cache
def _index() -> dict[tuple[str, ...], str]:
    """Map every name and alias, normalized, to the model name."""
    index: dict[tuple[str, ...], str] = {}
    for name, entry in _entries().items():
        for alias in (name, entry.get("hf_id", ""), *entry.get("aliases", ())):
            if alias:
                index.setdefault(_normalize(alias), name)
    return index


@lru_cache(maxsize=4096)
def _normalize(text: str, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return a name as alphanumeric words with sizes in millions: "Qwen2.5-0.5B" is ("qwen25", "500m").

    Sizes stay separate words, so that "llama3 18b" is not "llama31 8b".
    """
    text = (_PARENTHESES.sub(" ", text.lower()) if "(" in text else text.lower()).rsplit("/", 1)[-1]
    runs: list[str] = []
    open_run = False
    for word in _GAP.split(text):
        if not word or (without and (without.issuperset(word.split(".")) or _RELEASE.fullmatch(word))):
            continue
        size = _SIZE.fullmatch(word) if word[-1] in _SIZE_IN_MILLIONS else None
        if size:
            runs.append(f"{size[1]}{_millions(size):g}m")
            open_run = False
            continue
        plain = word.replace(".", "")
        if open_run:
            runs[-1] += plain
        else:
            runs.append(plain)
        open_run = True
    return tuple(runs)


def _millions(size: re.Match[str]) -> float:
    return float(size[2].replace("p", ".")) * _SIZE_IN_MILLIONS[size[3]]


def _resolve(text: str) -> str | None:
    """Return the model name for a text, or None; several equally good matches are an error."""
    if text in _entries():
        return text
    for without in (frozenset[str](), _CHECKPOINT_WORDS, _CHECKPOINT_WORDS | _QUANTIZED_WORDS):
        wanted = _normalize(text, without)
        if not wanted:
            continue
        if wanted in _index():
            return _index()[wanted]
        found = _with_prefix(wanted)
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(found[:12]) + (" …" if len(found) > 12 else "")
            raise InputError(f"{text!r} matches several models: {shown}", field="model", value=text, fix=found[:12])
    return None


def _with_prefix(wanted: tuple[str, ...]) -> list[str]:
    """Return the models whose name starts with these words, split between words or letters and digits only."""
    prefix = " ".join(wanted)
    return [name for name in names() if prefix in _prefixes(name)]


@cache
def _prefixes(name: str) -> frozenset[str]:
    words = name.split("_")
    plain = "_".join(word for word in words if not _SIZE.fullmatch(word))
    found = {
        " ".join(_normalize(plain))
    }  # the size may be in the middle: nemotron nano v2 also matches nemotron_nano_9b_v2
    for count in range(1, len(words) + 1):
        found.add(" ".join(_normalize("_".join(words[:count]))))
        pieces = _PIECES.findall(words[count - 1])
        if not _SIZE.fullmatch(words[count - 1]):
            for cut in range(1, len(pieces)):
                found.add(" ".join(_normalize("_".join((*words[: count - 1], "".join(pieces[:cut]))))))
    return frozenset(found)


def _unknown_size(text: str, size: re.Match[str]) -> InputError:
    """Return the error for an uncommon size without a name, with the models of about that size."""
    wanted = _millions(size) * 1e6
    gap = {spec.name: abs(spec.params.total / wanted - 1) if wanted else math.inf for spec in all_specs()}
    near = sorted((name for name in gap if gap[name] <= SIZE_BAND), key=lambda name: gap[name])
    if near:
        return InputError(f"several models have about this size, name one: {', '.join(near)}", "model", text, near[:12])
    nearest = min(all_specs(), key=lambda spec: abs(spec.params.total - wanted)).name
    return InputError(f"no known model is within {SIZE_BAND:.0%} of this size; the nearest is {nearest}", "model", text)


def _recipe_as_model(text: str) -> InputError:
    fixes = [f"meshwright {command} {text}" for command in ("check", "estimate", "plan")]
    return InputError("this is a recipe file, not a model; pass it to check, estimate or plan", "model", text, fixes)


def is_path(text: str) -> bool:
    """Return whether a text is a file path: written like one, or an existing file or folder.

    A shipped model's name alone is never a path, so that a recipe means the same model in every working directory; nor
    is an id such as org/name, unless it or its folder exists.
    """
    if _HUB_URL.fullmatch(text):
        return False
    if text.lower().endswith(".json") or text.startswith((".", "~", os.sep)) or text.endswith(os.sep):
        return True
    if os.sep not in text:
        return file_access.exists(text) and not _is_listed(text)
    if text.count(os.sep) > 1 or file_access.exists(text):
        return True
    if text.lower() in _hub_ids() or (os.path.dirname(text).lower() in _organizations() and _is_listed(text)):
        return False
    return file_access.is_dir(os.path.dirname(text))


def _is_listed(text: str) -> bool:
    """Return whether a text names one or several shipped models."""
    try:
        return _resolve(text) is not None
    except InputError:
        return True


def _from_path(text: str) -> ModelSpec:
    config = load_config(text)
    if "model_type" not in config and _RECIPE_KEYS & config.keys():
        raise _recipe_as_model(text)
    path = file_access.resolved(text)
    name = path.name if file_access.is_dir(path) else path.parent.name if path.name == "config.json" else path.stem
    if name in _entries():  # another model than the shipped one of that name, which frameworks look up by name
        name = str(path)
    try:
        with collect_unread() as unread:
            spec = spec_from_config(config, name or "model", source=text)
    except InputError as error:
        raise InputError(f"{error.reason} (in {text})", error.field, error.value, error.fix) from error
    note_unknown_class(config, name or text)
    if unread:
        own = ", and the code that auto_map names is never run" if config.get("auto_map") else ""
        without = "all numbers are computed without " + ("this key" if len(unread) == 1 else "these keys")
        note(f"{text}: {spec.model_type} models have no {', '.join(unread)}: {without}{own}")
    return spec
