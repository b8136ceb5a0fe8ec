"""Arguments in the forms that agents and scripts send, rewritten to the form that a request has.

Only forms with one meaning are rewritten: camelCase names, numbers as strings, a list with one value, overrides as an
object or as one string, a config as an object, `gpus` and `gpu` apart. `inputs.read` refuses anything else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.api.argument_names import GPU_NAMES, NODE_NAMES, PER_NODE_NAMES, with_nodes
from meshwright.errors import InputError
from meshwright.parsing import snake_case
from meshwright.recipes.format_override import format_override

TARGETS = ("target", "model", "recipe", "file", "path", "run")
"""Names for what a call is about, in the order in which one is taken for another."""
NOTHING = ("", "null", "none", "undefined")
_GPU_COUNTS = ("gpu_count", "num_gpus", "n_gpus", "ngpus", "total_gpus", "number_of_gpus", "world_size", "count")
_ASSIGNMENT = re.compile(r"[\w.+~-]+\s*=")
_YAML = re.compile(r"[a-z_]+\.[a-z_]+\s*:\s*[^=]+")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Arguments:
    """The arguments of one call while they are rewritten; `notes` say how they were understood.

    `fields` and `texts` are the inputs of the verb by name (`inputs.Field` and `inputs.Text`, which reads this module).
    """

    def __init__(
        self, sent: Mapping[str, Any], fields: Mapping[str, Any], texts: Mapping[str, Any], files: bool
    ) -> None:
        self.fields, self.texts, self.files = fields, texts, files
        self.known = (*fields, *texts)
        self.values = dict(sent)
        self.notes: list[str] = []
        self._unwrap()
        self._rename()
        self._split_targets()
        self._join_gpus()
        self._take_names()
        if "to" in self.fields and not self._has("to") and self._has("framework") and not self._sends_text():
            self._move("framework", "to")  # a recipe of ours has no framework to be detected
        self.values = {name: self._value(name, value) for name, value in self.values.items() if self._says(name, value)}

    def _unwrap(self) -> None:
        """Take the arguments out of one object that holds all of them: {"arguments": {…}}."""
        if len(self.values) != 1:
            return
        ((name, inner),) = self.values.items()
        if (
            name not in self.known
            and isinstance(inner, Mapping)
            and any(snake_case(str(one)) in self.known for one in inner)
        ):
            self.values = {str(key): value for key, value in inner.items()}
            self.notes.append(f"arguments from {name}")

    def _split_targets(self) -> None:
        """Send the first of several targets as the target, and the others as more of them."""
        if "more" not in self.fields or self._has("more"):
            return
        name = next((one for one in ("target", "targets") if isinstance(self.values.get(one), list)), None)
        several = self.values.get(name) if name else None
        if isinstance(several, list) and several and all(isinstance(one, str) for one in several):
            del self.values[str(name)]
            self.values["target"] = several[0]
            if several[1:]:
                self.values["more"] = several[1:]

    def _rename(self) -> None:
        """Rename seqLen-like spellings of known names: maxGpus, max-gpus and MAX_GPUS are max_gpus."""
        for name in [*self.values]:
            plain = snake_case(name)
            if name not in self.known and plain in self.known and plain not in self.values:
                self.values[plain] = self.values.pop(name)

    def _says(self, name: str, value: Any) -> bool:
        """Return whether an argument says anything: null and an empty optional value do not."""
        if value is None:
            return name not in self.known
        field = self.fields.get(name)
        if field is None or field.required:
            return not (name in self.texts and isinstance(value, str) and value.strip().lower() in NOTHING)
        return not (isinstance(value, str) and value.strip().lower() in NOTHING) and value not in ([], {}, ())

    def _take_names(self) -> None:
        """Move a name that was sent as a text, or as another word for the target, to the field it belongs to."""
        field = next((one for one in self.fields.values() if one.input.texts), None)
        if field is None or self._has(field.name):
            return
        sent = [text for text in field.input.texts if self._has(text.name)]
        for text in sent:
            value = self.values[text.name]
            if isinstance(value, str) and is_name(value):
                self._move(text.name, field.name)
                return
        if sent:
            return
        other = next((name for name in TARGETS if name != field.name and self._is_name(name)), None)
        if other is not None:
            self._move(other, field.name)

    def _sends_text(self) -> bool:
        return any(self._has(name) for name in self.texts)

    def _has(self, name: str) -> bool:
        return self.values.get(name) not in (None, "")

    def _is_name(self, name: str) -> bool:
        value = self.values.get(name)
        return isinstance(value, str) and is_name(value)

    def _move(self, name: str, to: str) -> None:
        self.values[to] = self.values.pop(name)
        self.notes.append(f"{to} {self.values[to]!r} from {name}")

    def _join_gpus(self) -> None:
        """Write a count, a type and nodes that were sent apart as one cluster: 8 and H100 are 8xH100."""
        if "gpus" not in self.fields:
            self._rename_gpus()
            return
        cluster = self.values.get("gpus")
        if isinstance(cluster, Mapping):
            inner = {snake_case(str(name)): value for name, value in cluster.items()}
            inner["gpu"] = next((inner.pop(one) for one in ("type", "name", "model") if one in inner), inner.get("gpu"))
            self.values = {**{name: value for name, value in self.values.items() if name != "gpus"}, **inner}
            self.values = {name: value for name, value in self.values.items() if value is not None}
        kinds = [name for name in self._named(GPU_NAMES) if name not in self.fields]
        counts = [name for name in self._named(_GPU_COUNTS) if name not in self.fields]
        nodes = [name for name in self._named(NODE_NAMES) if name not in self.fields]
        each = [name for name in self._named(PER_NODE_NAMES) if name not in self.fields]
        parts = [*kinds, *counts, *nodes, *each]
        if not parts or any(len(one) > 1 for one in (kinds, counts, nodes, each)):
            return
        whole = self.values.get("gpus")
        kind = self.values[kinds[0]] if kinds else None
        count = _integer(self.values[counts[0]]) if counts else _integer(whole)
        if whole is not None and _integer(whole) is None:
            if kind is None and re.fullmatch(r"[A-Za-z][\w -]*", str(whole)):
                kind = whole  # gpus: "H100" with num_gpus: 8
            else:
                self._check_kind(str(whole), kinds, parts)
                return
        if not isinstance(kind, str):
            return
        written = _cluster(kind, count, *(_integer(self.values[one[0]]) if one else None for one in (nodes, each)))
        if written is None and len(parts) == 1 and whole is None:
            written = kind  # the error of a type without a count shows how both are written
        if written is None:
            return
        typed = ", ".join(f"{name} {self.values[name]}" for name in ("gpus", *parts) if name in self.values)
        for name in parts:
            del self.values[name]
        self.values["gpus"] = written
        self.notes.append(f"gpus {written} from {typed}")

    def _check_kind(self, whole: str, kinds: Sequence[str], parts: Sequence[str]) -> None:
        """Drop a GPU type that repeats the cluster's; raise InputError if it contradicts it."""
        if len(kinds) != len(parts):
            return
        meant = with_nodes("gpu", str(self.values[kinds[0]]), whole).removeprefix("--gpus ")
        if meant == whole:
            del self.values[kinds[0]]
        elif meant:
            reason = f"contradicts gpus {whole}; send the type and the count as one cluster"
            fixes = (f"gpus: {json.dumps(meant)}", f"gpus: {json.dumps(whole)}")
            raise InputError(reason, field=kinds[0], value=self.values[kinds[0]], fix=fixes)

    def _rename_gpus(self) -> None:
        """Read gpus as gpu where a call takes a GPU type; a count cannot be one."""
        if "gpu" not in self.fields:
            return
        count = _integer(self.values.get("gpus"))
        if self._has("gpu") and count is not None and "max_gpus" in self.fields:
            reason = "the count is the answer; a limit of it is max_gpus"
            raise InputError(reason, field="gpus", value=count, fix=(f"max_gpus: {count}",))
        if self._has("gpu"):
            return
        other = next((name for name in self._named(("gpus", *GPU_NAMES)) if name != "gpu"), None)
        if other is not None and isinstance(self.values[other], str | list) and _integer(self.values[other]) is None:
            self.values["gpu"] = self.values.pop(other)
            self.notes.append(f"gpu {self.values['gpu']!r} from {other}")

    def _named(self, names: Iterable[str]) -> list[str]:
        """Return the sent names that are one of these in any spelling."""
        wanted = {name.replace("_", "") for name in names}
        return [
            name
            for name in self.values
            if snake_case(name).replace("_", "") in wanted and self.values[name] is not None
        ]

    def _value(self, name: str, value: Any) -> Any:
        """Return a value in the type of its field, if it has one meaning there."""
        if name in self.texts:
            return json.dumps(value) if isinstance(value, Mapping) else value
        field = self.fields.get(name)
        if field is None:
            return value
        if field.repeated:
            return overrides_of(value) if name == "overrides" else [value] if isinstance(value, str) else value
        if isinstance(value, list) and value and all(isinstance(one, str | int) for one in value):
            if field.input.listed:
                return ",".join(str(one) for one in value)
            value = value[0] if len(value) == 1 and isinstance(value[0], str) else value
        if isinstance(value, str):
            return self._from_string(field, value.strip() if not field.input.any_text else value)
        if isinstance(value, float) and float not in field.types and int in field.types and value == value // 1:
            return int(value)
        return value

    def _from_string(self, field: Any, value: str) -> Any:
        if str in field.types:
            is_path = self.files and value.startswith("~")
            return os.path.expanduser(value) if is_path else value
        if bool in field.types:
            return _BOOLEANS.get(value.lower(), value)
        plain = value.replace(",", "").replace("_", "")
        try:
            return float(plain) if float in field.types else int(plain)
        except ValueError:
            return value


def is_name(value: str) -> bool:
    """Return whether a text is the name of a model, recipe or file rather than a file's contents."""
    text = value.strip()
    is_command = " -" in text or "\n" in value
    return bool(text) and len(text) < 300 and not is_command and not set("={}[]<>;\"'") & set(text)


def _integer(value: Any) -> int | None:
    """Return a count written as a number or as digits; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        return int(value)
    return value if isinstance(value, int) else None


def _cluster(kind: str, count: int | None, nodes: int | None, each: int | None) -> str | None:
    """Return a cluster string from its parts; None if they leave the count open or contradict."""
    if any(one is not None and one < 1 for one in (count, nodes, each)):
        return None
    if nodes is not None and each is None and count is not None:
        each = count // nodes if count % nodes == 0 else None
        return None if each is None else f"{nodes}x{each}x{kind}"
    if nodes is not None and each is not None:
        return f"{nodes}x{each}x{kind}" if count in (None, nodes * each) else None
    if nodes is not None:
        return with_nodes("nodes", str(nodes), kind).removeprefix("--gpus ") or None
    total = count if count is not None else each
    return None if total is None else f"{total}x{kind}"


def written_override(key: str, value: Any) -> str:
    """Return one override as it is sent, e.g. layout.sp=true."""
    return format_override(key, value)


def overrides_of(value: Any) -> Any:
    """Return overrides as a list of KEY=VALUE: from an object, also nested, from one string, or from a list."""
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, Mapping):
        return _from_object(value)
    if not isinstance(value, list | tuple):
        return value
    found: list[Any] = []
    for one in value:
        more = _from_object(one) if isinstance(one, Mapping) else [_assignment(one) if isinstance(one, str) else one]
        found += more if isinstance(more, list) else [one]
    return found


def _from_text(text: str) -> Any:
    text = text.strip()
    if text.startswith(("{", "[")):
        try:
            return overrides_of(json.loads(text))
        except ValueError:
            return [text]
    if len(_ASSIGNMENT.findall(text)) < 2:
        return [_assignment(text)]
    return [word.strip().rstrip(",;") for word in re.split(r"[\s,;]+(?=[\w.+~-]+\s*=)", text)]


def _assignment(text: str) -> str:
    """Return layout.tp: 4 as layout.tp=4; any other text as it is."""
    return "=".join(part.strip() for part in text.split(":", 1)) if _YAML.fullmatch(text.strip()) else text


def _from_object(value: Mapping[Any, Any]) -> Any:
    """Return the overrides of {"layout.tp": 4}, {"layout": {"tp": 4}} or {"key": "layout.tp", "value": 4}."""
    if set(value) in ({"key", "value"}, {"field", "value"}, {"name", "value"}):
        key = value.get("key") or value.get("field") or value.get("name")
        return [format_override(str(key), value["value"])]
    found: list[str] = []
    for key, one in value.items():
        if isinstance(one, Mapping) and _is_section(str(key)):
            found += [format_override(f"{key}.{name}", inner) for name, inner in one.items()]
        else:
            found.append(format_override(str(key), one))
    return found


def _is_section(name: str) -> bool:
    """Return whether a recipe has a section of this name."""
    from meshwright.recipes.types import recipe_fields

    return any(key.startswith(f"{name}.") for key in recipe_fields())
