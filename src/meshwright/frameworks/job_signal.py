"""A signal that a SLURM job gets before its time limit, and that ends it in place of saving a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.types import SourcedValue
from meshwright.rules.rule import Finding

RULE = "launch.signal"
SIGNAL = re.compile(r"(?:(?P<shell>R?BR?):|R:)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<seconds>\d+))?")
SIGNAL_NUMBERS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
SAVES_ON = "TERM"  # the signal that --exit-signal-handler of Megatron-LM handles
HANDLES_NONE = "pretrain_"  # prefix of Megatron-LM's programs, which save on a signal only with that option
SOURCED = re.compile(r"^\s*(?:source|\.)\s[^\n#;&|]*?([^\s\"';&|]+)[\"']?\s*(?:[#;&|].*)?$", re.MULTILINE)
"""A file that a script sources, by the last word of the command."""
SETS_UP = ("activate", "conda.sh", "mamba.sh", "modules.sh", "lmod.sh", "setvars.sh", ".bashrc", ".bash_profile")
"""Files that set up an environment and trap no signal."""
FORWARD = (
    "remove the option, so that the training runs until the time limit; or start the training with & and wait for it, "
    "with a trap that forwards the signal to a program that saves on it"
)


def signal_findings(content: Content, parsed: ParsedConfig) -> Iterator[Finding]:
    """Yield a signal of the SLURM job that ends the batch shell or the ranks in place of saving a checkpoint."""
    option = None if content.script is None else content.script.sbatch.get("signal")
    found = None if option is None or option.unresolved else SIGNAL.fullmatch(str(option.value).upper())
    if option is None or found is None:
        return
    name = SIGNAL_NUMBERS.get(found["name"], found["name"])
    ahead = f"{found['seconds'] or 60} s before the time limit"
    handler = parsed.settings.get("exit_signal_handler")
    is_megatron = handler is not None or parsed.entry.startswith(HANDLES_NONE)
    fix: tuple[str, ...] = (f"#SBATCH --signal={SAVES_ON}@{found['seconds'] or 60}",) if is_megatron else ()
    fix = fix if handler is not None or not fix else ("--exit-signal-handler", *fix)
    if found["shell"] and not _traps(content.text, name):
        text = (
            f"--signal={option.value} ends the batch shell {ahead}, because it has no trap for {name}: "
            "SLURM then kills the ranks after its KillWait, 30 s by default"
        )
        yield _finding(option, text, fix, "" if fix else FORWARD)
    elif not found["shell"] and handler is not None and "exit_signal" not in parsed.settings and name != SAVES_ON:
        text = f"--signal={option.value} ends the ranks {ahead}: --exit-signal-handler saves on SIG{SAVES_ON} only"
        yield _finding(option, text, fix)
    elif not found["shell"] and handler is None and is_megatron and not _traps(content.text, name):
        text = f"--signal={option.value} ends the ranks {ahead}, without a checkpoint: --exit-signal-handler is not set"
        yield _finding(option, text, fix)


def _finding(option: SourcedValue, text: str, fix: tuple[str, ...], no_fix: str = "") -> Finding:
    return Finding(RULE, "warning", "signal", text, fix, file=option.file, line=option.line, no_fix=no_fix)


def _traps(text: str, name: str) -> bool:
    """Return whether a script may handle a signal: by a trap, in a file it sources, or as the program it becomes."""
    numbers = [number for number, one in SIGNAL_NUMBERS.items() if one == name]
    names = "|".join((f"(?:SIG)?{name}", *numbers))
    trap = rf"^[^#\n]*\btrap\b[^\n]*(?<![\w$])(?:{names})\b"
    if re.search(rf"{trap}|^\s*exec\s", text, re.MULTILINE | re.IGNORECASE):
        return True
    return any(PurePath(found[1]).name not in SETS_UP for found in SOURCED.finditer(text))
