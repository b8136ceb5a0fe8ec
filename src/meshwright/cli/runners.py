"""How commands run: most print their response; a few show progress, watch a job or write text."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
import msgspec

from meshwright import api
from meshwright.api.verbs import Verb
from meshwright.cli.answer import FAILED, decide, emit, end
from meshwright.cli.progress import SHOWN_AFTER_S, progress_line, waiting_line
from meshwright.errors import InputError
from meshwright.version import SCHEMA

RUN_FAILED = 3
COMPLETED = "COMPLETED"
DEFAULT_FORMAT = "toml"
PRINTING = ("generate",)
"""Commands that print while they run."""
LOADS_TORCH = ("convert", "evaluate")
"""Commands that import torch and transformers first, which takes up to a minute on a busy machine."""
REPORTS = {"import": "import_file"}
"""Reports whose verb is a keyword of Python."""


def run(verb: Verb, request: Any, as_json: bool) -> None:
    """Run a verb and print its response."""
    plot = getattr(request, "plot", None)
    if plot:
        from meshwright.cli import plots

        plots.require(plot)
    if verb.name in ("dryrun", "rehearse"):
        with progress_line() as progress:
            request = msgspec.structs.replace(request, progress=progress)
            result = verb.handle(request)
    elif verb.name in PRINTING:
        result = verb.handle(request)
    else:
        late = {"logged_after_s": SHOWN_AFTER_S} if verb.name in LOADS_TORCH else {}
        with waiting_line(f"{verb.name} {_about(request)}".strip(), **late):
            result = verb.handle(request)
    response = verb.respond(result, request)
    if plot:
        getattr(plots, verb.name)(result, api.to_json(response), plot)
    decide(0 if response.ok else FAILED)
    _print(verb, response, result, as_json)
    end(response.ok)


def _about(request: Any) -> str:
    """Return the model, recipe or file that a request names; empty without one."""
    found = (getattr(request, name, None) for name in ("model", "target", "recipe", "source", "file", "run"))
    return next((one for one in found if isinstance(one, str)), "")


def _print(verb: Verb, response: msgspec.Struct, result: Any, as_json: bool) -> None:
    answer = api.to_json(response)
    if as_json:
        emit(answer)
        return
    from meshwright.cli.reports import report

    report(REPORTS.get(verb.name, verb.name))(answer, result)


def recommend(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the plan, then its dry run if requested."""
    if request.dry_run:
        api.require_own_engine(request.engine or api.ENGINES[0])
    with waiting_line(f"{verb.name} {_about(request)}"):
        plan = verb.handle(request)
        response = verb.respond(plan, request)
    decide(0 if response.ok else FAILED)
    if not as_json:
        _print(verb, response, plan, as_json)
    if request.dry_run:
        response = msgspec.structs.replace(response, dry_run=_dry_run(plan))
        if not as_json:
            from meshwright.cli import dryrun_report

            dryrun_report.section(response.dry_run)
    if as_json:
        _print(verb, response, plan, as_json)
    end(response.ok)


def check(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the findings of every target; the exit code is the worst."""
    from meshwright.cli import check_command

    check_command.check(verb, request, as_json)


def _dry_run(plan: Any) -> dict[str, Any] | None:
    """Return the dry run of a plan; None if the layout cannot be built."""
    if not plan.exists:
        return None
    with progress_line() as progress:
        return api.to_json(api.dryrun_response(api.dryrun_plan(plan, progress=progress), brief=True))


def train(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the response on rank 0; the other ranks of torchrun and SLURM print nothing."""
    done = verb.handle(msgspec.structs.replace(request, json=as_json, command=command_line()))
    if done.outcome is not None:
        _print(verb, verb.respond(done, request), done, as_json)


def command_line() -> tuple[str, ...]:
    """Return the command line of this process as the user can type it again."""
    as_module = Path(sys.argv[0]).name == "__main__.py"
    return (*(("python", "-m", "meshwright") if as_module else ("meshwright",)), *sys.argv[1:])


def launch(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the job, then follow it if requested."""
    if request.watch and not request.submit:
        raise InputError("needs --submit", field="--watch", fix=("--submit --watch",))
    with waiting_line(f"launch {_about(request)}".strip()):
        started = verb.handle(request)
    if not as_json:
        _show_job(api.to_json(verb.respond(started, request)))
    if request.watch and started.number is not None:
        started = _watched(started, as_json)
    if as_json:
        emit(api.to_json(verb.respond(started, request)))
    if started.final_state is not None and started.final_state.state != COMPLETED:
        click.get_current_context().exit(RUN_FAILED)


def _show_job(answer: dict[str, Any]) -> None:
    """Print the files and commands of a job as they are, or where they were written."""
    assumed = [f"assumed: {one['message']}" for one in answer["assumed"]]
    for line in (*answer["notes"], *assumed, *(f"{one['severity']}: {one['message']}" for one in answer["findings"])):
        click.echo(f"# {line}", err=True)
    for path in answer["written"]:
        click.echo(f"wrote {path}", err=True)
    if answer["submitted"] is not None:
        click.echo(f"submitted job {answer['submitted']['id']}")
        return
    for name, text in {} if answer["written"] else answer["files"].items():
        click.echo(f"# {name}\n{text}" if len(answer["files"]) > 1 else text, nl=False)
    if answer["written"] or not answer["files"] or answer["scheduler"] in ("torchrun", "hosts"):
        for host, command in zip_longest(answer["hosts"], answer["commands"]):
            click.echo(f"# on {host}\n{command}" if host else command)


def _watched(started: Any, as_json: bool) -> Any:
    """Follow a job to its end; Ctrl-C ends the watching, not the job."""
    gc.enable()  # this may last for days

    def log_state(line: str) -> None:
        click.echo(line, err=True)

    try:
        return api.watch(started, log_state, lambda line: click.echo(line, err=as_json))
    except KeyboardInterrupt:
        log_state(f"job {started.number} keeps running; cancel it with: scancel {started.number}")
        raise


def recipes(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the index; point to throughput recipes if only those match."""
    found = verb.handle(request)
    _print(verb, verb.respond(found, request), found, as_json)
    if not found and not request.benchmark:
        elsewhere = verb.handle(msgspec.structs.replace(request, benchmark=True))
        if elsewhere:
            click.echo(f"{len(elsewhere)} throughput recipes match: add --benchmark", err=True)
    end(bool(found))


def recipe(verb: Verb, request: Any, as_json: bool) -> None:
    """Print a recipe as JSON or as text."""
    found = verb.handle(request)
    if as_json:
        emit(api.to_json(verb.respond(found, request)))
    else:
        click.echo(api.recipe_text(found, request.format or DEFAULT_FORMAT))


def calibrate(verb: Verb, request: Any, as_json: bool) -> None:
    """Print profiles as JSON, or as TOML if they are not written to a file; then what the fit improved."""
    if request.template:
        _template(as_json)
        return
    with waiting_line("calibrate"):
        profiles = verb.handle(request)
    if as_json:
        emit(api.to_json(verb.respond(profiles, request)))
    elif request.out:
        click.echo(f"wrote {request.out}")
        for line in verb.respond(profiles, request).notes:
            click.echo(line)
    else:
        click.echo("\n".join(api.profile_text(profile) for profile in profiles))
        click.echo(f"# {verb.respond(profiles, request).notes[-1]}")


def accuracy(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the error of the cost model, or a table for your own runs."""
    if request.template:
        _template(as_json)
    else:
        run(verb, request, as_json)


def _template(as_json: bool) -> None:
    text = api.runs_template()
    if as_json:
        emit({"schema": SCHEMA, "template": text})
    else:
        click.echo(text, nl=False)


RUNNERS: dict[str, Callable[[Verb, Any, bool], None]] = {
    "recommend": recommend,
    "check": check,
    "train": train,
    "bench": train,
    "launch": launch,
    "recipes": recipes,
    "recipe": recipe,
    "accuracy": accuracy,
    "calibrate": calibrate,
}
"""Commands that do more than print a response."""
