"""Commands that start other commands, such as env, nohup, srun and docker run: where the other one begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from meshwright.frameworks.shell.sbatch import SHORT
from meshwright.frameworks.types import SourcedValue

ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
UNKNOWN = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*|\$[0-9@*]|\$\{[^}]*\}|\$\(.*\)|`[^`]*`", re.DOTALL)
LOOKED_UP = re.compile(r"\$\((?:which|command -v) ([A-Za-z0-9._-]+)\)")
MOST_WRAPPERS = 20


class Takes(msgspec.Struct, frozen=True):
    """Which options of a command are followed by a value."""

    values: Mapping[str, int] | None = None  # how many words follow; none: every long option but the flags takes one
    flags: frozenset[str] = frozenset()
    short: Mapping[str, str] = {}  # letters that take a value, with their long name
    short_flags: Mapping[str, str] = {}


class Wrapper(msgspec.Struct, frozen=True):
    """A command that starts another one."""

    takes: Takes = Takes({})
    verbs: frozenset[str] = frozenset()  # one of these must follow the name
    operands: int = 0  # words of its own between its options and the command
    env: frozenset[str] = frozenset()  # options that set a variable: NAME=value


class Option(msgspec.Struct, frozen=True):
    """An option with its value, or True."""

    name: str
    said: SourcedValue


class Unwrapped(msgspec.Struct, frozen=True):
    """What stands around a command."""

    start: int  # the first word of the command itself
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
SRUN = Takes(flags=SRUN_FLAGS, short=SHORT)
DOCKER = Takes(
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
SINGULARITY = Takes(
    _values("bind env env-file home pwd workdir overlay scratch mount app network security apply-cgroups cwd"),
    short={"B": "bind", "H": "home", "W": "workdir", "o": "overlay", "S": "scratch"},
)
UV = Takes(
    _values(
        "with extra group python project directory env-file package index-url with-requirements with-editable "
        "only-group no-group no-extra index default-index extra-index-url config-file cache-dir"
    ),
    short={"p": "python", "w": "with"},
)
MPI = Takes(
    _values("np n x H host hostfile machinefile npernode map-by bind-to ppn hosts f N c rank-by")
    | {"mca": 2, "genv": 2, "env": 2}
)
NSYS = Takes(flags=frozenset({"python-sampling", "help"}), short=dict.fromkeys("tosfwxydecn", "option"))
PLAIN = Wrapper()
WRAPPERS: dict[str, Wrapper] = {
    "env": Wrapper(Takes(_values("unset chdir split-string"), short={"u": "unset", "C": "chdir"})),
    "exec": Wrapper(Takes({}, short={"a": "name"})),
    "nohup": PLAIN,
    "setsid": PLAIN,
    "command": PLAIN,
    "builtin": PLAIN,
    "unbuffer": PLAIN,
    "time": Wrapper(Takes(_values("output format"), short={"o": "output", "f": "format"})),
    "sudo": Wrapper(Takes(_values("user group"), short={"u": "user", "g": "group"})),
    "nice": Wrapper(Takes(_values("adjustment"), short={"n": "adjustment"})),
    "ionice": Wrapper(Takes(_values("class classdata"), short={"c": "class", "n": "classdata"})),
    "stdbuf": Wrapper(Takes(_values("input output error"), short={"i": "input", "o": "output", "e": "error"})),
    "timeout": Wrapper(Takes(_values("signal kill-after"), short={"s": "signal", "k": "kill-after"}), operands=1),
    "numactl": Wrapper(
        Takes(
            _values("cpunodebind membind physcpubind interleave preferred"),
            short={"N": "cpunodebind", "m": "membind", "C": "physcpubind", "i": "interleave"},
        )
    ),
    "taskset": Wrapper(operands=1),
    "uv": Wrapper(UV, frozenset({"run"})),
    "poetry": Wrapper(verbs=frozenset({"run"})),
    "pdm": Wrapper(verbs=frozenset({"run"})),
    "rye": Wrapper(verbs=frozenset({"run"})),
    "pipenv": Wrapper(verbs=frozenset({"run"})),
    "pixi": Wrapper(Takes(_values("environment manifest-path"), short={"e": "environment"}), verbs=frozenset({"run"})),
    "conda": Wrapper(Takes(_values("name prefix cwd"), short={"n": "name", "p": "prefix"}), verbs=frozenset({"run"})),
    "nsys": Wrapper(NSYS, frozenset({"profile", "launch"})),
    "srun": Wrapper(SRUN),
    "mpirun": Wrapper(MPI),
    "mpiexec": Wrapper(MPI),
    "singularity": Wrapper(SINGULARITY, frozenset({"exec", "run"}), 1, frozenset({"env"})),
    "apptainer": Wrapper(SINGULARITY, frozenset({"exec", "run"}), 1, frozenset({"env"})),
    "docker": Wrapper(DOCKER, frozenset({"run", "exec"}), 1, frozenset({"env"})),
    "podman": Wrapper(DOCKER, frozenset({"run", "exec"}), 1, frozenset({"env"})),
}


def command_name(word: SourcedValue) -> str:
    """A command without its folder, which need not be known; empty when the name itself is not."""
    text = str(word.value)
    if found := LOOKED_UP.fullmatch(text):
        return found[1]
    name = text.rpartition("/")[2]
    return "" if word.unresolved and set("$`(){}") & set(name) else name


def wholly_unknown(word: SourcedValue) -> bool:
    """Whether a word is nothing but an unknown, so that it may stand for any number of words."""
    return bool(word.unresolved) and UNKNOWN.fullmatch(str(word.value)) is not None


def read_option(words: Sequence[SourcedValue], at: int, takes: Takes) -> tuple[Option, int]:
    """The option at this place, and the place behind it."""
    word = words[at]
    text = str(word.value)
    name, equals, value = text.lstrip("-").partition("=")
    name = name.replace("_", "-")
    long = text.startswith("--") or name in (takes.values or {})
    if long and equals:
        return Option(name, SourcedValue(value, word.line, word.file, word.unresolved)), at + 1
    if long:
        values = (takes.values or {}).get(name, 0) if takes.values is not None else int(name not in takes.flags)
        return _followed(words, at, name, values)
    letter, rest = text[1:2], text[2:]
    if letter not in takes.short:
        return Option(takes.short_flags.get(letter, letter), SourcedValue(True, word.line, word.file)), at + 1
    if rest:
        glued = SourcedValue(rest.removeprefix("="), word.line, word.file, word.unresolved)
        return Option(takes.short[letter], glued), at + 1
    return _followed(words, at, takes.short[letter], 1)


def _followed(words: Sequence[SourcedValue], at: int, name: str, values: int) -> tuple[Option, int]:
    here = words[at]
    if not values or at + 1 >= len(words):
        return Option(name, SourcedValue(True, here.line, here.file)), at + 1
    return Option(name, words[at + 1]), min(at + 1 + values, len(words))


def is_option(word: SourcedValue) -> bool:
    text = str(word.value)
    return text.startswith("-") and len(text) > 1


def unwrap(words: Sequence[SourcedValue]) -> Unwrapped:
    """Look through everything that only starts another command."""
    env: dict[str, SourcedValue] = {}
    options: dict[str, dict[str, SourcedValue]] = {}
    at = 0
    for _ in range(MOST_WRAPPERS):
        at = _assignments(words, at, env)
        name = command_name(words[at]) if at < len(words) else ""
        wrapper = WRAPPERS.get(name)
        behind = _behind(words, at, name, wrapper, env, options) if wrapper else None
        if behind is None:
            break
        at = behind
    return Unwrapped(at, env, options)


def _assignments(words: Sequence[SourcedValue], at: int, env: dict[str, SourcedValue]) -> int:
    """Words such as NAME=value in front of a command; only behind env are they still there."""
    while at < len(words) and (found := ASSIGNED.match(str(words[at].value))):
        env[found[1]] = _part(words[at], found[2])
        at += 1
    return at


def _part(word: SourcedValue, text: str) -> SourcedValue:
    return SourcedValue(text, word.line, word.file, word.unresolved)


def _behind(
    words: Sequence[SourcedValue],
    at: int,
    name: str,
    wrapper: Wrapper,
    env: dict[str, SourcedValue],
    options: dict[str, dict[str, SourcedValue]],
) -> int | None:
    """Where the command inside a wrapper begins; none when there is none."""
    at += 1
    if wrapper.verbs:
        if at >= len(words) or words[at].value not in wrapper.verbs:
            return None
        at += 1
    unknown = 0
    read = options.setdefault(name, {})
    while at < len(words):
        if name == "uv" and words[at].value in ("-m", "--module"):
            break
        if words[at].value == "--":
            at += 1
            break
        if is_option(words[at]):
            option, at = read_option(words, at, wrapper.takes)
            read[option.name] = option.said
            _set_variables(option, wrapper, name, env)
        elif wholly_unknown(words[at]) and at + 1 < len(words) and name in ("srun", "docker", "podman", "mpirun"):
            unknown, at = unknown + 1, at + 1
        else:
            break
    # Among unknown words, the last one stands for the operand, such as an image.
    return min(at + max(wrapper.operands - unknown, 0), len(words))


def _set_variables(option: Option, wrapper: Wrapper, name: str, env: dict[str, SourcedValue]) -> None:
    pairs: list[str] = []
    if option.name in wrapper.env:
        pairs = [str(option.said.value)]
    elif name == "srun" and option.name == "export":
        pairs = str(option.said.value).split(",")
    for pair in pairs:
        if found := ASSIGNED.match(pair):
            env[found[1]] = _part(option.said, found[2])
