"""What a job of another framework needs besides its config: its checkout, and a checkpoint before a requeue."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec

from meshwright import file_access
from meshwright.display import plural
from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.export_recipe import ARGUMENTS_FILE
from meshwright.frameworks.framework import Content
from meshwright.frameworks.job_folders import changed_folder
from meshwright.frameworks.shell.containers import container_of
from meshwright.frameworks.trainer_fields import DATASETS
from meshwright.frameworks.types import Program, ProgramArguments, Settings, SourcedValue
from meshwright.planner.saving import fitting_interval
from meshwright.recipes import overrides as override
from meshwright.recipes.key_maps.hugging_face import ARGUMENTS, KEYS
from meshwright.recipes.types import Recipe, field_value

SAVE_MINUTES = 30
SAVING_S = 120  # seconds that writing a checkpoint may take after the current step


OUTPUT_FOLDERS = ("job.dump_folder", "dump_folder")
"""torchtitan's keys of the folder that contains the one of the checkpoints."""


class Checkout(NamedTuple):
    """Where a framework's code is in its checkout, and how its runs save when they are signaled."""

    title: str
    python_path: tuple[str, ...]  # folders of the checkout that have to be importable
    on_signal: tuple[
        str, ...
    ] = ()  # arguments that make a run save on SIGTERM; a script of the export sets them itself
    saves: bool = True  # whether it can save on SIGTERM at all
    how: str = ""  # a sentence about it
    retains: bool = False  # whether it can keep the latest checkpoint and those of every so many steps
    checkpoints: str = "give the folder to your program as its argument"  # where a written job names their folder


CHECKOUTS = {
    "megatron-lm": Checkout(
        "Megatron-LM",
        ("",),
        ("--exit-signal-handler",),
        how="--exit-signal-handler saves a checkpoint on SIGTERM",
        retains=True,
        checkpoints="--save {out} and --load {out} in the written script",
    ),
    "megatron-bridge": Checkout(
        "Megatron-Bridge",
        ("src", "3rdparty/Megatron-LM"),
        ("train.exit_signal_handler=true", "train.exit_signal_handler_for_dataloader=true"),
        how="train.exit_signal_handler saves a checkpoint on SIGTERM",
        checkpoints="checkpoint.save and checkpoint.load = {out} in the written job",
    ),
    "automodel": Checkout(
        "NeMo AutoModel",
        ("",),
        how="it saves a checkpoint on SIGTERM by default (step_scheduler.preemption_signal)",
        checkpoints="checkpoint_dir: {out} under checkpoint: in the written YAML file",
    ),
    "kempnerforge": Checkout(
        "KempnerForge",
        ("",),
        how="it saves a checkpoint on SIGTERM by itself",
        checkpoints='dir = "{out}" under [checkpoint] in the written TOML file',
    ),
    "torchtitan": Checkout(
        "torchtitan",
        ("",),
        saves=False,
        how="torchtitan does not save on SIGTERM",
        checkpoints='folder = "{out}" under [checkpoint] in the written config.toml',
    ),
    "deepspeed": Checkout("your program", ("",), saves=False, how="your program has to save on SIGTERM itself"),
    "accelerate": Checkout("your program", ("",), saves=False, how="your program has to save on SIGTERM itself"),
}


def in_checkout(
    program: Program, framework: str, folder: str, files: Collection[str], *, local: bool
) -> tuple[Program, tuple[str, ...]]:
    """Return the program run from a checkout: its script by its full path, the code importable; and notes.

    A script of the export (one of `files`) is not in the checkout: it stays in the folder of the job.

    The working folder stays that of the job, so that configs and checkpoints are found by their relative paths.
    """
    entry = CHECKOUTS[framework]
    if not local and not folder.startswith("/"):
        fix = (f"--framework-dir /opt/{Path(folder).name or 'framework'}",)
        raise InputError(
            "must be an absolute path inside the container", field="--framework-dir", value=folder, fix=fix
        )
    root = Path(folder).expanduser().resolve() if local else Path(folder)
    own = program.argv[0] in files
    script = "" if own or program.argv[0].startswith("-") else program.argv[0]
    needed = script or (entry.python_path[0] if own else program.argv[1].split(".")[0])
    notes: tuple[str, ...] = ()
    if local and root.is_dir():
        if not (root / needed).exists() and not any((root / one / needed).exists() for one in entry.python_path):
            raise InputError(
                f"has no {needed}: it is not a checkout of {entry.title}", field="--framework-dir", value=folder,
                fix=(f"the folder that contains {needed}",),
            )  # fmt: skip
    elif local:
        notes = (f"{root} is not on this machine: it must be a checkout of {entry.title} on the nodes",)
    argv = (str(root / script), *program.argv[1:]) if script else program.argv
    paths = ":".join(str(root / one) if one else str(root) for one in entry.python_path)
    env = {**program.env, "PYTHONPATH": paths}
    return msgspec.structs.replace(program, argv=argv, env=env, checkout=str(root)), notes


def refused_out(framework: str, out: str, folder: str | None) -> InputError:
    """Return the error for --out with another framework: where its job names the folder of its checkpoints."""
    where = CHECKOUTS[framework].checkpoints
    known = "{out}" in where
    reason = f"is an option of our engine, and the job runs with {framework}, which names its own folder"
    below = (f"--write {out}",) if known and not folder else ()
    sets = f"set checkpoint.folder={out} ({where.format(out=out)})" if known else where
    return InputError(reason, field="--out", value=out, fix=(*below, f"remove --out, and {sets}"))


PATHS = ("data.dataset", "data.validation", "data.tokenizer", "data.chat_template", "checkpoint.pretrained")
BLENDS = ("data.blend", "data.anneal_blend")
OUTPUT_FOLDER = "output_dir"
PATH_ARGUMENTS = (*DATASETS, *(row.key for row in (*KEYS, *ARGUMENTS) if row.field in PATHS))
"""Arguments of a training program whose value may be a path without a slash."""


def full_path(
    text: str, *, new: bool = False, bare: bool = True, folder: Path | None = None, start: Path | None = None
) -> str:
    """Return the full path of data or weights that are here, or that are going to be (`new`); other texts as they are.

    Data may be a prefix of .bin and .idx files. Without `bare`, a name without a slash or suffix is not a path: it may
    be a split or the name of a model. A path is relative to the folder in which a program is started, by default the
    current one; one that is not there may be relative to another `folder`.
    """
    path, start = Path(text).expanduser(), start or Path()
    if not text or not (new or bare or "/" in text or path.suffix):
        return text
    for base in (start, *((folder,) if folder is not None else ())):
        if any(Path(f"{base / path}{end}").exists() for end in ("", ".bin")):
            return str((base / path).resolve())
    return str((start / path).resolve()) if new else text


def with_full_arguments(
    program: Program, folder: Path | None, own: Collection[str], start: Path | None = None
) -> Program:
    """Return the user's program with the full paths of its arguments that are files here.

    The job runs in another folder, which has its `own` files. `folder` is that of the script, whose paths may be
    relative to it, and `start` the one in which it starts the program. The folder of the checkpoints may not exist yet.
    """
    argv = list(program.argv)
    for number, word in enumerate(argv[1:], 1):
        name, equals, value = word.partition("=")
        if word in program.expanded or "${" in word or (word.startswith("-") and not equals):
            continue
        if word in own or value in own:
            continue
        before, text = (name, value) if word.startswith("-") else (argv[number - 1], word)
        argument = before.lstrip("-").replace("-", "_")
        full = full_path(
            text, new=argument == OUTPUT_FOLDER, bare=argument in PATH_ARGUMENTS, folder=folder, start=start
        )
        argv[number] = f"{name}={full}" if word.startswith("-") else full
    return msgspec.structs.replace(program, argv=tuple(argv))


def started_elsewhere(
    program: Program, folder: Path | None, own: Collection[str], start: Path | None = None
) -> tuple[Program, tuple[str, ...]]:
    """Return the user's program with the full paths of its script and arguments, and a note on a script not here.

    Of a `start` that is not on this machine nothing is known: relative paths stay.
    """
    if start is not None and not start.is_dir():
        return program, ()
    found = with_full_arguments(program, folder, own, start)
    script = full_path(found.argv[0], bare=False, folder=folder, start=start)
    relative = script.endswith(".py") and not script.startswith("/") and "$" not in script
    notes = (f"{script} is not on this machine: write its full path in the command",) if relative else ()
    return msgspec.structs.replace(found, argv=(script, *found.argv[1:])), notes


def full_paths(changes: Sequence[str]) -> list[str]:
    """Return overrides with the full paths of data and weights that are here: the job runs in another folder."""
    pairs = (text.partition("=") for text in changes)
    return [f"{key}={full_path(value)}" if key in PATHS else f"{key}{equals}{value}" for key, equals, value in pairs]


def with_full_values(values: Mapping[str, Any], start: Path | None = None) -> dict[str, Any]:
    """Return values by field with the full paths of data and weights that are here, relative to `start`."""

    def full(name: str) -> str:
        return full_path(name, start=start)

    found: dict[str, Any] = {key: full(str(value)) if key in PATHS else value for key, value in values.items()}
    return found | {key: {full(name): weight for name, weight in found[key].items()} for key in BLENDS if key in found}


def with_full_paths(recipe: Recipe, start: Path | None = None) -> Recipe:
    """Return a recipe with the full paths of data and weights that are here, relative to `start`."""
    if file_access.closed():
        return recipe
    values = with_full_values({key: field_value(recipe, key) for key in (*PATHS, *BLENDS)}, start)
    return override.change(recipe, {key: value for key, value in values.items() if value != field_value(recipe, key)})[
        0
    ]


def script_folder(content: Content, program: Program, files: Collection[str]) -> SourcedValue | None:
    """Return the folder of the program that the user's script starts: of its full path, or the one it changes to."""
    start = program.argv[0]
    if content.script is None or start in files or start.startswith(("-", "/", "$")):
        return None
    for launch in () if container_of(content.script) is not None else content.launches:
        path = str(launch.program.value)
        if not launch.program.unresolved and path.startswith("/") and path.endswith(f"/{start}"):
            return msgspec.structs.replace(launch.program, value=path.removesuffix(f"/{start}") or "/")
    found = changed_folder(content)
    is_known = found is not None and not found.unresolved and str(found.value).startswith("/")
    return found if is_known else None


STARTED = {"slurm": "run sbatch in the folder that has it", "torchrun": "run the command in the folder that has it"}
STARTED["hosts"] = STARTED["torchrun"]


def missing_checkout(program: Program, framework: str, scheduler: str, files: Collection[str]) -> tuple[str, ...]:
    """Return a note for a program of a checkout that was not named: how the job finds it all the same."""
    title, script = CHECKOUTS[framework].title, program.argv[0]
    if script in files and framework in ARGUMENTS_FILE:
        return ()  # the program is that of the export
    if script.startswith("-") or script in files:
        return (f"{title} must be installed where the job runs: otherwise add --framework-dir PATH, its checkout",)
    other = f", or {STARTED[scheduler]}" if scheduler in STARTED else " of the checkout in the image"
    return (f"{script} is a file of {title}: add --framework-dir PATH{other}",)


def saves_by_itself(program: ProgramArguments, minutes: float | None) -> bool:
    """Return whether the user's command sets its interval; a program that parses no arguments is written anew."""
    return bool(program.argv) and not program.fixed_in and minutes is None


def save_every(recipe: Recipe, step_s: float, minutes: float | None, given: Sequence[str]) -> int | None:
    """Return the steps between checkpoints with which a run that is ended at any time loses little; None to keep them.

    Frameworks save every so many steps, so minutes are converted with the estimated step time; what the user set stays.
    """
    if minutes is None and "checkpoint.save_every" in override.requested(recipe, given):
        return None
    every = max(1, round(60 * (minutes or SAVE_MINUTES) / step_s))
    return every if minutes is not None or every < (recipe.checkpoint.save_every or math.inf) else None


def with_time_to_save(recipe: Recipe, framework: str, step_s: float, given: Sequence[str]) -> Recipe:
    """Return the recipe with the seconds that a signaled run may take: a signal is noticed after the current step."""
    grace_s = float(math.ceil(2 * step_s + SAVING_S))
    kept = "checkpoint.grace_s" in override.requested(recipe, given) or grace_s <= recipe.checkpoint.grace_s
    if kept or not CHECKOUTS[framework].saves:
        return recipe
    return override.change(recipe, {"checkpoint.grace_s": grace_s})[0]


def saving_on_signal(program: Program, framework: str, files: Collection[str]) -> Program:
    """Return the program with the arguments that make it save when it is signaled; an exported script reads none."""
    words = () if program.argv[0] in files else CHECKOUTS[framework].on_signal
    added = tuple(word for word in words if word not in program.argv)
    return msgspec.structs.replace(program, argv=(*program.argv, *added))


def why_no_save(program: Program, framework: str, files: Collection[str]) -> str:
    """Return why a program does not save when it is signaled; empty if it does."""
    entry = CHECKOUTS[framework]
    if not entry.saves:
        return entry.how
    unset = [word for word in entry.on_signal if word not in program.argv]
    return f"only {' '.join(unset)} saves then" if unset and program.argv[0] not in files else ""


class PlannedExit(NamedTuple):
    """Arguments with which a program saves and ends with exit code 0 before its training is done."""

    minutes: int = 0  # 0: it does not end after a time that is known here
    words: str = ""  # the argument that sets them
    others: tuple[str, ...] = ()  # arguments that end it after steps, or after a time known only when it runs


EXIT_AFTER = {"exit_duration_in_mins": True, "exit_interval": False}  # Megatron's; whether it is a time


def planned_exit(program: Program) -> PlannedExit:
    """Return when a program ends by itself though its training is not done; Megatron's arguments, as flags or keys."""
    found, others = PlannedExit(), []
    for number, word in enumerate(program.argv):
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_").removeprefix("train.").removeprefix("++train.")
        if key not in EXIT_AFTER or not (equals or word.startswith("--")):
            continue
        if not equals:
            value = next(iter(program.argv[number + 1 : number + 2]), "")
        text = word if equals else f"{word} {value}"
        if EXIT_AFTER[key] and value.isdigit():
            found = PlannedExit(int(value), text)
        elif value not in ("None", "null"):
            others.append(text)
    return found._replace(others=tuple(others))


def planned_exit_notes(program: Program) -> tuple[str, ...]:
    """Return notes on a requeued job whose program ends by itself: it is requeued after a time, not after steps."""
    found = planned_exit(program)
    hours = f"{found.minutes / 60:.1f} h" if found.minutes >= 90 else f"{found.minutes} min"
    timed = f"{found.words} saves and ends each run after {hours}: the job is requeued then"
    ends = (f"warning: {text} ends the run with exit code 0, after which it is not requeued" for text in found.others)
    return (*((timed,) if found.minutes else ()), *ends)


def resuming(recipe: Recipe, given: Sequence[str], without: str = "--no-requeue") -> list[str]:
    """Return the override with which a restarted run resumes; raise InputError if the user turned resuming off.

    Megatron-LM loads --pretrained-checkpoint only while --load, the folder it saves to, has no checkpoint.
    """
    if recipe.checkpoint.resume:
        return []
    if "checkpoint.resume" in override.requested(recipe, given):
        reason = "a restarted run that does not resume would restart from its initial weights every time"
        fix = ("checkpoint.resume=true", without)
        raise InputError(reason, field="checkpoint.resume", value="false", fix=fix)
    return ["checkpoint.resume=true"]


def retention(
    framework: str, recipe: Recipe, every: int, given: Sequence[str], is_theirs: bool
) -> tuple[int, list[str]]:
    """Return the interval, and the overrides with which the job keeps the checkpoints that its file keeps.

    The interval divides that of the kept ones: Megatron-LM and Megatron-Bridge refuse others.
    A file of the framework (`is_theirs`) that keeps all its checkpoints keeps no others.
    """
    old, milestones = recipe.checkpoint.save_every, recipe.checkpoint.milestone_every
    typed = {"checkpoint.keep", "checkpoint.milestone_every"} & override.requested(recipe, given).keys()
    if milestones:
        fitting = fitting_interval(milestones, every)
        stays = milestones % fitting == 0 or "checkpoint.milestone_every" in typed
        return fitting, [] if stays else [f"checkpoint.milestone_every={milestones + -milestones % fitting}"]
    keeps_all = is_theirs and not typed and recipe.checkpoint.keep >= KEEP_ALL
    if not keeps_all or old <= every or not CHECKOUTS[framework].retains:
        return every, []
    fitting = fitting_interval(old, every)
    if fitting == old:
        return old, []
    return fitting, ["checkpoint.keep=1", f"checkpoint.milestone_every={old - old % fitting}"]


def changed_interval(recipe: Recipe, file: Recipe) -> tuple[str, ...]:
    """Return the warning for a job that saves more often than the file that it was read from."""
    checkpoint, old = recipe.checkpoint, file.checkpoint.save_every
    if old == checkpoint.save_every:
        return ()
    if not old:
        every = plural(checkpoint.save_every, "step")
        return (f"the job saves every {every} (checkpoint.save_every), the file names no interval",)
    milestones = plural(checkpoint.milestone_every, "step")
    few = f"the latest and those of every {milestones} are kept (checkpoint.keep)"
    if file.checkpoint.milestone_every not in (0, checkpoint.milestone_every):
        few += f": a multiple of the job's interval, which the file's {file.checkpoint.milestone_every:,} is not"
    kept = few if checkpoint.milestone_every else "all are kept" if checkpoint.keep >= KEEP_ALL else ""
    changed = f"the job saves every {plural(checkpoint.save_every, 'step')}, the file every {old:,}"
    return (f"warning: {changed}{f'; {kept}' if kept else ''}; checkpoint.save_every={old} keeps the file's",)


def requeue_note(framework: str, recipe: Recipe, step_s: float, own: bool = False) -> str:
    """Return how much a requeued run repeats; the `own` interval of the user's program stays."""
    steps = recipe.checkpoint.save_every
    minutes = steps * step_s / 60
    every = f"a checkpoint every {plural(steps, 'step')}, about {minutes:.0f} min at the estimated speed"
    if not steps:
        every = "no checkpoint before the end"
    more = own and (not steps or minutes > SAVE_MINUTES)
    other = f"; --save-minutes {SAVE_MINUTES} saves more often" if more else ""
    return f"requeue: {CHECKOUTS[framework].how}; {every}{other}"


def with_output_folder(recipe: Recipe, settings: Settings, given: Settings) -> Recipe:
    """Return the recipe with the folder of the checkpoints that a file names by its path.

    torchtitan's is below an output folder of the `settings`, the Trainer's is one of the arguments `given`.
    """
    stated = next((settings[key] for key in OUTPUT_FOLDERS if key in settings), None)
    folder = recipe.checkpoint.folder or ("" if stated is None else "checkpoint")
    if stated is None and not folder:
        stated = given.get(OUTPUT_FOLDER)
    if stated is None or stated.unresolved or not str(stated.value).startswith("/"):
        return recipe
    return override.change(recipe, {"checkpoint.folder": str(PurePosixPath(str(stated.value)) / folder)})[0]
