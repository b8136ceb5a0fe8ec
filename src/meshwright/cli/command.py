"""Commands from verbs: options from the fields of the request, and running them."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from meshwright import api
from meshwright.api.inputs import Field, Request, choice, fields_of, flags_of, range_of, read
from meshwright.api.verbs import Verb
from meshwright.cli.progress import Interrupted
from meshwright.errors import InputError, MeshwrightError
from meshwright.hub import go_offline
from meshwright.parsing import sequence_length

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
OUT = "out"
offline = click.option("--offline", is_flag=True, help="Download nothing from the Hugging Face hub.")


def examples(*lines: str) -> str:
    """Return the examples at the end of a help page, one per line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class VerbCommand(click.Command):
    """A command whose help page also describes its arguments."""

    def __init__(self, arguments: list[tuple[str, str]], takes_text: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.arguments, self.takes_text = arguments, takes_text

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take several words, or an option of another tool, as one text where the argument is any text."""
        args = self._with_last_argument(ctx, args)
        own = {flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts) if flag[0] == "-"}
        words = [word for word in args if word not in own]
        foreign = [word for word in words if word.startswith("-")]
        if self.takes_text and words and "--" not in words and (len(words) > 1 or foreign):
            if words[0] in foreign:  # --tensor-model-parallel-size 8
                args = [*(word for word in args if word in own), "--", "=".join(words[:2]), *words[2:]]
            elif not foreign:
                args = [*(word for word in args if word in own), "--", " ".join(words)]
        self._refuse_repeated(ctx, args)
        return super().parse_args(ctx, args)

    def _with_last_argument(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the words with --out FOLDER, as other commands take it, as the last argument of one that has none."""
        params = self.get_params(ctx)
        last = [one for one in params if isinstance(one, click.Argument)][-1:]
        if not last or last[0].name != OUT or any(f"--{OUT}" in one.opts for one in params):
            return args
        for place, word in enumerate(args):
            if word == f"--{OUT}" and place + 1 < len(args):
                return [*args[:place], *args[place + 2 :], args[place + 1]]
            if word.startswith(f"--{OUT}="):
                return [*args[:place], *args[place + 1 :], word.partition("=")[2]]
        return args

    def _refuse_repeated(self, ctx: click.Context, args: list[str]) -> None:
        """Raise InputError for an option with one value that was given twice: click would drop the first."""
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        given = [one for one in order if isinstance(one, click.Option) and not one.multiple and not one.is_flag]
        twice = next((one for place, one in enumerate(given) if one in given[:place]), None)
        if twice is None:
            return
        from meshwright.cli.usage_errors import given_twice

        raise given_twice(twice, args, takes_overrides=any(one.name == "overrides" for one in self.params))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, then options."""
        if self.arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(self.arguments)
        super().format_options(ctx, formatter)


def build(verb: Verb) -> click.Command:
    """Return the command of a verb."""
    fields = [field for field in fields_of(verb.request) if "cli" in field.input.surfaces]
    positional = [field for field in fields if field.input.positional]
    positional.sort(key=lambda field: (field.repeated, not field.input.words))
    options = [field for field in fields if not field.input.positional]
    help_text = "\n\n".join(filter(None, (verb.summary, verb.description, verb.exits and f"Exit codes: {verb.exits}.")))
    command = VerbCommand(
        [(field.label, field.input.help) for field in positional],
        takes_text=verb.name == "explain",
        name=verb.name,
        callback=partial(_invoke, verb),
        params=[*(_argument(one) for one in positional if not one.input.words), *map(_option, options)],
        help=help_text,
        short_help=verb.summary,
        epilog=examples(*verb.examples),
    )
    names_models = any(field.input.complete in ("models", "targets") for field in fields)
    return as_json(offline(command) if names_models else command)


def _argument(field: Field) -> click.Argument:
    nargs, metavar = -1 if field.repeated else 1, field.input.metavar
    if metavar and not field.required and not metavar.startswith("["):
        metavar = f"[{metavar}]"
    return click.Argument([field.name], required=False, nargs=nargs, metavar=metavar, shell_complete=_completer(field))


def _option(field: Field) -> click.Option:
    declared = field.input
    shared: dict[str, Any] = {"help": _help(field), "default": field.default}
    if field.types == (bool,):
        if field.default is True:
            shared["flag_value"] = False
        return click.Option([field.flag, field.name], is_flag=True, **shared)
    metavar = declared.metavar or field.name.upper()
    if field.repeated:
        return click.Option([field.flag, field.name], multiple=True, metavar=metavar, help=declared.help)
    shown = field.default is not None
    return click.Option(
        [field.flag, *declared.other_flags, field.name],
        show_default=shown,
        metavar=metavar,
        shell_complete=_completer(field),
        **shared,
    )


def _help(field: Field) -> str:
    limits = range_of(field.input)
    notes = [f"({limits})"] if limits and not limits.startswith("at least") else []
    return " ".join([field.input.help, *notes, *(["[required]"] if field.required else [])])


def _completer(field: Field) -> Callable[[click.Context, click.Parameter, str], list[str | CompletionItem]]:
    """Return what completes a field: its names, and paths where no name starts so, as in a shell without completion."""
    kind, choices = field.input.complete, field.input.choices
    closed = bool(choices) or kind in api.CLOSED_KINDS or str not in field.types

    def complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[str | CompletionItem]:
        names = api.starting_with(kind, typed) if kind else [name for name in choices if name.startswith(typed)]
        return [*names] if names or closed else [CompletionItem(typed, type="file")]

    return complete


def _invoke(verb: Verb, as_json: bool = False, offline: bool = False, **values: Any) -> None:
    """Run a command with the values that click parsed."""
    if offline:
        go_offline()
    from meshwright.cli.runners import RUNNERS, run

    given = {name: value for name, value in values.items() if value not in (None, ())}
    given = _with_words(verb.request, given)
    if any("=" not in word or "." not in word.partition("=")[0] for word in given.get("overrides", ())):
        from meshwright.api.stray_words import accepted_words

        given = accepted_words(verb.name, verb.request, given)
    if verb.name == "recommend":
        if not given.get("model") and given.get("train_model"):  # --model NAME without a file is the model
            given = {**given, "model": given["train_model"], "train_model": None}
        given = _prompt_missing(verb.request, given)
    try:
        request, _ = read(verb.request, given, "cli", strings=True)
    except InputError as error:
        error.fix = (*_models_that_fit(verb, given), *error.fix) or (f"meshwright {verb.name} --help",)
        raise
    if verb.runs:
        gc.enable()  # tensors are held in cycles
    try:
        RUNNERS.get(verb.name, run)(verb, request, as_json)
    except InputError as error:
        raise api.for_options(error, flags_of(verb.request)) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


def _with_words(request: type[Request], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values with words that name recipes or files moved from the overrides to the field that takes them."""
    field = next((one for one in fields_of(request) if one.input.words), None)
    if field is None:
        return given
    tests: dict[str, Callable[[str], bool]] = {
        "Compare": lambda word: api.is_run(word) or api.is_target(word),
        "Check": api.is_checked,
    }
    named = tests.get(request.__name__, api.is_target)
    found = tuple(word for word in given.get("overrides", ()) if "=" not in word and named(word))
    if not found:
        return given
    rest = tuple(word for word in given["overrides"] if word not in found)
    return {**given, "overrides": rest, field.name: found}


def _models_that_fit(verb: Verb, given: dict[str, Any]) -> tuple[str, ...]:
    """Return the command that lists models for the GPUs and goal of a recommendation without a model."""
    if verb.name != "recommend" or given.get("model") or not (given.get("gpus") and given.get("goal")):
        return ()
    return (shlex.join(["meshwright", "models", "--gpus", given["gpus"], "--goal", given["goal"]]),)


def _prompt_missing(request: type[Request], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values; prompt for missing ones on a terminal."""
    missing = [field for field in fields_of(request) if field.required and not given.get(field.name)]
    if any(field.input.needed for field in missing) and given.get("model") and api.is_recipe(given["model"]):
        missing = [field for field in missing if not field.input.needed]  # a recipe or file has them
    if not missing or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return {name: value for name, value in given.items() if name not in [field.name for field in missing]}
    optional = [one for one in fields_of(request) if one.input.prompt and not one.required and one.name not in given]
    asked = {field.name: _prompt(field) for field in [*missing, *optional]}
    return given | {name: value for name, value in asked.items() if value}


def _prompt(field: Field) -> str:
    """Ask until the value is valid; print each error with its did-you-mean."""
    parsers: dict[str, Callable[[str], object]] = {
        "models": api.find_model,
        "clusters": api.cluster,
        "seq": sequence_length,
    }
    parse = parsers.get(field.input.complete or field.name)
    optional: dict[str, Any] = {} if field.required else {"default": "", "show_default": False}
    while True:
        value = str(click.prompt(field.input.prompt, **optional))
        if not value and not field.required:
            return ""
        try:
            if parse is not None:
                parse(value)
            else:
                choice(field, value.strip())
        except MeshwrightError as error:
            click.echo(f"  {error.message}", err=True)
        else:
            return value
