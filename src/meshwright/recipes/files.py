"""Recipes as files: TOML, YAML or JSON, read and written; and as the Python call that builds one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from meshwright import file_access
from meshwright.config_io import join_key, parse_tree, read_text
from meshwright.errors import InputError, MeshwrightError, unknown
from meshwright.recipes import build
from meshwright.recipes.build import field_locations, validate
from meshwright.recipes.index import is_known, load
from meshwright.recipes.types import SECTIONS, Recipe, recipe_fields
from meshwright.recipes.values import check_range

Format = Literal["toml", "yaml", "json", "python"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}

HEAD = ("name", "model", "goal", "cluster", "benchmark")
MAX_BYTES = 1_000_000


def is_file(name: str) -> bool:
    """Whether a name means a recipe file rather than a shipped recipe; a config.json is a model."""
    path = Path(name)
    if path.name == "config.json" or file_access.is_dir(path):
        return False
    return path.suffix.lower() in SUFFIXES


def from_file(path: str | Path) -> Recipe:
    """The recipe in a TOML, YAML or JSON file; it may name a `base` recipe and say only what differs."""
    place = Path(path)
    if place.suffix.lower() not in SUFFIXES:
        raise unknown("file type", place.suffix or place.name, SUFFIXES)
    return from_text(read_text(place, MAX_BYTES), SUFFIXES[place.suffix.lower()], place.stem, str(place))


def from_text(text: str, format: str, name: str = "recipe", where: str = "recipe") -> Recipe:
    """The recipe in a text of one of the readable formats; name is its name unless it says one."""
    content, lines = parse_tree(text, format, where)
    try:
        return _recipe({"name": name, **content})
    except MeshwrightError as error:
        line = _line(lines, error)
        place = f"{where}, line {line}" if line else where
        raise InputError(f"{error.reason} ({place})", field=error.field, value=error.value, fix=error.fix) from error


def to_text(recipe: Recipe, format: str = "toml") -> str:
    """A recipe as text: only what differs from the defaults."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "python":
        return _python(recipe)
    return {"toml": _write_toml, "yaml": _write_yaml, "json": _write_json}[format](content_of(recipe))


def content_of(recipe: Recipe) -> dict[str, Any]:
    """A recipe as nested plain values without those that are the defaults."""
    plain: dict[str, Any] = {key: getattr(recipe, key) for key in HEAD if key != "benchmark" or recipe.benchmark}
    for key, info in recipe_fields().items():
        section, field = key.split(".")
        value = getattr(getattr(recipe, section), field)
        if value != info.default:
            plain.setdefault(section, {})[field] = list(value) if isinstance(value, tuple) else value
    return plain


def _recipe(content: Mapping[str, Any]) -> Recipe:
    start: dict[str, Any] = {}
    if "base" in content:
        start = msgspec.to_builtins(_base(content["base"]))
    for key, value in content.items():
        if key in SECTIONS:
            start[key] = {**start.get(key, {}), **_section(key, value)}
        elif key in HEAD:
            start[key] = value
        elif key != "base":
            raise unknown("key", key, (*HEAD, "base", *SECTIONS))
    missing = [key for key in HEAD if key not in start and key != "benchmark"]
    if missing:
        raise InputError(f"say {' and '.join(missing)}, or name a base recipe", field=missing[0])
    return validate(start, Recipe)


def _base(name: Any) -> Recipe:
    """The shipped recipe that a file starts from."""
    if not isinstance(name, str) or not name.strip():
        raise InputError("is the name of a shipped recipe, such as llama3_8b_sft_config", field="base", value=name)
    if not is_known(name) and (is_file(name) or "/" in name):
        raise InputError("is the name of a shipped recipe, not a file", field="base", value=name)
    return load(name)


def _section(section: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise InputError("a section is a table of fields", field=section, value=fields)
    known = [key.split(".")[1] for key in recipe_fields() if key.startswith(f"{section}.")]
    for field, value in fields.items():
        if field not in known:
            raise unknown(f"{section} key", field, known)
        check_range(f"{section}.{field}", value)
    return fields


def _line(lines: Mapping[str, int], error: MeshwrightError) -> int | None:
    """The line that says what the error speaks of; none where nothing says it."""
    if error.field == "recipe":  # an unknown one
        return lines.get("base")
    name = error.field
    if name == "key" or name.endswith(" key"):  # an unknown one, of the recipe or of a section
        name = join_key(name.removesuffix("key").strip(), str(error.value))
    while name and name not in lines:  # msgspec names a weight in a blend data.blend[...]
        name = name[: max(name.rfind("."), name.rfind("["), 0)]
    return lines.get(name)


def _write_toml(content: dict[str, Any]) -> str:
    import tomlkit

    return tomlkit.dumps(content)


def _write_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write_yaml(content: dict[str, Any]) -> str:
    from ruamel.yaml import YAML

    yaml, out = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its own hint is None
    yaml.dump(content, out)
    return out.getvalue()


def _python(recipe: Recipe) -> str:
    """The call of a base that builds this recipe, with only what differs from it."""
    start = {"pretrain": build.pretrain, "sft": build.sft, "peft": build.peft}[recipe.goal]
    call: Callable[..., Recipe]
    if recipe.benchmark:
        names = (n for n, fields in build.PRECISIONS.items() if fields["matmul"] == recipe.precision.matmul)
        precision = next(names)
        base = start(recipe.model, recipe.cluster)
        head = f'benchmark(\n    {recipe.goal}("{recipe.model}", "{recipe.cluster}"), "{recipe.cluster}", "{precision}"'

        def call(**differences: Any) -> Recipe:
            return build.benchmark(base, recipe.cluster, precision, **differences)
    else:
        head = f'{recipe.goal}(\n    "{recipe.model}", "{recipe.cluster}"'

        def call(**differences: Any) -> Recipe:
            return start(recipe.model, recipe.cluster, **differences)

    bases = sorted({recipe.goal, "benchmark"} if recipe.benchmark else {recipe.goal})
    said = {"name": recipe.name, **_differences(recipe, call)}
    spelled = "".join(f",\n    {flat}={_literal(value)}" for flat, value in said.items())
    return f"from meshwright.recipes import {', '.join(bases)}\n\nrecipe = {head}{spelled},\n)\n"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _differences(recipe: Recipe, call: Callable[..., Recipe]) -> dict[str, Any]:
    """What must be said to the base, without what follows from the rest."""
    wanted, said = _flat(recipe), dict[str, Any]()
    for _ in range(2):
        made = _flat(call(**said))
        said.update({flat: value for flat, value in wanted.items() if made[flat] != value})
    for flat in list(said):
        rest = {other: value for other, value in said.items() if other != flat}
        if _flat(call(**rest)) == wanted:
            said = rest
    return said


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {flat: getattr(getattr(recipe, section), field) for flat, (section, field) in field_locations().items()}
