"""Command lines that cannot be parsed: unknown commands and options, with did-you-mean and the command's help."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any

import click

from meshwright import api
from meshwright.api.argument_names import (
    NODE_NAMES,
    PER_NODE_NAMES,
    cost_limit,
    key_of_cluster_file,
    meant_option,
    pasted,
    repeats_goal,
    steps_of_tokens,
    with_nodes,
)
from meshwright.api.paths import blend_of
from meshwright.api.verbs import verbs_on
from meshwright.errors import InputError, closest

PLANNING = ("recommend", "plan", "estimate", "size")  # the first saves a plan, and has options that others lack
COMMAND_WORDS = {
    **dict.fromkeys(("finetune", "fine-tune", "fit", "run", "pretrain", "sft", "lora", "resume"), "train"),
    **dict.fromkeys(("eval", "perplexity"), "evaluate"),
    **dict.fromkeys(("benchmark", "throughput"), "bench"),
    **dict.fromkeys(("validate", "lint", "verify"), "check"),
    **dict.fromkeys(("dry-run", "simulate"), "dryrun"),
    **dict.fromkeys(("list", "search", "configs"), "recipes"),
    **dict.fromkeys(("show", "config"), "recipe"),
    **dict.fromkeys(("memory", "calc", "fits"), "estimate"),
    **dict.fromkeys(("diagnose", "debug", "logs"), "doctor"),
    **dict.fromkeys(("submit", "slurm", "sbatch"), "launch"),
    **dict.fromkeys(("serve", "ui", "server"), "web"),
    "save": "convert",
    **dict.fromkeys(("merge", "merge-adapters", "merge-lora", "merge_and_unload"), "convert RUN OUT --merge"),
    **dict.fromkeys(("chat", "infer", "inference", "predict", "sample"), "generate"),
    **dict.fromkeys(("suggest", "advise"), "recommend"),
    **dict.fromkeys(("inspect", "info", "describe", "params", "parameters", "summary"), "models"),
    **dict.fromkeys(("cost", "price", "budget", "costs"), "recommend MODEL --gpus GPUS --goal GOAL --price PRICE"),
    **dict.fromkeys(("gguf", "ollama", "vllm", "quantize"), "convert RUN OUT --merge"),
    **dict.fromkeys(("push", "upload", "push-to-hub", "push_to_hub"), "convert RUN OUT, then hf upload REPO OUT"),
    "help": "--help",
}
"""Words that other tools use for our commands."""
FORMAT_OPTIONS = ("to", "format", "output_format", "save_method", "outtype", "gguf", "quantize")
CONVERTS = "it writes a Hugging Face folder; convert_hf_to_gguf.py of llama.cpp makes a GGUF file of it"
SHORT_OPTIONS = {
    "-w": "nodelist",
    "-x": "exclude",
    "-d": "dependency",
    "-D": "chdir",
    "-N": "nodes",
    "-n": "world_size",
    "-s": "oversubscribe",
    "-H": "hold",
    "-L": "licenses",
    "-M": "clusters",
}
"""sbatch's short options by their long names; those that commands have themselves are declared there."""


def unknown_command(name: str, known: list[str], rest: Sequence[str] = ()) -> InputError:
    """Return the error for a command that does not exist; `rest` are the words after it."""
    if name.lower() == "help":
        of_command = next((f"meshwright {one} --help" for one in rest if one in known), "meshwright --help")
        return InputError("is an option here", field="command", value=name, fix=[of_command])
    same = COMMAND_WORDS.get(name.lower())
    near = [same] if same else closest(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    reason = f"unknown command; {hint}Try 'meshwright --help'."
    return InputError(reason, field="command", value=name, fix=near or ["meshwright --help"])


def to_error(error: click.ClickException, arguments: Sequence[str]) -> InputError:
    """Return click's error as ours: the option, why it is refused, and what was meant or the command's help."""
    context: Any = getattr(error, "ctx", None)
    command = _command_path(context, arguments)
    own_help = f"Try '{command} --help'."
    if isinstance(error, click.NoSuchOption):
        words = [word.partition("=")[0] for word in arguments]
        alike = (word for word in words if word.startswith(error.option_name))  # click splits -to into -t and -o
        typed = error.option_name if error.option_name in words else next(alike, error.option_name)
        hint, near = _meant(typed, context, arguments)
        others = {one: _meant(one, context, arguments) for one in _unknown_options(context, arguments) if one != typed}
        more = "".join(f"{one} is none either; {about}" for one, (about, _) in others.items())
        if others:  # corrected at once
            near = _at_once({typed: near, **{one: found for one, (_, found) in others.items()}}, context, arguments)
        about_all = f"{hint}{more}"
        reason = f"{command} has no such option{'; ' if about_all else '. '}{about_all}{own_help}"
        return InputError(reason, field="option", value=typed, fix=near or [f"{command} --help"])
    words = [word for word in arguments[1:] if not word.startswith("-")]
    takes_query = context is not None and any(one.name == "query" for one in context.command.params)
    if takes_query and "unexpected extra argument" in error.format_message() and len(words) == len(arguments) - 1:
        quoted = f"{command} {shlex.quote(' '.join(words))}"
        return InputError(f"takes one search text: quote several words. {own_help}", "query", " ".join(words), [quoted])
    return InputError(f"{error.format_message().rstrip('.')}. {own_help}", fix=[f"{command} --help"])


def _at_once(fixes: Mapping[str, Sequence[str]], context: Any, arguments: Sequence[str]) -> list[str]:
    """Return the first fix of each option as one to paste, then those that are commands of their own."""
    takes_value = {flag for one in context.command.params if not getattr(one, "is_flag", False) for flag in one.opts}
    first = [
        f"{found[0]} {_value_of(option, arguments)}".rstrip() if found[0] in takes_value else found[0]
        for option, found in fixes.items()
        if found
    ]
    first = list(dict.fromkeys(first))  # two options may mean one
    left_out = [one.removeprefix("without ") for one in first if one.startswith("without ")]
    commands = [one for one in first if one.startswith("meshwright ")]
    written = " ".join(one for one in first if not one.startswith(("without ", "meshwright ")))
    if commands and not written:  # they leave out what the command does not have
        return commands
    return [*([written] if written else [f"without {' '.join(left_out)}"] if left_out else []), *commands]


def given_twice(option: click.Option, arguments: Sequence[str], takes_overrides: bool) -> InputError:
    """Return the error for an option with one value that was given more than once."""
    values = [value for flag in option.opts for value in _values_of(flag, arguments)]
    fix = [f"{option.opts[0]} {values[-1]}"] if values else []
    if option.name == "dataset" and takes_overrides:
        fix = [blend_of(dict.fromkeys(values, 1.0))]
    counts, names = [one for one in values if one.isdigit()], [one for one in values if not one.isdigit()]
    if option.name == "gpu" and len(counts) == len(names) == 1:  # size counts the GPUs itself
        fix = [f"--gpu {names[0]} --max-gpus {counts[0]}"]
    return InputError(f"given {len(values)} times; it takes one value", option.opts[0], " and ".join(values), fix)


def _values_of(option: str, arguments: Sequence[str]) -> list[str]:
    found = []
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            found.append(word.partition("=")[2])
        elif word == option:
            found += arguments[place + 1 : place + 2]
    return found


def _command_path(context: Any, arguments: Sequence[str]) -> str:
    """Return the command as it was typed; the parser raises some errors without a context."""
    if context is not None and not isinstance(context.command, click.Group):
        return str(context.command_path)
    first = arguments[0] if arguments else ""
    return f"meshwright {first}" if first in [verb.name for verb in verbs_on("cli")] else "meshwright"


def _unknown_options(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return the long options that a command does not have, in the order typed."""
    if context is None or isinstance(context.command, click.Group):
        return []
    taken = {flag: one for one in context.command.params for flag in (*one.opts, *one.secondary_opts)}
    taken |= dict.fromkeys(context.help_option_names)
    found, is_value = [], False
    for word in arguments:
        name, equals, _ = word.partition("=")
        one = taken.get(name)
        if word == "--":
            break
        if not is_value and name.startswith("--") and name not in taken:
            found.append(name)
        is_value = not is_value and isinstance(one, click.Option) and not one.is_flag and not equals
    return list(dict.fromkeys(found))


def _with_typed_nodes(name: str, value: str, gpus: str, arguments: Sequence[str]) -> str:
    """Return --gpus with an option about it, and with the other one where both nodes and GPUs of a node are typed."""
    counts = (*PER_NODE_NAMES, *NODE_NAMES)
    typed = [(word.lstrip("-").partition("=")[0].replace("-", "_").lower(), word) for word in arguments]
    for other in counts if name in counts else ():
        for text in (_value_of(word.partition("=")[0], arguments) for found, word in typed if found == other != name):
            gpus = with_nodes(other, text, gpus).removeprefix("--gpus ") or gpus
    return with_nodes(name, value, gpus)


def _meant(option: str, context: Any, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return what an unknown option was probably meant to be: an argument, a recipe field or another option."""
    parameters = context.command.params if context is not None else []
    if option == "--json" and context is not None and context.parent is None:
        rest = list(dropwhile(lambda word: word.startswith("-"), (word for word in arguments if word != option)))
        meant = shlex.join(["meshwright", *(rest or ["COMMAND"]), option])
        return f"it goes behind the command: {meant}. ", [meant]
    name = SHORT_OPTIONS.get(option, option.lstrip("-").replace("-", "_").lower())
    if context is not None and context.command.name == "convert" and name in FORMAT_OPTIONS:
        return f"{CONVERTS}. ", [f"without {option}"]
    for one in parameters:
        if isinstance(one, click.Argument) and one.name == name and one.nargs == 1:
            meant = _as_argument(option, one, context, arguments)
            return f"it is an argument without a name: {meant}. ", [meant]
    negated = [flag for one in parameters for flag in one.opts if flag == f"--no-{option.lstrip('-')}"]
    if negated:
        return f"it is the default, and {negated[0]} turns it off. ", [f"without {option}"]
    options = [flag for one in parameters if isinstance(one, click.Option) for flag in (*one.opts, *one.secondary_opts)]
    takes_overrides = any(one.name == "overrides" for one in parameters)
    value = _value_of(option, arguments)
    own_gpus = _value_of("--gpus", arguments)
    nodes = _with_typed_nodes(name, value, own_gpus, arguments) if "--gpus" in options else ""
    in_file = own_gpus.endswith(".toml") and name in (*NODE_NAMES, *PER_NODE_NAMES)
    if nodes == f"--gpus {own_gpus}" or (in_file and not nodes):
        return f"--gpus {own_gpus} says it already. ", [f"without {option}"]
    if nodes:
        return f"write {nodes}. ", [nodes]
    on_cluster = {"--gpus", "--gpu"} & {*options} and not ("--sbatch" in options and name == "network")
    of_file = key_of_cluster_file(name, value, own_gpus or _value_of("--gpu", arguments)) if on_cluster else None
    if of_file is not None:
        return f"{of_file[0]}. ", [of_file[1]]
    cost = cost_limit(name, value, options, arguments)
    if cost is not None:
        return f"{cost[0]}. ", [cost[1]]
    budget = _as_budget(option, value, context, arguments) if name == "tokens" and takes_overrides else None
    if budget is not None:
        return budget
    goal = _value_of("--goal", arguments)
    if repeats_goal(name, "" if value.startswith("-") or "=" in value else value, goal):
        return f"--goal {goal} says it already. ", [f"without {option}"]
    other = meant_option(name, value, options, takes_overrides, context.command.name if context else "")
    if other:
        what = "it writes configs of frameworks; a model folder comes from" if "convert" in other[0] else "write"
        return f"{what} {' or '.join(other)}. ", other
    is_field = takes_overrides and api.recipe_key(name) is not None  # --tp is layout.tp, not --top
    near = [] if is_field else closest(option, [flag for flag in options if flag.startswith("--")])
    found = None
    if takes_overrides and (not near or api.is_removed_key(name)):
        recipe = api.recipe_in_line(arguments) if api.is_removed_key(name) else None
        found = api.as_override(name, value, options, recipe)
    if found is not None:
        fix = pasted(found[1], value) if found[1].endswith(f"={value}") else found[1]
        return f"{found[0]}. ", [fix] if fix else []
    if not near:
        command = _same_with(option, context, arguments)
        if command:
            return f"a command of its own does that: {command}. ", [command]
        elsewhere = _commands_with(option, context)
        return f"commands that take it: {', '.join(elsewhere)}. " if elsewhere else "", []
    return f"did you mean {' or '.join(near)}? ", near


def _as_budget(option: str, value: str, context: Any, arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return what trains a token budget: steps, or a command for each of several targets whose steps differ."""
    if context is None:
        return None
    typed = _positional(context, arguments)
    targets = [arguments[at] for at in typed if "=" not in arguments[at]]
    options = [word for at, word in enumerate(arguments) if at and (at not in typed or "=" in word)]
    lines = {one: [arguments[0], one, *options] for one in targets}
    steps = {one: steps_of_tokens(value, api.recipe_in_line(line)) for one, line in lines.items()}
    if len({*steps.values()}) == 1 and all(steps.values()):
        found = next(iter(steps.values()))
        return f"write the steps that train them: {found}. ", [found]
    if len(targets) < 2 or not all(steps.values()):
        return None
    renamed = {"--engines": "--engine", option: "--tokens"}
    commands = [
        shlex.join(["meshwright", "recommend", one, *(renamed.get(word, word) for word in options)]) for one in targets
    ]
    each = ", ".join(f"{one} {text}" for one, text in steps.items())
    return f"they are other numbers of steps, as the batches differ ({each}): plan each with them. ", commands


def _options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by flag."""
    return {flag: one for one in command.params if isinstance(one, click.Option) for flag in one.opts}


def _positional(context: Any, arguments: Sequence[str]) -> list[int]:
    """Return the places of the words of a line that are neither options nor their values, after the command."""
    own = _options_of(context.command)
    places, place = list[int](), 1
    while place < len(arguments):
        flag, equals, _ = arguments[place].partition("=")
        if not flag.startswith("-"):
            places.append(place)
        known = own.get(flag)
        has_value = flag.startswith("-") and not equals and not (known is not None and known.is_flag)
        place += 2 if has_value else 1
    return places


def _same_with(option: str, context: Any, arguments: Sequence[str]) -> str:
    """Return the line with the command that has an option, or that it names in other tools: --dry-run is dryrun.

    It keeps the words and the options that this command has too; empty if there is none.
    """
    name = COMMAND_WORDS.get(option.lstrip("-"), "")
    if context is not None and context.command.name in PLANNING and PLANNING[0] in _commands_with(option, context):
        name = PLANNING[0]
    if context is None or context.parent is None or name in ("", context.command.name):
        return ""
    command = context.parent.command.get_command(context.parent, name)
    if command is None:
        return ""
    kept, place = list[str](), 0
    taken, own = _options_of(command), _options_of(context.command)
    words = arguments[1:]
    while place < len(words):
        flag, equals, _ = words[place].partition("=")
        known = own.get(flag, taken.get(flag)) if flag.startswith("-") else None
        size = 1 if equals or known is None or known.is_flag else 2
        if not flag.startswith("-") or flag in taken:
            kept += words[place : place + size]
        place += size
    return shlex.join(["meshwright", name, *kept])


def _commands_with(option: str, context: Any) -> list[str]:
    """Return other commands that have an option of this name."""
    if context is None or context.parent is None:
        return []
    group = context.parent.command
    commands = {name: group.get_command(context.parent, name) for name in group.list_commands(context.parent)}
    return [name for name, command in commands.items() if any(option in one.opts for one in command.params)]


def _as_argument(option: str, argument: click.Argument, context: Any, arguments: Sequence[str]) -> str:
    """Return the whole command with an option's value as the argument that it is."""
    value = _value_of(option, arguments)
    places = [one.name for one in context.command.params if isinstance(one, click.Argument)]
    before, depth = places.index(argument.name), len(context.command_path.split()) - 1
    kept = _without(arguments, [one for one in _unknown_options(context, arguments) if one != option])
    rest = [word for word in kept if word != option and not word.startswith(f"{option}=")][depth:]
    if value in rest and not any(word.startswith(f"{option}=") for word in arguments):
        rest.remove(value)
    leading = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
    if not value or leading < before:
        return f"{context.command_path} {value or argument.make_metavar(context).strip('[]')}"
    return shlex.join([*context.command_path.split(), *rest[:before], value, *rest[before:]])


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command line without some options and what was typed as their values."""
    found, skips = [], False
    for word in arguments:
        is_option = word.partition("=")[0] in options
        if not is_option and not (skips and not word.startswith("--")):
            found.append(word)
        skips = is_option and "=" not in word
    return found


def _value_of(option: str, arguments: Sequence[str]) -> str:
    """Return the value that was typed for an option; empty if there is none."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        following = arguments[place + 1 : place + 2]
        if word == option and following and not following[0].startswith("--"):
            return following[0]
    return ""
