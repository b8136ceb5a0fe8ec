"""Write the tables of keys that frameworks accept, from their source: nothing of a framework is imported or run.

PYTHONPATH=src:. python -m benchmarks.corpora.source_tables automodel CHECKOUT [--commit HASH]

Fine-tuning front ends inherit from transformers' TrainingArguments, whose source is that of the installed package.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from meshwright import frameworks

PLAIN = {
    "int": "int", "float": "float", "bool": "bool", "str": "str", "None": "none", "list": "list", "List": "list",
    "Sequence": "list", "tuple": "list", "Tuple": "list", "set": "list", "dict": "map", "Dict": "map",
    "Mapping": "map", "Path": "str", "PathLike": "str", "NonNegativeInt": "int", "PositiveInt": "int",
    "StrictInt": "int", "StrictBool": "bool",
}  # fmt: skip
"""Types that values of a file are compared with, by the name of an annotation."""
WRAPPERS = ("Annotated", "Optional", "Union", "Final", "ClassVar", "Required", "NotRequired")
TRANSFORMERS_4 = (
    "evaluation_strategy", "fp16_backend", "fp16_opt_level", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "group_by_length", "half_precision_backend",
    "include_inputs_for_metrics", "include_num_input_tokens_seen", "include_tokens_per_second", "jit_mode_eval",
    "length_column_name", "logging_dir", "mp_parameters", "neftune_noise_alpha", "no_cuda", "overwrite_output_dir",
    "past_index", "per_gpu_eval_batch_size", "per_gpu_train_batch_size", "push_to_hub_model_id",
    "push_to_hub_organization", "push_to_hub_token", "ray_scope", "save_safetensors", "split_batches",
    "torch_empty_cache_steps", "torchdynamo", "tpu_metrics_debug", "tpu_num_cores", "use_cpu", "use_ipex",
    "use_legacy_prediction_loop", "use_mps_device", "warmup_ratio", "dispatch_batches",
)  # fmt: skip
"""Arguments of transformers 4, listed by hand: the front ends accept it too, and only version 5 is installed."""
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Keyword:
    """A key that a class or function accepts."""

    name: str
    types: tuple[str, ...] = ()  # empty: any
    choices: tuple[str, ...] = ()
    required: bool = False
    nested: tuple[str, ...] = ()  # classes whose fields a table or the items of a list have
    many: bool = False  # a list of `nested`
    default: bool | None = None  # of a switch

    def text(self) -> str:
        """Return the keyword as a cell of a table."""
        types = "|".join(dict.fromkeys(self.types))
        choices = "|".join(dict.fromkeys(self.choices))
        return self.name + ("!" if self.required else "") + (f":{types}" if types else "") + (
            f"={choices}" if choices else ""
        )  # fmt: skip


@dataclass
class Module:
    """A module of a package: its syntax, and where the names that it imports come from."""

    name: str
    tree: ast.Module
    is_package: bool
    imported: dict[str, str] = field(default_factory=dict)
    defined: dict[str, ast.stmt] = field(default_factory=dict)


class Sources:
    """The modules of some packages."""

    def __init__(self, roots: Mapping[str, Path], under: tuple[str, ...] = ()) -> None:
        self.modules: dict[str, Module] = {}
        for package, folder in roots.items():
            for path in sorted(folder.rglob("*.py")):
                name = ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
                if not under or name.startswith(under):
                    self.modules[name] = _module(name, path)

    def find(self, module: str, name: str, seen: int = 0) -> tuple[Module, ast.stmt] | None:
        """Return the definition that a name of a module refers to."""
        found = self.modules.get(module)
        if found is None or seen > 8:
            return None
        if name in found.defined:
            one = found.defined[name]
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name) and one.value.id != name:  # an alias
                return self.find(module, one.value.id, seen + 1)
            return found, one
        if name in found.imported:
            origin, _, last = found.imported[name].rpartition(".")
            return self.find(origin, last, seen + 1)
        return None

    def fields(self, module: Module, owner: ast.ClassDef) -> dict[str, Keyword]:
        """Return the annotated fields of a class and its bases; unknown bases have none."""
        found: dict[str, Keyword] = {}
        for base in reversed(owner.bases):
            known = self.find(module.name, _last(base))
            if known is not None and isinstance(known[1], ast.ClassDef):
                found |= self.fields(known[0], known[1])
        for one in owner.body:
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and not one.target.id.startswith("_")
            ):
                if "ClassVar" in ast.unparse(one.annotation):
                    continue
                keyword = self.keyword(module, one.target.id, one.annotation, one.value is None)
                choices = keyword.choices or _parser_choices(one.value)
                found[one.target.id] = replace(keyword, default=_default(one.value), choices=choices)
                alias = _alias(one.value)
                if alias:
                    found[alias] = self.keyword(module, alias, one.annotation, False)
        return found

    def keyword(self, module: Module, name: str, annotation: ast.expr | None, required: bool) -> Keyword:
        """Return a keyword with the types and choices of its annotation."""
        types, choices, nested, many = self._types(module, annotation)
        if "?" in types:  # a type outside the sources accepts other values
            return Keyword(name, (), (), required, tuple(nested), many)
        return Keyword(name, tuple(types), tuple(choices), required, tuple(nested), many)

    def _types(self, module: Module, node: ast.expr | None) -> tuple[list[str], list[str], list[str], bool]:
        if node is None:
            return ["?"], [], [], False
        if isinstance(node, ast.Constant):
            if node.value is None:
                return ["none"], [], [], False
            return self._types(module, ast.parse(str(node.value), mode="eval").body)
        if isinstance(node, ast.BinOp):
            return self._merged(module, (node.left, node.right))
        if isinstance(node, ast.Subscript):
            return self._subscript(module, node)
        name = _last(node)
        if name in PLAIN:
            return [PLAIN[name]], [], [], False
        found = self.find(module.name, name)
        if found is None:
            return ["?"], [], [], False
        where, definition = found
        if isinstance(definition, ast.ClassDef):
            values = _enum_values(definition)
            if any("Enum" in _last(base) for base in definition.bases) and not values:
                return ["?"], [], [], False
            if values:
                return ["str"], values, [], False
            if any(isinstance(one, ast.AnnAssign) for one in definition.body):
                return ["map"], [], [f"{where.name}:{definition.name}"], False
        if isinstance(definition, ast.Assign):
            return self._types(where, definition.value)
        return ["?"], [], [], False

    def _subscript(self, module: Module, node: ast.Subscript) -> tuple[list[str], list[str], list[str], bool]:
        name = _last(node.value)
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            values = [one.value for one in parts if isinstance(one, ast.Constant)]
            names = [str(one) if not isinstance(one, bool) else str(one).lower() for one in values if one is not None]
            kinds = {type(one).__name__ for one in values} - {"NoneType"}
            return [*sorted(kinds), *(["none"] if None in values else [])], names, [], False
        if name == "Annotated":
            return self._types(module, parts[0])
        if name == "Optional":
            types, *rest = self._types(module, parts[0])
            return [*types, "none"], *rest
        if name == "Union":
            return self._merged(module, parts)
        plain = PLAIN.get(name, "?")
        if plain == "list":
            _, _, nested, _ = self._types(module, parts[0])
            return ["list"], [], nested, bool(nested)
        return [plain], [], [], False

    def _merged(self, module: Module, parts: Iterable[ast.expr]) -> tuple[list[str], list[str], list[str], bool]:
        found = [self._types(module, one) for one in parts]
        types = [kind for one in found for kind in one[0]]
        with_choices = [one for one in found if one[1]]
        open_text = any("str" in one[0] and not one[1] for one in found)  # Literal["a"] | str accepts any text
        choices = [] if open_text else [choice for one in with_choices for choice in one[1]]
        return types, choices, [name for one in found for name in one[2]], any(one[3] for one in found)

    def parameters(self, module: Module, function: ast.FunctionDef, skip: int) -> list[Keyword]:
        """Return the parameters of a function that can be given by name."""
        arguments = function.args
        given = [*arguments.posonlyargs, *arguments.args]
        first_default = len(given) - len(arguments.defaults)
        found = [
            self.keyword(module, one.arg, one.annotation, place < first_default)
            for place, one in enumerate(given)
            if place >= skip
        ]
        found += [
            self.keyword(module, one.arg, one.annotation, default is None)
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
        return [*found, Keyword("**")] if arguments.kwarg else found

    def accepted(self, module: Module, owner: Definition) -> list[Keyword] | None:
        """Return the keywords of a class or function; None if a class outside the sources decides."""
        if isinstance(owner, ast.FunctionDef):
            return self.parameters(module, owner, 0)
        own = next((one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if own is not None:
            return self.parameters(module, own, 1)
        bases = [base for base in owner.bases if _last(base) not in ("object", "Protocol", "ABC", "Generic")]
        known = [self.find(module.name, _last(base)) for base in bases]
        if any(one is None or not isinstance(one[1], ast.ClassDef) for one in known):
            return None
        if _is_dataclass(owner):
            return list(self.fields(module, owner).values())
        for one in known:
            if one is not None and isinstance(one[1], ast.ClassDef):
                return self.accepted(one[0], one[1])
        return []


def _module(name: str, path: Path) -> Module:
    found = Module(name, ast.parse(path.read_text(encoding="utf-8")), path.name == "__init__.py")
    package = name if found.is_package else name.rpartition(".")[0]
    for one in _statements(found.tree.body):
        if isinstance(one, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - one.level + 1]) if one.level else ""
            origin = ".".join(part for part in (base, one.module or "") if part)
            for alias in one.names:
                found.imported[alias.asname or alias.name] = f"{origin}.{alias.name}"
        elif isinstance(one, ast.ClassDef | ast.FunctionDef):
            found.defined[one.name] = one
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.defined[target.id] = one
    return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under if and try."""
    for one in body:
        if isinstance(one, ast.If):
            yield from _statements([*one.body, *one.orelse])
        elif isinstance(one, ast.Try):
            yield from _statements([*one.body, *(part for each in one.handlers for part in each.body), *one.orelse])
        else:
            yield one


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _default(value: ast.expr | None) -> bool | None:
    """Return the default of a switch; None if it is not true or false."""
    if isinstance(value, ast.Call):
        value = next((one.value for one in value.keywords if one.arg == "default"), None)
    found = value.value if isinstance(value, ast.Constant) else None
    return found if isinstance(found, bool) else None


def _parser_choices(value: ast.expr | None) -> tuple[str, ...]:
    """Return the choices that a field passes to its command-line parser: metadata={"choices": [...]}."""
    for one in value.keywords if isinstance(value, ast.Call) else ():
        if one.arg == "metadata" and isinstance(one.value, ast.Dict):
            named = {
                getattr(key, "value", ""): item for key, item in zip(one.value.keys, one.value.values, strict=True)
            }
            listed = named.get("choices")
            items = listed.elts if isinstance(listed, ast.List | ast.Tuple) else []
            return tuple(item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))
    return ()


def _alias(value: ast.expr | None) -> str:
    """Return another name that pydantic reads a field by."""
    if not isinstance(value, ast.Call):
        return ""
    found = [one.value for one in value.keywords if one.arg in ("alias", "validation_alias")]
    return str(found[0].value) if found and isinstance(found[0], ast.Constant) else ""


def _enum_values(owner: ast.ClassDef) -> list[str]:
    if not any("Enum" in _last(base) for base in owner.bases):
        return []
    values = [one.value for one in owner.body if isinstance(one, ast.Assign)]
    if not all(isinstance(one, ast.Constant) for one in values):
        return []
    return [str(one.value) for one in values if isinstance(one, ast.Constant) and one.value is not None]


def _is_dataclass(owner: ast.ClassDef) -> bool:
    names = [_last(one.func if isinstance(one, ast.Call) else one) for one in owner.decorator_list]
    return "dataclass" in names


class Automodel:
    """AutoModel's names, the keywords of its classes, its recipes and the blocks that recipes read."""

    package = "nemo_automodel"
    with_keywords = tuple(
        f"nemo_automodel.{one}"
        for one in (
            "_transformers", "components._peft", "components.datasets", "components.eval", "components.flow_matching",
            "components.loggers", "components.loss", "components.models.common", "components.moe",
            "components.optim", "components.quantization", "components.training",
        )
    )  # fmt: skip
    loader = "nemo_automodel.components.datasets.loader"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = Sources({self.package: root / self.package})

    @cached_property
    def dataset_configs(self) -> dict[str, str]:
        """Return the config class of each dataset that is named by an older class or function."""
        module = self.sources.modules[self.loader]
        prefix = module.defined["_DATASETS"]
        table = module.defined["_DATASET_CONFIGS"]
        if not isinstance(prefix, ast.Assign) or not isinstance(table, ast.AnnAssign):
            raise ValueError(f"{self.loader} has changed")
        names = {"_DATASETS": ast.literal_eval(prefix.value)}
        found = eval(
            compile(ast.Expression(table.value or ast.Dict([], [])), "table", "eval"), {"__builtins__": {}}, names
        )
        return dict(found)

    def lines(self) -> Iterator[str]:
        yield "recipes\t" + " ".join(sorted(self._recipes()))
        yield "blocks\t" + " ".join(sorted(self._blocks()))
        yield "models\t" + " ".join(sorted(self._models()))
        for name, module in sorted(self.sources.modules.items()):
            names = [one for one in module.defined if not one.startswith("_")]
            names += [
                f"{one}={origin}" if module.is_package and origin.startswith(self.package) else one
                for one, origin in module.imported.items()
                if not one.startswith("_") and one not in module.defined and origin.startswith(self.package)
            ]
            names += [f"{one}={origin}" for one, origin in _lazy(module)]
            children = [other for other in self.sources.modules if other.rpartition(".")[0] == name]
            names += [one.rpartition(".")[2] for one in children if one.rpartition(".")[2] not in names]
            yield f"{name}\t{' '.join(sorted(dict.fromkeys(names)))}"
        for name, module in sorted(self.sources.modules.items()):
            if name.startswith(self.with_keywords):
                yield from self._keywords(module)

    def _keywords(self, module: Module) -> Iterator[str]:
        for name, owner in module.defined.items():
            if name.startswith("_") or not isinstance(owner, ast.ClassDef | ast.FunctionDef):
                continue
            path = f"{module.name}.{name}"
            config = self.dataset_configs.get(path)
            if config is not None:
                found = self.sources.find(*config.rsplit(".", 1))
                accepted = self.sources.accepted(*found) if found else None  # type: ignore[arg-type]
            else:
                accepted = self.sources.accepted(module, owner)
            yield f"{path}()\t{' '.join(one.text() for one in accepted) if accepted is not None else '**'}"

    def _recipes(self) -> Iterator[str]:
        for name, module in self.sources.modules.items():
            if name.startswith(f"{self.package}.recipes.") and not name.rpartition(".")[2].startswith("_"):
                yield from (one for one in module.defined if "Recipe" in one and one != "BaseRecipe")

    def _models(self) -> set[str]:
        """Return the architectures that AutoModel has its own models for."""
        tree = self.sources.modules[f"{self.package}._transformers.registry"].tree
        pairs = [node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple) and len(node.elts) == 2]
        names = [one[0].value for one in pairs if isinstance(one[0], ast.Constant) and isinstance(one[1], ast.Tuple)]
        return {name for name in names if isinstance(name, str) and "." not in name}

    def _blocks(self) -> set[str]:
        """Return the top-level keys that any recipe reads from its config."""
        found: set[str] = set()
        for name, module in self.sources.modules.items():
            if not name.startswith(
                (f"{self.package}.recipes", f"{self.package}.cli", f"{self.package}.components.launcher")
            ):
                continue
            for node in ast.walk(module.tree):
                found |= set(_read_keys(node))
        return found


def _read_keys(node: ast.AST) -> Iterator[str]:
    """Yield the top-level keys of a config that an expression reads: cfg.get("a.b"), cfg.a, "a" in cfg."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        first = node.args[0]
        reads = node.func.attr in ("get", "pop", "get_as_string", "instantiate_path")
        if reads and isinstance(first, ast.Constant) and isinstance(first.value, str) and _is_config(node.func.value):
            yield first.value.split(".")[0]
    elif isinstance(node, ast.Attribute) and _is_config(node.value) and not node.attr.startswith("_"):
        yield node.attr
    elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
        if any(_is_config(one) for one in node.comparators):
            yield node.left.value
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and _is_config(node.value):
        yield str(node.slice.value)
    elif isinstance(node, ast.arg | ast.keyword) and (node.arg or "").endswith("_key"):
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def _is_config(node: ast.expr) -> bool:
    return _last(node) in ("cfg", "config", "_raw", "raw_config", "recipe_cfg", "raw")


def _lazy(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a package imports when they are first used."""
    for name, one in module.defined.items():
        value = getattr(one, "value", None)
        if "LAZY" not in name.upper() or not isinstance(value, ast.Dict):
            continue
        for key, origin in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant):
                parts = origin.elts if isinstance(origin, ast.Tuple) else [origin]
                texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
                if not texts:
                    continue
                place = texts[0] if not texts[0].startswith(".") else module.name + texts[0]
                yield str(key.value), f"{place}.{texts[1] if len(texts) > 1 else key.value}"


@dataclass(frozen=True)
class FrontEnd:
    """A fine-tuning front end: the classes whose fields are the keys of its files."""

    package: str
    folder: str  # of the package in its repository
    under: tuple[str, ...]  # modules that are read
    classes: tuple[str, ...]  # module:Class
    transformers: tuple[str, ...] = ()  # modules of transformers that are read
    patterns: tuple[str, ...] = ()  # more classes: module pattern:class pattern

    def sources(self, root: Path) -> Sources:
        found = Sources({self.package: root / self.folder}, self.under)
        spec = importlib.util.find_spec("transformers") if self.transformers else None
        if spec is not None and spec.origin:
            found.modules |= Sources({"transformers": Path(spec.origin).parent}, self.transformers).modules
            found.modules["transformers"] = _reexports("transformers", found, self.transformers)
        return found

    def lines(self, root: Path) -> Iterator[str]:
        sources = self.sources(root)
        top: dict[str, Keyword] = {}
        for place in self._places(sources):
            found = sources.find(*place.split(":"))
            if found is None or not isinstance(found[1], ast.ClassDef):
                raise ValueError(f"{place} is not in {root}")
            for name, one in sources.fields(*found).items():
                top[name] = _either(top[name], one) if name in top else one
        if self.transformers:
            top = {**{name: Keyword(name) for name in TRANSFORMERS_4}, **top}
        yield from _nested("", top, sources, 0)
        yield from _switches(top)
        yield from _trainer_names()

    def _places(self, sources: Sources) -> Iterator[str]:
        yield from self.classes
        for pattern in self.patterns:
            where, what = (re.compile(part) for part in pattern.split(":"))
            for name, module in sources.modules.items():
                if where.fullmatch(name):
                    yield from (f"{name}:{one}" for one in module.defined if what.fullmatch(one))


def _switches(top: Mapping[str, Keyword]) -> Iterator[str]:
    """Yield the switches that are on by default, which --no_NAME turns off, and those that need a value."""
    switches = {name: one for name, one in top.items() if one.types and {*one.types} <= {"bool", "none"}}
    yield f"=on\t{' '.join(name for name, one in switches.items() if one.default)}"
    optional = (name for name, one in switches.items() if "none" in one.types and one.default is None)
    yield f"=valued\t{' '.join(optional)}"


def _trainer_names() -> Iterator[str]:
    """Yield the optimizers and schedules of transformers, which front ends accept as text."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.origin:
        return
    folder = Path(spec.origin).parent
    for owner, file, name in (
        ("=optim", "training_args", "OptimizerNames"),
        ("=schedule", "trainer_utils", "SchedulerType"),
    ):
        found = _module(file, folder / f"{file}.py").defined[name]
        yield f"{owner}\t{' '.join(_enum_values(found)) if isinstance(found, ast.ClassDef) else ''}"


def _either(one: Keyword, other: Keyword) -> Keyword:
    """Return the keyword of two classes that accept it."""
    if not one.types or not other.types:
        return Keyword(one.name, nested=(*one.nested, *other.nested), many=one.many or other.many)
    same = one.choices and other.choices
    choices = (*one.choices, *other.choices) if same else ()
    return Keyword(
        one.name, (*one.types, *other.types), choices, False, (*one.nested, *other.nested), one.many or other.many,
        True if True in (one.default, other.default) else one.default if one.default is not None else other.default,
    )  # fmt: skip


def _reexports(name: str, sources: Sources, under: tuple[str, ...]) -> Module:
    found = Module(name, ast.Module([], []), True)
    for one in under:
        for defined in sources.modules[one].defined if one in sources.modules else ():
            found.imported[defined] = f"{one}.{defined}"
    return found


def _nested(owner: str, keywords: Mapping[str, Keyword], sources: Sources, depth: int) -> Iterator[str]:
    cells = []
    below: list[tuple[str, dict[str, Keyword]]] = []
    for name, one in keywords.items():
        cells.append(Keyword(one.name, one.types, one.choices).text())
        if one.nested and depth < 3:
            merged: dict[str, Keyword] = {}
            for place in dict.fromkeys(one.nested):
                found = sources.find(*place.split(":"))
                if found is not None and isinstance(found[1], ast.ClassDef):
                    for key, each in sources.fields(*found).items():
                        merged[key] = _either(merged[key], each) if key in merged else each
            path = f"{owner}.{name}" if owner else name
            below.append((f"{path}[]" if one.many else path, merged))
    yield f"{owner}\t{' '.join(cells)}"
    for path, merged in below:
        yield from _nested(path, merged, sources, depth + 1)


FRONT_ENDS: Mapping[str, FrontEnd] = {
    "axolotl": FrontEnd(
        "axolotl",
        "src/axolotl",
        ("axolotl.utils.schemas", "axolotl.integrations"),
        ("axolotl.utils.schemas.config:AxolotlInputConfig",),
        patterns=(r"axolotl\.integrations\.[\w.]+\.args:(\w+Args|\w+Mixin|SwanLabConfig)",),
    ),
    "llama_factory": FrontEnd(
        "llamafactory",
        "src/llamafactory",
        ("llamafactory.hparams", "llamafactory.extras.constants"),
        tuple(
            f"llamafactory.hparams.{one}"
            for one in (
                "model_args:ModelArguments", "data_args:DataArguments", "training_args:TrainingArguments",
                "finetuning_args:FinetuningArguments", "generating_args:GeneratingArguments",
                "megatron_bridge_args:MegatronBridgeArguments", "parser:_KTransformersRuntimeArguments",
            )
        ),
        ("transformers.training_args", "transformers.training_args_seq2seq", "transformers.trainer_utils"),
    ),
    "llama_factory_v1": FrontEnd(
        "llamafactory",
        "src/llamafactory",
        ("llamafactory.v1.config",),
        tuple(
            f"llamafactory.v1.config.{one}"
            for one in ("model_args:ModelArguments", "data_args:DataArguments", "training_args:TrainingArguments",
                        "sample_args:SampleArguments")
        ),
    ),
    "ms_swift_megatron": FrontEnd(
        "swift",
        "swift",
        ("swift.arguments", "swift.trainers", "swift.rlhf_trainers", "swift.megatron.arguments", "swift.ray_utils"),
        tuple(
            f"swift.megatron.arguments.{one}"
            for one in (
                "sft_args:MegatronSftArguments", "pretrain_args:MegatronPretrainArguments",
                "rlhf_args:MegatronRLHFArguments",
            )
        ),
    ),
    "ms_swift": FrontEnd(
        "swift",
        "swift",
        ("swift.arguments", "swift.trainers", "swift.rlhf_trainers", "swift.megatron.arguments", "swift.ray_utils"),
        tuple(
            f"swift.arguments.{one}"
            for one in ("sft_args:SftArguments", "pretrain_args:PretrainArguments", "rlhf_args:RLHFArguments")
        ),
        ("transformers.training_args", "transformers.training_args_seq2seq", "transformers.trainer_utils"),
    ),
    "trl": FrontEnd(
        "trl",
        "trl",
        ("trl.trainer", "trl.scripts"),
        (
            *(f"trl.trainer.{one}_config:{one.upper() if one not in ('reward',) else 'Reward'}Config"
              for one in ("sft", "dpo", "grpo", "kto", "reward", "rloo")),
            "trl.trainer.model_config:ModelConfig",
            "trl.scripts.utils:ScriptArguments",
            "trl.scripts.utils:DatasetMixtureConfig",
            "trl.scripts.grpo:GRPOScriptArguments",
            "trl.scripts.rloo:RLOOScriptArguments",
        ),
        ("transformers.training_args", "transformers.trainer_utils"),
    ),
}  # fmt: skip

CONSTRUCTORS: Mapping[str, tuple[str, ...]] = {
    "transformers": ("training_args:TrainingArguments", "training_args_seq2seq:Seq2SeqTrainingArguments",
        "trainer:Trainer", "trainer_seq2seq:Seq2SeqTrainer"),
    "trl": ("trainer.sft_config:SFTConfig", "trainer.sft_trainer:SFTTrainer"),
    "peft": ("tuners.lora.config:LoraConfig",),
}  # fmt: skip
"""Classes that programs construct, by package: that of the checkout, and installed ones."""
INHERITED = {"trl": ("trl.trainer",), "peft": ("peft.config", "peft.tuners.lora.config"), "transformers": (
    *("transformers.training_args", "transformers.training_args_seq2seq", "transformers.trainer"),
    "transformers.trainer_seq2seq")}  # fmt: skip
"""Modules with these classes and their bases."""


def constructors(root: Path) -> Iterator[str]:
    """Yield the keywords that constructors of TRL's checkout, and of the installed transformers and peft, accept."""
    modules: dict[str, Module] = {}
    for package, under in INHERITED.items():
        spec = importlib.util.find_spec(package) if package != "trl" else None
        folder = root / "trl" if package == "trl" else Path(spec.origin).parent if spec and spec.origin else None
        if folder is None:
            raise ValueError(f"{package} is not installed")
        modules |= Sources({package: folder}, under).modules
    sources = Sources({})
    sources.modules = modules
    modules["transformers"] = _reexports("transformers", sources, INHERITED["transformers"])
    for package, places in CONSTRUCTORS.items():
        for place in places:
            module, name = place.split(":")
            found = sources.find(f"{package}.{module}", name)
            if found is None or not isinstance(found[1], ast.ClassDef):
                raise ValueError(f"{package}.{place} is not there")
            own = any(isinstance(one, ast.FunctionDef) and one.name == "__init__" for one in found[1].body)
            accepted = sources.accepted(*found) if own else list(sources.fields(*found).values())
            yield f"{package}.{name}\t{' '.join(one.name for one in accepted or ())}"


INSTRUCTED = ("-Chat", "-Distill", "-Instruct", "-Thinking")  # of names for which LLaMA-Factory has a template
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


def factory_templates(root: Path) -> Iterator[str]:
    """Yield LLaMA-Factory's chat templates: name, markers around a user's message, and the chat models that have it."""
    source = root / "src" / "llamafactory"
    models: dict[str, set[str]] = {}
    for given in _calls_of(source / "extras" / "constants.py", "register_model_group"):
        template, group = given.get("template"), given["models"]
        if not isinstance(template, ast.Constant) or not isinstance(group, ast.Dict):
            continue
        for key, hubs in zip(group.keys, group.values, strict=True):
            name = str(getattr(key, "value", ""))
            if "multimodal" in given or any(word in name for word in INSTRUCTED):
                paths = [str(getattr(one, "value", "")) for one in getattr(hubs, "values", ())]
                models.setdefault(template.value, set()).update(path.rpartition("/")[2].lower() for path in paths)
    for given in _calls_of(source / "data" / "template.py", "register_template"):
        texts = [one.value for one in ast.walk(given.get("format_user", ast.List([]))) if isinstance(one, ast.Constant)]
        markers = dict.fromkeys(MARKER.findall(" ".join(text for text in texts if isinstance(text, str))))
        name = str(getattr(given["name"], "value", ""))
        yield "\t".join((name, " ".join(markers), " ".join(sorted(models.get(name, ())))))


def _calls_of(path: Path, function: str) -> Iterator[dict[str, ast.expr]]:
    """Yield the keywords of the calls of a function in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function:
            yield {word.arg: word.value for word in node.keywords if word.arg is not None}


PACKAGE = Path(frameworks.__file__).parent
WRITERS: Mapping[str, tuple[Path, Callable[[Path], Iterator[str]]]] = {
    "automodel": (PACKAGE / "automodel" / "targets.tsv", lambda root: Automodel(root).lines()),
    **{name: (PACKAGE / "front_ends" / f"{name}.tsv", one.lines) for name, one in FRONT_ENDS.items()},
    "constructors": (PACKAGE / "constructors.tsv", constructors),
    "llama_factory_templates": (PACKAGE / "front_ends" / "llama_factory_templates.tsv", factory_templates),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=WRITERS)
    parser.add_argument("root", type=Path, help="checkout of the repository")
    parser.add_argument("--commit", default="", help="commit of the checkout, if it has no .git")
    options = parser.parse_args()
    path, lines = WRITERS[options.table]
    commit = options.commit or _commit(options.root)
    path.parent.mkdir(exist_ok=True)
    head = f"# {options.table} {commit}, written by benchmarks/corpora/source_tables.py"
    path.write_text("\n".join((head, *lines(options.root), "")))
    print(f"wrote {path}: {path.stat().st_size:,} bytes")


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
