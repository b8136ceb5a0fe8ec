"""What a job keeps of the other commands of the user's script: its setup; those that it does not keep are listed."""

from __future__ import annotations

import shlex

import msgspec

from meshwright.frameworks.file_import import ImportedFile
from meshwright.frameworks.patch_file import is_of_the_job, variables
from meshwright.frameworks.shell.containers import container_of
from meshwright.frameworks.shell.setup import OtherCommand, SetupLines, setup_lines
from meshwright.frameworks.types import Program
from meshwright.launch.job import Scheduler

NOT_KEPT_BY = {
    "torchrun": "run it in the shell before the command",
    "hosts": "run it on the hosts before the command",
    "kubernetes": "the image has its own environment",
    "skypilot": "the machines have their own environment",
}
LISTED = 8  # commands with a note of their own


class UserSetup(msgspec.Struct, frozen=True):
    """Commands that the job runs before the training, and notes on those that it does not run."""

    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def user_setup(
    source: ImportedFile | None, program: Program, scheduler: Scheduler | None, image: str = ""
) -> UserSetup:
    """Return the setup of the user's script for a job, or without a scheduler for another script.

    Only a SLURM job and a script run it in the same shell as the program.
    """
    script = None if source is None else source.content.script
    if source is None or script is None:
        return UserSetup()
    content, env = source.content, source.settings.parsed.env
    found = setup_lines(
        script, content.text, content.path, content.folder, {*program.env, *variables(env)}, is_of_the_job
    )
    notes = _notes(content.path, found, scheduler)
    reason = NOT_KEPT_BY.get(scheduler or "", "")
    if image and container_of(script) is None:
        reason = reason or "the image has its own environment"
    if not found.kept or not reason:
        lines = sorted(set(found.lines))
        place = f"{lines[0]}-{lines[-1]}" if len(lines) > 1 else f"{lines[0]}" if lines else ""
        return UserSetup((f"# setup of {content.path}:{place}", *found.kept) if found.kept else (), notes)
    lost = "; ".join(" ".join(one.split()) for one in found.kept)
    keep = " (--setup LINE keeps one)" if scheduler in ("slurm", "kubernetes", "skypilot") else ""
    return UserSetup((), (f"not kept: {content.path}:{found.lines[0]} {lost}: {reason}{keep}", *notes))


def _notes(path: str, found: SetupLines, scheduler: Scheduler | None) -> tuple[str, ...]:
    notes = [f"not kept: {path}:{one.line} {one.text}: {_reason(one, scheduler)}" for one in found.others[:LISTED]]
    if more := found.others[LISTED:]:
        notes.append(f"not kept: {len(more)} more commands of {path}, lines {', '.join(str(one.line) for one in more)}")
    return tuple(notes)


def _reason(one: OtherCommand, scheduler: Scheduler | None) -> str:
    name = "job" if scheduler else "training"
    if one.text.startswith("trap "):
        return "the job handles signals itself" if scheduler else "it handles signals of a job"
    if one.after:
        return f"it runs after the training: start it when the {name} has ended"
    if scheduler != "slurm" or one.text.endswith("…"):
        return f"it runs before the training: run it before the {name}"
    return f"it runs before the training; --setup {shlex.quote(one.text)} keeps it"
