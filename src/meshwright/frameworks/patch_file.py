"""Export a file for its own framework: the user's file, with only those settings changed that a request changes.

The settings of two exports are compared: of the recipe as imported, and of the requested one. A key with the same value
in both keeps the file's value, or stays absent; the others get the requested value. The result is read back: where the
file's values make another recipe, those of the export are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET

from meshwright import config_io, json_text
from meshwright.clusters import Cluster, cluster
from meshwright.errors import InputError
from meshwright.frameworks.common import FOLDERS, state_left_out
from meshwright.frameworks.dropped import STATE, STRUCTURED, DroppedSetting, lost_arguments, lost_folders
from meshwright.frameworks.export_recipe import ARGUMENTS_FILE, differences, is_same, read_back, write
from meshwright.frameworks.file_import import ImportedFile
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.load import content_of, open_file
from meshwright.frameworks.mapping import nest, text_of
from meshwright.frameworks.model_match import same_shape
from meshwright.frameworks.patch_program import RECOMPUTE, SHARDING, keep_program, without_argument
from meshwright.frameworks.schedule_units import in_stated_units
from meshwright.frameworks.torchtitan.own_flavor import CUSTOM_IMPORT, MODULE
from meshwright.frameworks.torchtitan.own_modules import with_own_modules
from meshwright.frameworks.trainer_args import ARGUMENT_FIELDS
from meshwright.frameworks.types import ExportedConfig, Settings, SourcedValue
from meshwright.models import ModelSpec
from meshwright.recipes.key_maps import composite_keys, config_keys
from meshwright.recipes.key_maps.accelerate import ZERO
from meshwright.recipes.types import Recipe, field_value, recipe_fields

OF_THE_LAUNCHER = re.compile(
    r"MASTER_(ADDR|PORT)|(NODE_|LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|N?NODES|NNODES|NUM_NODES|N?GPUS?(_PER_NODE)?"
    r"|NPROC(_PER_NODE)?|HEAD_NODE|CUDA_VISIBLE_DEVICES|(PYTHON|LD_LIBRARY_)?PATH|HOME|PWD|SHELL|USER|SLURM_\w+"
    r"|CONFIG(_FILE)?|MODULE|LOG_RANK|MEGATRON_LM_DIR|PRETRAINED_CHECKPOINT"
)
"""Variables that the job of an export sets itself, or that name parts of it."""
ROUNDS = 3
TRAINS = re.compile(r"\.train\(")


class Patched(NamedTuple):
    """An export with the file's own settings, and those of them that are lost."""

    written: ExportedConfig
    lost: tuple[DroppedSetting, ...]


def patch(
    imported: ImportedFile, target: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster, *, job: bool
) -> Patched | None:
    """Return an export for the file's own framework with the file's settings; None if it has to be written anew.

    A `job` saves and resumes where the export says so, if the file does not say it.
    """
    found = _patched(_as_command(imported) if job else imported, target, recipe, model, on, job=job)
    env = imported.settings.parsed.env
    if found is not None and imported.framework.name == "torchtitan":
        name, text = next(iter(found.written.files.items()))
        read, after = imported.settings.parsed.settings, content_of(text, name).settings
        found = found._replace(written=with_own_modules(imported.content, read, after, found.written))
    if found is None or not env:
        return found
    written = found.written
    own = {name: env[name].location for name, value in variables(env).items() if written.program.env.get(name) == value}
    program = msgspec.structs.replace(written.program, env_places=own)
    return found._replace(written=msgspec.structs.replace(written, program=program))


def _as_command(imported: ImportedFile) -> ImportedFile:
    """Return a program that trains as the command that starts it: a job runs the user's program, not another one."""
    content, parsed = imported.content, imported.settings.parsed
    if content.format != "python" or imported.framework.name not in ARGUMENTS_FILE or not TRAINS.search(content.text):
        return imported
    argv = (SourcedValue(Path(content.path).name, 1, content.path),)
    program = msgspec.structs.replace(parsed.program, argv=argv, fixed_in=parsed.program.fixed_in or content.path)
    settings = msgspec.structs.replace(imported.settings, parsed=msgspec.structs.replace(parsed, program=program))
    return msgspec.structs.replace(imported, settings=settings)


def _patched(
    imported: ImportedFile, target: ExportedConfig, recipe: Recipe, model: ModelSpec, on: Cluster, *, job: bool
) -> Patched | None:
    framework, file = imported.framework, _source(imported)
    own = _own_cluster(imported, on)
    inner = referenced_file(imported)
    if inner is not None and isinstance(file, _ConfigFile):
        return _with_referenced(imported, inner, file, target, recipe, model, on, job=job)
    if file is None:
        return _only_program(imported, target, own, recipe, on)
    try:
        original, original_model = _original(imported, own)
        base, corrected = _base(framework, original, original_model, own, target, recipe)
        before, after = file.settings_of(base), file.settings_of(target)
        known = {one.field for one in differences(framework, target, recipe, model, on)}
        known |= _of_the_arguments(framework, file.settings) | imported.settings.parsed.program.sources.keys()
        autos = _filled_in(imported, file.settings)
        known |= {field for field in recipe_fields() if _keys_of(framework, field) & autos}
        refused = _refused(imported)
        requested = {key for key in (*before, *after) if before.get(key, UNSET) != after.get(key, UNSET)}
        requested |= corrected | {key for key, one in file.settings.items() if one.unresolved or key in refused}
        requested |= _of_the_model(imported, file.settings, after, model)
        if job:
            requested |= _of_the_job(framework, file.settings, after)
        program = imported.settings.parsed.program
        if RECOMPUTE in program.given:  # an argument of the program, which the config must not repeat
            requested -= {"fsdp_config.fsdp_activation_checkpointing"}
        fixed = autos | _of_absent_sections(framework, file.settings, {*before, *after})
        requested -= fixed
        changed = set(requested)
        for _ in range(ROUNDS):
            changes = _changes(framework, file.settings, before, after, changed)
            changes = in_stated_units(framework.key_map, changes, file.settings, recipe)
            written = file.patched(target, {**file.given, **changes}, recipe, on)
            differing = {one.field for one in differences(framework, written, recipe, model, on)} - known
            if not differing:
                found = _result(imported, file, base, target, written, recipe, model, on, requested, changed)
                if not program.argv:
                    return found
                kept = tuple(one for one in found.lost if one.key.removeprefix("--") not in program.given)
                return Patched(keep_program(program, found.written, original, own, recipe, on), kept)
            more = {key for field in differing for key in _keys_of(framework, field)} - changed - fixed
            if not more:
                return None
            changed |= more
    except InputError:
        return None
    return None


def _base(
    framework: Framework, original: Recipe, model: ModelSpec, own: Cluster, target: ExportedConfig, recipe: Recipe
) -> tuple[ExportedConfig, set[str]]:
    """Return the export of the file as it is; the requested one with the keys that differ if that cannot be written."""
    try:
        return write(framework, original, model, own), set()
    except InputError:
        fields = (
            field
            for field in recipe_fields()
            if not is_same(field, field_value(original, field), field_value(recipe, field))
        )
        changed = {key for field in fields for key in _keys_of(framework, field)}
        return msgspec.structs.replace(target, notes=()), changed


def _original(imported: ImportedFile, own: Cluster) -> tuple[Recipe, ModelSpec]:
    """Return the recipe and the model of the file as it is, for the engine that the file is for."""
    recipe, model = imported.without_overrides(own)
    return msgspec.structs.replace(recipe, engine=imported.settings.engine), model


def referenced_file(imported: ImportedFile) -> ImportedFile | None:
    """Return the DeepSpeed config that a config of Accelerate names, as a file of its own; None if there is none."""
    parsed = imported.settings.parsed
    if parsed.referenced is None:
        return None
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK

    try:
        content = open_file(parsed.referenced.files[0])
    except InputError:
        return None
    program = msgspec.structs.replace(parsed.referenced.program, argv=parsed.program.argv)
    inner = msgspec.structs.replace(parsed.referenced, program=program, model=parsed.model, env=parsed.env)
    settings = msgspec.structs.replace(imported.settings, framework=FRAMEWORK, parsed=inner)
    return msgspec.structs.replace(imported, framework=FRAMEWORK, content=content, settings=settings)


def _with_referenced(
    imported: ImportedFile,
    inner: ImportedFile,
    file: _ConfigFile,
    target: ExportedConfig,
    recipe: Recipe,
    model: ModelSpec,
    on: Cluster,
    *,
    job: bool,
) -> Patched | None:
    """Return a config of Accelerate with the DeepSpeed config that it names, in which the request is written."""
    try:
        anew = write(inner.framework, recipe, model, on)
    except InputError:
        return None
    found = patch(inner, anew, recipe, model, on, job=job)
    patched = found.written if found is not None else anew
    config, text = next(iter(patched.files.items()))
    after = file.settings_of(target)
    launcher = {key: after[key] for key in ("num_machines", "num_processes", "main_process_ip") if key in after}
    kept = ("main_process_ip",) if "main_process_ip" in file.settings else ()
    changes: dict[str, Any] = dict(file.given)
    changes.update({key: value for key, value in launcher.items() if key not in kept})
    written = file.patched(target, {**changes, f"{ZERO}deepspeed_config_file": config}, recipe, on)
    files = {**written.files, config: text}
    program = imported.settings.parsed.program
    notes = [note for note in target.notes if "--config_file" not in note or not program.argv]
    written = msgspec.structs.replace(
        written,
        files=files,
        program=msgspec.structs.replace(
            written.program, env={**written.program.env, **variables(imported.settings.parsed.env)}
        ),
        unmapped=patched.unmapped,
        notes=(*notes, f"{config} is the DeepSpeed config of {file.content.path}, which names it"),
    )
    lost = () if found is None else found.lost
    if program.argv:
        original, _ = _original(imported, _own_cluster(imported, on))
        written = keep_program(program, written, original, _own_cluster(imported, on), recipe, on)
    return Patched(written, lost)


def _only_program(
    imported: ImportedFile, target: ExportedConfig, own: Cluster, recipe: Recipe, on: Cluster
) -> Patched | None:
    """Return an export that runs the user's program of a command without a config; None if it is another program's.

    Arguments of the Trainer say what a config would, so the environment of one is set only if the request changes it.
    """
    program, env = imported.settings.parsed.program, variables(imported.settings.parsed.env)
    if imported.framework.name != "accelerate" or not program.argv:
        return None
    from meshwright.frameworks.accelerate.write import config_text

    try:
        original, model = _original(imported, own)
        base = write(imported.framework, original, model, own)
    except InputError:
        return None
    kept = keep_program(program, target, original, own, recipe, on)
    words, files = kept.program.argv, kept.files
    unused: tuple[str, ...] = ()
    if base.program.env == target.program.env:
        first = next(iter(target.files))
        settings = {key: one.value for key, one in imported.settings.parsed.settings.items()}
        if on.world == 1 and settings.get("distributed_type") == "MULTI_GPU":  # a command without a count of processes
            settings["distributed_type"] = "NO"
        unused = (f"{first} is for accelerate launch only: the command has the same settings and does not read it",)
        others = {name: text for name, text in files.items() if name != first}  # such as the data of TRL's script
        files = {first: config_text(nest(settings), recipe, imported.framework), **others}
    else:
        words = tuple(without_argument(words, SHARDING))
        env = {**target.program.env, **env}
        if RECOMPUTE in program.given:  # the Trainer refuses to recompute twice
            env.pop("FSDP_ACTIVATION_CHECKPOINTING", None)
    notes = tuple(one for one in kept.notes if one not in base.notes)
    changed = msgspec.structs.replace(kept.program, argv=words, env=env)
    return Patched(msgspec.structs.replace(kept, files=files, program=changed, notes=(*notes, *unused)), ())


def _filled_in(imported: ImportedFile, settings: Settings) -> set[str]:
    """Return the keys of a DeepSpeed file that the Trainer fills in from its arguments, which the program keeps."""
    program = imported.settings.parsed.program
    filled = bool(program.argv) and imported.framework.name == "deepspeed" and bool(program.fills)
    return {key for key, one in settings.items() if filled and one.value == "auto"}


def _of_absent_sections(framework: Framework, settings: Settings, keys: set[str]) -> set[str]:
    """Return the keys of an optimizer or scheduler that a DeepSpeed file leaves to the program's arguments.

    One of them alone would make a section without a type, which turns off that of the Trainer.
    """
    if framework.name != "deepspeed":
        return set()
    from meshwright.frameworks.deepspeed.keys import TYPED_SECTIONS

    absent = tuple(f"{name}." for name in TYPED_SECTIONS if f"{name}.type" not in settings)
    return {key for key in keys if key.startswith(absent)}


def _of_the_model(imported: ImportedFile, settings: Settings, after: Mapping[str, Any], model: ModelSpec) -> set[str]:
    """Return torchtitan's keys of the model if the file's flavor is not this model.

    A flavor that the user's own module registers stays: its sizes may not be readable here.
    """
    if imported.framework.name != "torchtitan":
        return set()
    own, module = imported.settings.file_model, settings.get(CUSTOM_IMPORT)
    if module is not None and module.value == MODULE:  # the export writes this module with the flavor that it names
        return {key for key in ("model.name", "model.flavor") if key in after}
    if module is not None if own is None else same_shape(own, model):
        return set()
    return {key for key in ("model.name", "model.flavor", CUSTOM_IMPORT) if key in after}


def _of_the_arguments(framework: Framework, settings: Settings) -> set[str]:
    """Return the fields that only the arguments file of an export has: this file leaves them to the program."""
    fields = ARGUMENT_FIELDS if framework.name in ARGUMENTS_FILE else ()
    return {field for field in fields if not _keys_of(framework, field) & settings.keys()}


class _File(Protocol):
    """A file of the user: its settings, those of an export, and an export with the file's settings."""

    settings: Settings
    given: Mapping[str, Any]  # settings of a command that starts the file

    def settings_of(self, written: ExportedConfig) -> dict[str, Any]: ...

    def patched(
        self, target: ExportedConfig, changes: Mapping[str, Any], recipe: Recipe, on: Cluster
    ) -> ExportedConfig: ...


class _ConfigFile:
    """A TOML, YAML or JSON file, whose text is edited."""

    def __init__(self, content: Content, command: Settings) -> None:
        self.content = content
        self.given: Mapping[str, Any] = {key: _literal(one.value) for key, one in command.items()}
        self.settings: Settings = {**content.settings, **command}

    def settings_of(self, written: ExportedConfig) -> dict[str, Any]:
        name, text = next(iter(written.files.items()))
        return {key: one.value for key, one in content_of(text, name).settings.items()}

    def patched(
        self, target: ExportedConfig, changes: Mapping[str, Any], recipe: Recipe, on: Cluster
    ) -> ExportedConfig:
        different = {key: value for key, value in changes.items() if self._value(key) != value}
        text = config_io.edit(self.content.text, self.content.format, different)
        first, *others = target.files
        theirs = {key: one.value for key, one in content_of(text, first).settings.items()}
        paths = {
            path: str(theirs[key]) for key, path in self.settings_of(target).items() if _is_path(path, theirs, key)
        }
        files = {first: text, **{name: _replaced(target.files[name], paths) for name in others}}
        if target.framework == "accelerate":  # the environment says what the file says
            from meshwright.frameworks.accelerate.write import environment_of_file

            program = msgspec.structs.replace(target.program, env=environment_of_file(theirs))
            return msgspec.structs.replace(target, files=files, program=program)
        if target.framework == "torchtitan" and theirs.get(CUSTOM_IMPORT) != MODULE:  # a flavor of its own
            files.pop(f"{MODULE}.py", None)
            program = msgspec.structs.replace(target.program, modules=())
            return msgspec.structs.replace(target, files=files, program=program)
        return msgspec.structs.replace(target, files=files)

    def _value(self, key: str) -> Any:
        return self.content.settings[key].value if key in self.content.settings else UNSET


class _FlagScript:
    """A script of Megatron-LM, which is written anew with the file's flags and environment."""

    def __init__(self, imported: ImportedFile) -> None:
        parsed = imported.settings.parsed
        self.framework = imported.framework
        self.settings: Settings = {key: one for key, one in parsed.settings.items() if key != "*"}
        self.given: Mapping[str, Any] = {}
        self.env = variables(parsed.env)

    def settings_of(self, written: ExportedConfig) -> dict[str, Any]:
        from meshwright.frameworks.megatron_lm.arguments import parse_args

        words = [SourcedValue(word, 0, "") for word in written.program.argv[1:]]
        return {key: one.value for key, one in parse_args(words).settings.items()}

    def patched(
        self, target: ExportedConfig, changes: Mapping[str, Any], recipe: Recipe, on: Cluster
    ) -> ExportedConfig:
        from meshwright.frameworks.megatron_lm import batch_rampup
        from meshwright.frameworks.megatron_lm.arguments import format_flag
        from meshwright.frameworks.megatron_lm.write import needed_environment, with_flags

        flags = {**{key: one.value for key, one in self.settings.items()}, **changes}
        ramp = batch_rampup.for_batch(self.settings, recipe, on)
        if ramp is not None:
            old, new = (format_flag(batch_rampup.KEY, one or None) for one in (flags[batch_rampup.KEY], [*ramp]))
            flags[batch_rampup.KEY] = [*map(str, ramp)] or UNSET
            note = f"{old} is now {new}: it grows to the batch of {recipe.train.global_batch_size} on these ranks"
            target = msgspec.structs.replace(target, notes=(*target.notes, note))
        kept = {key: value for key, value in flags.items() if value is not UNSET}
        env = {**target.program.env, **self.env}
        for name, value, why in needed_environment(self.env, kept, recipe, on):
            env = {**env, name: value} if value else {other: env[other] for other in env if other != name}
            note = f"{name}={self.env[name]} of the file is now {value or 'unset'}: {why}"
            target = msgspec.structs.replace(target, notes=(*target.notes, note))
        return with_flags(self.framework, target, kept, env, recipe, on)


def _is_path(path: Any, theirs: Mapping[str, Any], key: str) -> bool:
    """Return whether a value of an export is a path, and the file names another one for the same key."""
    other = theirs.get(key)
    return isinstance(path, str) and isinstance(other, str) and "/" in path and "/" in other and other != path


def _replaced(text: str, paths: Mapping[str, str]) -> str:
    """Return another file of the export, which names the same paths."""
    for path, other in paths.items():
        text = other.join(re.split(rf"(?<![\w./-]){re.escape(path)}(?![\w./-])", text))
    return text


def _source(imported: ImportedFile) -> _File | None:
    """Return the file that has the settings: this one, or the config that a script names."""
    content, parsed = imported.content, imported.settings.parsed
    if imported.framework.key_map == "megatron_lm":
        return _FlagScript(imported) if "yaml_cfg" not in parsed.settings else None
    if content.settings:
        return _ConfigFile(content, {})
    names = {one.file for one in parsed.settings.values() if one.file.endswith(STRUCTURED)}
    if content.format not in ("shell", "python") or len(names) != 1:
        return None
    name = names.pop()
    known = config_keys(imported.framework.key_map)
    command = {key: one for key, one in parsed.settings.items() if one.file == content.path and key in known}
    if imported.framework.key_map in ("deepspeed", "accelerate"):  # its arguments are those of the program
        command = {}
    try:
        return _ConfigFile(open_file(Path(name)), command)
    except InputError:
        return None


def own_variables(imported: ImportedFile) -> dict[str, str]:
    """Return the variables of a file that an export of its recipe does not set."""
    recipe, on = imported.recipe, imported.cluster
    try:
        written = write(imported.framework, recipe, imported.model, on).program.env
    except InputError:
        written = {}
    return {name: value for name, value in variables(imported.settings.parsed.env).items() if name not in written}


def variables(env: Settings) -> dict[str, str]:
    """Return the variables that a script exports for its training, without those of the launcher."""
    found = {name: one for name, one in env.items() if not one.unresolved and not OF_THE_LAUNCHER.fullmatch(name)}
    return {name: text_of(one.value) for name, one in found.items() if text_of(one.value)}


def is_of_the_job(variable: str) -> bool:
    """Return whether the job of an export sets a variable itself."""
    return OF_THE_LAUNCHER.fullmatch(variable) is not None


def _own_cluster(imported: ImportedFile, on: Cluster) -> Cluster:
    """Return the GPUs that the file itself requests if its settings name them; otherwise the given ones."""
    request = imported.settings.parsed.gpu_request
    if imported.framework.key_map != "accelerate" or request.count in (None, on.world):
        return on
    try:
        return cluster(request.text(on.gpu.name))
    except InputError:
        return on


def _keys_of(framework: Framework, field: str) -> set[str]:
    """Return the keys that set a field, and those that are read together with them."""
    found = {row.key for row in config_keys(framework.key_map).values() if row.field == field}
    for one in composite_keys(framework.key_map):
        if field in one.fields:
            found |= set(one.keys)
    return found


def _alternatives(framework: Framework, key: str) -> set[str]:
    """Return the keys that set the same fields as this one."""
    row = config_keys(framework.key_map).get(key)
    fields = {row.field} if row is not None and row.field else set()
    for one in composite_keys(framework.key_map):
        if key in one.keys:
            fields |= set(one.fields)
    return {other for field in fields for other in _keys_of(framework, field)}


def _changes(
    framework: Framework, settings: Settings, before: Mapping[str, Any], after: Mapping[str, Any], changed: set[str]
) -> dict[str, Any]:
    """Return the values to write, UNSET for a key to remove: other spellings of what changes go with it.

    The order is that of the export, then that of the file: the written file is the same in every process.
    """
    found = {key: after.get(key, UNSET) for key in dict.fromkeys((*after, *settings)) if key in changed}
    for key in sorted(changed):
        for other in sorted(_alternatives(framework, key) & settings.keys() - before.keys() - after.keys()):
            found[other] = UNSET
    gone = {key.split(".")[0] for key in before if "." in key} - {key.split(".")[0] for key in after}
    return found | {key: UNSET for key in settings if key.split(".")[0] in gone and key not in after}


def _of_the_job(framework: Framework, settings: Settings, after: Mapping[str, Any]) -> set[str]:
    """Return the keys of checkpoints that a job needs: absent ones, and all folders if it would not resume."""
    table = config_keys(framework.key_map)
    about = {row.key for row in table.values() if row.field.startswith("checkpoint.")}
    for one in composite_keys(framework.key_map):
        if any(field.startswith("checkpoint.") for field in one.fields):
            about |= set(one.keys)
    about |= {key for key in after if key.rsplit(".", 1)[0] == "checkpoint"}
    found = {key for key in about & after.keys() if key not in settings}
    load = FOLDERS.get(framework.key_map, ("", "", ""))[1]
    if load in after and load in settings and text_of(settings[load].value) != text_of(after[load]):
        found |= _alternatives(framework, load)
        found |= state_left_out(framework.key_map, settings).keys()
    return found


def _result(
    imported: ImportedFile,
    file: _File,
    base: ExportedConfig,
    target: ExportedConfig,
    written: ExportedConfig,
    recipe: Recipe,
    model: ModelSpec,
    on: Cluster,
    requested: set[str],
    changed: set[str],
) -> Patched:
    """Return the export with what it lists: only what the file's own settings do not have."""
    framework = imported.framework
    back = read_back(framework, written, model, on)
    unmapped = tuple(
        one
        for one in written.unmapped
        if one.field not in recipe_fields()
        or not is_same(one.field, field_value(back, one.field), field_value(recipe, one.field))
    )
    result = file.settings_of(written)
    anew = sorted(framework.display_key(key) for key in changed - requested if key in result or key in file.settings)
    every = dict.fromkeys((*target.notes, *written.notes))
    notes = [note for note in every if note not in base.notes or "random tokens" in note]
    of_flags = [note for note in notes if note.startswith("--")]
    flags = {note: note.split()[0].strip("-:").replace("-", "_") for note in of_flags}
    notes = [note for note in notes if flags.get(note, "") in ("", *result)]  # not of a flag that the file lacks
    flavor = file.settings.get("model.flavor")
    if CUSTOM_IMPORT in requested and result.get(CUSTOM_IMPORT) == MODULE:
        was = "" if flavor is None else f", in place of {flavor.value}, which is not this model"
        notes.append(f"{MODULE}.py registers the flavor {result.get('model.flavor')}{was}")
    if anew:
        notes.append(f"{', '.join(anew)}: written as the recipe needs them, because the file's values contradict it")
    program = written.program
    env = program.env  # of a script: the file's, as far as the layout can run with it
    if not isinstance(file, _FlagScript):
        env = {**env, **variables(imported.settings.parsed.env)}
    written = msgspec.structs.replace(
        written, unmapped=unmapped, notes=tuple(notes), program=msgspec.structs.replace(program, env=env)
    )
    return Patched(written, tuple(_lost(imported, file.settings, result)))


def _refused(imported: ImportedFile) -> dict[str, str]:
    """Return the keys whose values the framework does not accept, and why: the export's own values replace them."""
    own = f"{imported.framework.name}."
    found = [one for one in imported.checked.findings if one.severity == "error" and one.rule.startswith(own)]
    return {one.field: one.message for one in (*found, *imported.rejected)}


def _lost(imported: ImportedFile, settings: Settings, result: Mapping[str, Any]) -> Sequence[DroppedSetting]:
    """Return the settings that the result does not have, nor another one of the same field."""
    refused = _refused(imported)
    folders = lost_folders(imported.framework, imported.content, settings, same=True)
    found = [one for one in folders if text_of(result.get(one.key)) != text_of(one.value)]
    found += lost_arguments(imported.settings.parsed)
    left_out = state_left_out(imported.framework.key_map, settings).items()
    found += [DroppedSetting(key, one.value, STATE, one.file, one.line) for key, one in left_out if key not in result]
    for key, one in settings.items():
        kept = key in result or bool(_alternatives(imported.framework, key) & result.keys())
        replaced = key in refused and text_of(result.get(key)) != text_of(one.value) and not imported.is_typed(key)
        if replaced or (one.unresolved and not kept):
            reason = one.unresolved or refused[key]
            found.append(DroppedSetting(key, one.value, reason, one.file, one.line))
    return found


def _literal(value: Any) -> Any:
    """Return the value of a command's argument as a config has it: 8 and true are no texts there."""
    if not isinstance(value, str):
        return value
    try:
        return json_text.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return value
