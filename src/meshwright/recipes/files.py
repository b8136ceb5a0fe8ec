"""Read and write recipes as TOML, YAML or JSON, and write the Python call that builds one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from meshwright import file_access
from meshwright.clusters import file_as_typed, file_of_cluster, with_file
from meshwright.config_io import join_key, parse_tree, read_text
from meshwright.errors import InputError, MeshwrightError, unknown
from meshwright.recipes import build
from meshwright.recipes.build import validate
from meshwright.recipes.index import is_known, load
from meshwright.recipes.overrides import steps_and_epochs
from meshwright.recipes.run_folder import is_run_folder, recipe_of_run
from meshwright.recipes.types import ENGINES, GOALS, SECTIONS, Recipe, field_value, recipe_fields
from meshwright.recipes.values import check_range

Format = Literal["toml", "yaml", "json", "python"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}

HEAD = ("name", "model", "goal", "cluster", "benchmark", "engine")
OPTIONAL = {"benchmark": False, "engine": ENGINES[0]}  # of the head, with their defaults
MAX_BYTES = 1_000_000


def is_file(name: str) -> bool:
    """Return whether a name is a recipe file, not a shipped recipe; a config.json is a model."""
    path = Path(name)
    if path.name == "config.json" or file_access.is_dir(path):
        return False
    return path.suffix.lower() in SUFFIXES


def from_file(path: str | Path, cluster: str | None = None) -> Recipe:
    """Read a recipe from a TOML, YAML or JSON file, which may name a `base` recipe, or from the folder of a run.

    `cluster` is that of a file which names none; without it, such a file is refused.
    """
    if is_run_folder(path):
        return recipe_of_run(path)
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise unknown("file type", file.suffix or file.name, SUFFIXES)
    recipe = from_text(read_text(file, MAX_BYTES), SUFFIXES[file.suffix.lower()], file.stem, str(file), cluster)
    return _with_cluster_beside(recipe, file.parent)


def from_text(
    text: str, format: str, name: str = "recipe", where: str = "recipe", cluster: str | None = None
) -> Recipe:
    """Parse a recipe; `name` and `cluster` are the defaults for a text that does not set them."""
    content, lines = parse_tree(text, format, where)
    try:
        return _recipe({"name": name, **content}, cluster)
    except MeshwrightError as error:
        line = _line(lines, error)
        location = f"{where}, line {line}" if line else where
        raise InputError(f"{error.reason} ({location})", field=error.field, value=error.value, fix=error.fix) from error


def _with_cluster_beside(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with the full path of its cluster file, if that is relative to the recipe's folder."""
    path = Path(file_as_typed(recipe.cluster))
    if not file_of_cluster(recipe.cluster) or file_access.closed() or path.is_absolute():
        return recipe
    beside = folder / path
    if not beside.is_file():  # then it is relative to the current folder
        return recipe
    return msgspec.structs.replace(recipe, cluster=with_file(recipe.cluster, str(beside.resolve())))


def with_relative_cluster(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe that is saved in a folder: the path of a cluster file in it is relative, so both can be moved."""
    path, there = file_of_cluster(recipe.cluster), folder.resolve()
    if not path or file_access.closed() or not Path(path).is_relative_to(there):
        return recipe
    inside = Path(path).relative_to(there).as_posix()
    return msgspec.structs.replace(recipe, cluster=with_file(recipe.cluster, inside))


def to_text(recipe: Recipe, format: str = "toml") -> str:
    """Return a recipe as text, without default values."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if format == "python":
        return _python(recipe)
    return {"toml": _write_toml, "yaml": _write_yaml, "json": _write_json}[format](content_of(recipe))


def content_of(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as nested plain values, without default values."""
    plain: dict[str, Any] = {
        key: getattr(recipe, key) for key in HEAD if key not in OPTIONAL or getattr(recipe, key) != OPTIONAL[key]
    }
    for key, info in recipe_fields().items():
        section, field = key.split(".")
        value = field_value(recipe, key)
        if value != info.default:
            plain.setdefault(section, {})[field] = list(value) if isinstance(value, tuple) else value
    if recipe.train.epochs:
        plain["train"].pop("steps", None)  # the epochs replace them
    return plain


def _recipe(content: Mapping[str, Any], cluster: str | None = None) -> Recipe:
    merged: dict[str, Any] = {}
    if "base" in content:
        merged = msgspec.to_builtins(_base(content["base"]))
    for key, value in content.items():
        if key in SECTIONS:
            merged[key] = {**merged.get(key, {}), **_section(key, value)}
        elif key in HEAD:
            merged[key] = value
        elif key != "base":
            raise unknown("key", key, (*HEAD, "base", *SECTIONS))
    train = content.get("train")
    if isinstance(train, Mapping) and train.get("epochs") and "steps" in train:
        raise steps_and_epochs(train["steps"], train["epochs"])
    if isinstance(train, Mapping) and "steps" in train:
        merged["train"]["epochs"] = 0.0  # of a base recipe
    if cluster is not None:
        merged.setdefault("cluster", cluster)
    missing = [key for key in HEAD if key not in merged and key not in OPTIONAL]
    if missing:
        fix = ('cluster = "8xH100"', "--gpus 8xH100") if missing == ["cluster"] else ()
        raise InputError(f"missing; set {' and '.join(missing)}, or a base recipe", field=missing[0], fix=fix)
    for key, known in (("goal", GOALS), ("engine", ENGINES)):
        if isinstance(merged.get(key), str) and merged[key] not in known:
            raise unknown(key, merged[key], known)
    return validate(merged, Recipe)


def _base(name: Any) -> Recipe:
    """Return the base recipe of a file."""
    if not isinstance(name, str) or not name.strip():
        raise InputError("must be the name of a shipped recipe, such as llama3_8b_sft_config", field="base", value=name)
    if not is_known(name) and (is_file(name) or "/" in name):
        raise InputError("must be the name of a shipped recipe, not a file", field="base", value=name)
    return load(name)


def _section(section: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise InputError("must be a table of fields", field=section, value=fields)
    known = [key.split(".")[1] for key in recipe_fields() if key.startswith(f"{section}.")]
    for field, value in fields.items():
        if field not in known:
            raise unknown(f"{section} key", field, known)
        check_range(f"{section}.{field}", value)
    return fields


def _line(lines: Mapping[str, int], error: MeshwrightError) -> int | None:
    """Return the line of the key that the error is about, or None."""
    if error.field == "recipe":  # an unknown base recipe
        return lines.get("base")
    name = error.field
    if name == "key" or name.endswith(" key"):  # an unknown key of the recipe or a section
        name = join_key(name.removesuffix("key").strip(), str(error.value))
    while name and name not in lines:  # msgspec reports a blend weight as data.blend[...]
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
    """Return the builder call for this recipe, with only the differences from the base."""
    builder = {"pretrain": build.pretrain, "sft": build.sft, "peft": build.peft}[recipe.goal]
    call: Callable[..., Recipe]
    if recipe.benchmark:
        names = (n for n, fields in build.PRECISIONS.items() if fields["matmul"] == recipe.precision.matmul)
        precision = next(names)
        base = builder(recipe.model, recipe.cluster)
        head = f'benchmark(\n    {recipe.goal}("{recipe.model}", "{recipe.cluster}"), "{recipe.cluster}", "{precision}"'

        def call(**differences: Any) -> Recipe:
            return build.benchmark(base, recipe.cluster, precision, **differences)
    else:
        head = f'{recipe.goal}(\n    "{recipe.model}", "{recipe.cluster}"'

        def call(**differences: Any) -> Recipe:
            return builder(recipe.model, recipe.cluster, **differences)

    bases = sorted({recipe.goal, "benchmark"} if recipe.benchmark else {recipe.goal})
    engine = {} if recipe.engine == ENGINES[0] else {"engine": recipe.engine}
    arguments = {"name": recipe.name, **engine, **_differences(recipe, call)}
    written = "".join(f",\n    {flat}={_literal(value)}" for flat, value in arguments.items())
    return f"from meshwright.recipes import {', '.join(bases)}\n\nrecipe = {head}{written},\n)\n"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _differences(recipe: Recipe, call: Callable[..., Recipe]) -> dict[str, Any]:
    """Return the arguments the builder needs, without those it derives."""
    wanted, needed = _flat(recipe), dict[str, Any]()
    for _ in range(2):
        built = _flat(call(**needed))
        needed.update({flat: value for flat, value in wanted.items() if built[flat] != value})
    for flat in list(needed):
        rest = {other: value for other, value in needed.items() if other != flat}
        if _flat(call(**rest)) == wanted:
            needed = rest
    return needed


def _flat(recipe: Recipe) -> dict[str, Any]:
    return {info.flat: field_value(recipe, key) for key, info in recipe_fields().items()}
