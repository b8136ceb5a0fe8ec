"""Commands that start other commands (env, nohup, srun, docker run): find where the inner command begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.frameworks.shell.sbatch import SHORT
from meshwright.frameworks.types import SourcedValue

ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
UNKNOWN = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|\$[0-9@*]|\$\{[^}]*\}|\$\(.*\)|`[^`]*`", re.DOTALL)
WHICH = re.compile(r"\$\((?:which|command -v) ([A-Za-z0-9._-]+)\)")
MAX_WRAPPERS = 20


class OptionSpec(msgspec.Struct, frozen=True):
    """Which options of a command take a value."""

    values: Mapping[str, int] | None = None  # number of values; None: every long option except the flags takes one
    flags: frozenset[str] = frozenset()
    short: Mapping[str, str] = {}  # short options with a value, by long name
    short_flags: Mapping[str, str] = {}


class Wrapper(msgspec.Struct, frozen=True):
    """A command that starts another one."""

    option_spec: OptionSpec = OptionSpec({})
    subcommands: frozenset[str] = frozenset()  # required subcommand, of one or more words
    operands: int = 0  # operands between its options and the command, such as an image
    env: frozenset[str] = frozenset()  # options that set environment variables: NAME=value
    after_dashes: bool = False  # the command follows --


class Option(msgspec.Struct, frozen=True):
    """An option with its value; True for a flag."""

    name: str
    value: SourcedValue


class Unwrapped(msgspec.Struct, frozen=True):
    """The wrappers around a command."""

    start: int  # index of the command itself
    env: Mapping[str, SourcedValue]
    options: Mapping[str, Mapping[str, SourcedValue]]  # by the wrapper's name


def _values(names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), 1)


SRUN_FLAGS = frozenset(
    _values(
        "exclusive label unbuffered no-kill overlap multi-prog pty verbose quiet exact kill-on-bad-exit overcommit "
        "oversubscribe contiguous spread-job use-min-nodes whole disable-status no-allocate preserve-env hold "
        "immediate container-writable container-readonly container-mount-home no-container-mount-home "
        "container-remap-root no-container-remap-root container-entrypoint no-container-entrypoint help version"
    )
)
SRUN = OptionSpec(flags=SRUN_FLAGS, short=SHORT)
SBATCH = OptionSpec(flags=SRUN_FLAGS | frozenset(_values("parsable requeue no-requeue test-only wait")), short=SHORT)
DOCKER = OptionSpec(
    _values(
        "volume env workdir user name gpus shm-size ipc network net ulimit mount device env-file entrypoint publish "
        "runtime cap-add security-opt memory hostname label platform pull group-add cpus log-driver pid tmpfs "
        "cpuset-cpus add-host restart annotation userns"
    ),
    short={
        "v": "volume",
        "e": "env",
        "w": "workdir",
        "u": "user",
        "p": "publish",
        "m": "memory",
        "h": "hostname",
        "l": "label",
        "a": "attach",
    },
)
SINGULARITY = OptionSpec(
    _values("bind env env-file home pwd workdir overlay scratch mount app network security apply-cgroups cwd"),
    short={"B": "bind", "H": "home", "W": "workdir", "o": "overlay", "S": "scratch"},
)
UV = OptionSpec(
    _values(
        "with extra group python project directory env-file package index-url with-requirements with-editable "
        "only-group no-group no-extra index default-index extra-index-url config-file cache-dir"
    ),
    short={"p": "python", "w": "with"},
)
MPI = OptionSpec(
    _values(
        "np n x H host hostfile machinefile npernode map-by bind-to ppn hosts f N c rank-by d depth cpu-bind wdir wd "
        "genvlist envlist output-filename prefix path timeout mem-bind gpu-bind launcher iface"
    )
    | {"mca": 2, "genv": 2, "env": 2}
)
APRUN = OptionSpec(_values("n N d cc j S ss e"))
JSRUN = OptionSpec(
    _values("nrs tasks-per-rs cpu-per-rs gpu-per-rs rs-per-host bind launch-distribution latency-priority env"),
    short={"n": "nrs", "a": "tasks-per-rs", "c": "cpu-per-rs", "g": "gpu-per-rs", "r": "rs-per-host", "b": "bind",
           "d": "launch-distribution", "l": "latency-priority", "E": "env"},
)  # fmt: skip
FLUX = OptionSpec(
    _values("nodes ntasks gpus-per-task gpus-per-node cores-per-task tasks-per-node time-limit setopt env queue bank"),
    short={"N": "nodes", "n": "ntasks", "g": "gpus-per-task", "c": "cores-per-task", "t": "time-limit", "o": "setopt",
           "q": "queue", "B": "bank"},
)  # fmt: skip
ENROOT = OptionSpec(
    _values("conf env mount rc"), short={"c": "conf", "e": "env", "m": "mount"}, short_flags={"r": "root", "w": "rw"}
)
SSH = OptionSpec({}, short=dict.fromkeys("ipolFJLRDbcEeImOQSWw", "option"))
PDSH = OptionSpec({}, short=dict.fromkeys("wxlftugRM", "option"))
NSYS = OptionSpec(flags=frozenset({"python-sampling", "help"}), short=dict.fromkeys("tosfwxydecn", "option"))
RAY = OptionSpec(
    _values(
        "address submission-id runtime-env runtime-env-json working-dir metadata-json entrypoint-num-cpus "
        "entrypoint-num-gpus entrypoint-memory entrypoint-resources entrypoint-label-selector log-style log-color "
        "headers verify"
    )
)
REMOTE = frozenset(("ssh", "pdsh", "clush"))  # wrappers that give their last words to a shell as one text
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
SUBMITTED = "--"  # in Unwrapped.options: a Python program submits the command
GIVEN = "*.sh"  # in Unwrapped.options: a script is given the command
IMAGE = "image"  # in the options of a container's tool: its operand
BIND = "bind"  # an option of apptainer that may be repeated
BEFORE = ("--", "&&", ";")  # words before a command, in the arguments of a program that submits it
SCRIPTS = (".sh", ".bash")
PLAIN = Wrapper()
WRAPPERS: dict[str, Wrapper] = {
    "env": Wrapper(OptionSpec(_values("unset chdir split-string"), short={"u": "unset", "C": "chdir"})),
    "exec": Wrapper(OptionSpec({}, short={"a": "name"})),
    "nohup": PLAIN,
    "setsid": PLAIN,
    "command": PLAIN,
    "builtin": PLAIN,
    "unbuffer": PLAIN,
    "time": Wrapper(OptionSpec(_values("output format"), short={"o": "output", "f": "format"})),
    "sudo": Wrapper(OptionSpec(_values("user group"), short={"u": "user", "g": "group"})),
    "nice": Wrapper(OptionSpec(_values("adjustment"), short={"n": "adjustment"})),
    "ionice": Wrapper(OptionSpec(_values("class classdata"), short={"c": "class", "n": "classdata"})),
    "stdbuf": Wrapper(OptionSpec(_values("input output error"), short={"i": "input", "o": "output", "e": "error"})),
    "timeout": Wrapper(OptionSpec(_values("signal kill-after"), short={"s": "signal", "k": "kill-after"}), operands=1),
    "numactl": Wrapper(
        OptionSpec(
            _values("cpunodebind membind physcpubind interleave preferred"),
            short={"N": "cpunodebind", "m": "membind", "C": "physcpubind", "i": "interleave"},
        )
    ),
    "taskset": Wrapper(operands=1),
    "uv": Wrapper(UV, frozenset({"run"})),
    "poetry": Wrapper(subcommands=frozenset({"run"})),
    "pdm": Wrapper(subcommands=frozenset({"run"})),
    "rye": Wrapper(subcommands=frozenset({"run"})),
    "pipenv": Wrapper(subcommands=frozenset({"run"})),
    "pixi": Wrapper(
        OptionSpec(_values("environment manifest-path"), short={"e": "environment"}), subcommands=frozenset({"run"})
    ),
    "conda": Wrapper(
        OptionSpec(_values("name prefix cwd"), short={"n": "name", "p": "prefix"}), subcommands=frozenset({"run"})
    ),
    "nsys": Wrapper(NSYS, frozenset({"profile", "launch"})),
    "ray": Wrapper(RAY, frozenset({"job submit"})),
    "srun": Wrapper(SRUN),
    "sbatch": Wrapper(SBATCH),
    "mpirun": Wrapper(MPI, env=frozenset({"x"})),
    "mpiexec": Wrapper(MPI, env=frozenset({"x"})),
    "aprun": Wrapper(APRUN),
    "jsrun": Wrapper(JSRUN),
    "flux": Wrapper(FLUX, frozenset({"run", "submit"})),
    "shifter": Wrapper(OptionSpec(_values("image volume module env"), short={"V": "volume", "e": "env"})),
    "enroot": Wrapper(ENROOT, frozenset({"start"}), 1, frozenset({"env"})),
    "kubectl": Wrapper(subcommands=frozenset({"exec"}), after_dashes=True),
    "runai": Wrapper(after_dashes=True),
    "ssh": Wrapper(SSH, operands=1),
    "pdsh": Wrapper(PDSH),
    "clush": Wrapper(PDSH),
    "singularity": Wrapper(SINGULARITY, frozenset({"exec", "run"}), 1, frozenset({"env"})),
    "apptainer": Wrapper(SINGULARITY, frozenset({"exec", "run"}), 1, frozenset({"env"})),
    "docker": Wrapper(DOCKER, frozenset({"run", "exec"}), 1, frozenset({"env"})),
    "podman": Wrapper(DOCKER, frozenset({"run", "exec"}), 1, frozenset({"env"})),
    "podman-hpc": Wrapper(DOCKER, frozenset({"run", "exec"}), 1, frozenset({"env"})),
}


def command_name(word: SourcedValue) -> str:
    """Return the base name of a command, or an empty string if it is unresolved."""
    text = str(word.value)
    if found := WHICH.fullmatch(text):
        return found[1]
    name = text.rpartition("/")[2]
    return "" if word.unresolved and set("$`(){}") & set(name) else name


def is_unresolved_expansion(word: SourcedValue) -> bool:
    """Return whether a word is a single unresolved expansion, which may become any number of words."""
    return bool(word.unresolved) and UNKNOWN.fullmatch(str(word.value)) is not None


def read_option(words: Sequence[SourcedValue], at: int, option_spec: OptionSpec) -> tuple[Option, int]:
    """Return the option at a position, and the position after it."""
    word = words[at]
    text = str(word.value)
    name, equals, value = text.lstrip("-").partition("=")
    name = name.replace("_", "-")
    long = text.startswith("--") or name in (option_spec.values or {})
    if long and equals:
        return Option(name, SourcedValue(value, word.line, word.file, word.unresolved)), at + 1
    if long:
        values = (
            (option_spec.values or {}).get(name, 0)
            if option_spec.values is not None
            else int(name not in option_spec.flags)
        )
        return _with_values(words, at, name, values)
    letter, rest = text[1:2], text[2:]
    if letter not in option_spec.short:
        return Option(option_spec.short_flags.get(letter, letter), SourcedValue(True, word.line, word.file)), at + 1
    if rest:
        glued = SourcedValue(rest.removeprefix("="), word.line, word.file, word.unresolved)
        return Option(option_spec.short[letter], glued), at + 1
    return _with_values(words, at, option_spec.short[letter], 1)


def _with_values(words: Sequence[SourcedValue], at: int, name: str, values: int) -> tuple[Option, int]:
    here = words[at]
    if not values or at + 1 >= len(words):
        return Option(name, SourcedValue(True, here.line, here.file)), at + 1
    return Option(name, words[at + 1]), min(at + 1 + values, len(words))


def is_option(word: SourcedValue) -> bool:
    text = str(word.value)
    return text.startswith("-") and len(text) > 1


def is_script(word: SourcedValue) -> bool:
    return str(word.value).endswith(".py")


def unwrap(words: Sequence[SourcedValue]) -> Unwrapped:
    """Strip all wrappers from a command."""
    env: dict[str, SourcedValue] = {}
    options: dict[str, dict[str, SourcedValue]] = {}
    at = 0
    for _ in range(MAX_WRAPPERS):
        at = _assignments(words, at, env)
        name = command_name(words[at]) if at < len(words) else ""
        wrapper = WRAPPERS.get(name)
        inner = _inner_command(words, at, name, wrapper, env, options) if wrapper else None
        if inner is None:
            inner = _submitted(words, at, name)
            if inner is not None:
                options[SUBMITTED] = {}
            elif _is_given_a_program(words, at, name):
                inner, options[GIVEN] = at + 1, {}
            else:
                break
        at = inner
    return Unwrapped(at, env, options)


def _submitted(words: Sequence[SourcedValue], at: int, name: str) -> int | None:
    """Return where the launcher begins that a Python program is given to submit, after --; None if there is none."""
    texts = [str(word.value) for word in words]
    if not name.startswith("python") or not any(one.endswith(".py") for one in texts[at + 1 : at + 3]):
        return None
    if "--" not in texts[at:]:
        return None
    starts = range(texts.index("--", at) + 1, len(texts))
    return next((one for one in starts if texts[one] in LAUNCHERS and texts[one - 1] in BEFORE), None)


def _is_given_a_program(words: Sequence[SourcedValue], at: int, name: str) -> bool:
    """Return whether a script is given a Python program and its flags, as in ./launch.sh pretrain_gpt.py --bf16."""
    texts = [str(word.value) for word in words[at + 1 : at + 3]]
    return name.endswith(SCRIPTS) and len(texts) == 2 and texts[0].endswith(".py") and texts[1].startswith("-")


def _assignments(words: Sequence[SourcedValue], at: int, env: dict[str, SourcedValue]) -> int:
    """Collect NAME=value words, which remain only after env."""
    while at < len(words) and (found := ASSIGNED.match(str(words[at].value))):
        env[found[1]] = _with_text(words[at], found[2])
        at += 1
    return at


def _with_text(word: SourcedValue, text: str) -> SourcedValue:
    return SourcedValue(text, word.line, word.file, word.unresolved)


def _inner_command(
    words: Sequence[SourcedValue],
    at: int,
    name: str,
    wrapper: Wrapper,
    env: dict[str, SourcedValue],
    options: dict[str, dict[str, SourcedValue]],
) -> int | None:
    """Return where the command inside a wrapper begins, or None."""
    at += 1
    if wrapper.subcommands:
        found = [one.split() for one in wrapper.subcommands]
        parts = next((one for one in found if [word.value for word in words[at : at + len(one)]] == one), None)
        if parts is None:
            return None
        at += len(parts)
    if wrapper.after_dashes:
        return next((one + 1 for one in range(at, len(words)) if words[one].value == "--"), None)
    unknown = 0
    read = options.setdefault(name, {})
    while at < len(words):
        if name == "uv" and words[at].value in ("-m", "--module"):
            break
        if words[at].value == "--":
            at += 1
            break
        if is_option(words[at]):
            option, at = read_option(words, at, wrapper.option_spec)
            read[option.name] = _joined(read, option)
            _set_variables(option, wrapper, name, env)
        elif (
            is_unresolved_expansion(words[at])
            and at + 1 < len(words)
            and name in ("srun", "docker", "podman", "mpirun")
        ):
            unknown, at = unknown + 1, at + 1
        else:
            break
    # The last unresolved word is the operand, such as an image.
    operands = max(wrapper.operands - unknown, 0)
    if operands == 1 and at < len(words):
        read.setdefault(IMAGE, words[at])
    return min(at + operands, len(words))


def _joined(read: Mapping[str, SourcedValue], option: Option) -> SourcedValue:
    """Return an option's value; that of a repeated --bind has all of its mounts."""
    if option.name != BIND or BIND not in read:
        return option.value
    return _with_text(option.value, f"{read[BIND].value},{option.value.value}")


def _set_variables(option: Option, wrapper: Wrapper, name: str, env: dict[str, SourcedValue]) -> None:
    pairs: list[str] = []
    if option.name in wrapper.env:
        pairs = [str(option.value.value)]
    elif name in ("srun", "sbatch") and option.name == "export":
        pairs = str(option.value.value).split(",")
    elif name == "ray" and option.name == "runtime-env-json":
        pairs = [f"{key}={value}" for key, value in _env_vars(str(option.value.value)).items()]
    for pair in pairs:
        if found := ASSIGNED.match(pair):
            env[found[1]] = _with_text(option.value, found[2])


def _env_vars(text: str) -> Mapping[str, Any]:
    """Return the environment variables of a Ray runtime environment; none if its JSON is known only at run time."""
    try:
        found = json.loads(text).get("env_vars", {})
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
