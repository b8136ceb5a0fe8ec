"""Generate the page of known error messages from the table that `explain` and `doctor` search."""

from __future__ import annotations

from tables import table

from meshwright.rules import messages

INTRO = """# Error messages

```bash
meshwright explain "CUDA graph accepts only Tensor inputs"   # a message, or a whole traceback
meshwright doctor slurm-4711.out --gpus 4x8xH100             # a log that ends before its first step
```

`explain` compares the text with the messages below, as the frameworks' source writes them, and names what is behind
it: a [rule](rules.md), a finding of the [doctor](doctor.md), or an error of the environment, with cause and fix.
Prefixes of ranks, numbers, paths and line breaks do not matter; part of a message is enough. Several answers are
ranked. A message that is not known is answered with exit code 2 and the nearest ones, never with a guess.

`doctor` does the same for the error that ended a run, with file and line. If the run's recipe is known (from the log's
arguments, or `--recipe` and `--gpus`), the rule's fixes are tried on it, with the degrees that the message states.
"""


def page() -> str:
    """The page."""
    text = INTRO
    repositories: dict[str, list[messages.Message]] = {}
    for one in messages.all_messages():
        repositories.setdefault(one.source.split()[0], []).append(one)
    for repository, found in repositories.items():
        rows = [
            (f"`{one.text.replace('`', '')}`", ", ".join(f"`{id}`" for id in one.ids), one.source.split()[1])
            for one in found
        ]
        text += f"\n## {repository}\n\n" + table(("message", "means", "raised by"), rows)
    errors = [(f"`{name}`", known.cause, "; ".join(known.fix)) for name, known in messages.KNOWN_ERRORS.items()]
    return text + "\n## Errors that no rule describes\n\n" + table(("error", "cause", "fix"), errors)
