"""Generate the page on agents: what tools answer to the calls that language models make."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from agent_questions import QUESTIONS, SCRIPT, Question
from tables import table

from meshwright.mcp.executor import Reply, reply
from meshwright.mcp.tools import TOOLS

TEXT = """# Coding agents

```json
{"mcpServers": {"meshwright": {"command": "meshwright", "args": ["mcp"]}}}
```

`meshwright mcp` serves the commands as tools on standard input and output; `--http` serves them on a port. Every answer
has a few lines of text and a structured object: figures with their bands, what was assumed, how arguments were
understood (`notes`), and `next`, the calls that are likely to follow, ready to send. A `plan` of five layouts takes
under 1,500 tokens, text and object together. On standard input and output a model, recipe, config, script or log may be
a path on this machine; over HTTP files are sent as text. Nothing is run and nothing is written.

Arguments are understood in the forms that language models send: numbers as strings, camelCase names, null and empty
values, one value in a list, `gpus` and `gpu` apart, overrides as an object or as one string, a config as an object, ids
of quantized checkpoints and addresses of the hub. What could mean two things is refused with the exact form.

"""


def answered(question: Question) -> Reply:
    """Return the answer to a question, where train.sh is the script."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("train.sh").write_text(SCRIPT)
            return reply(question.tool, question.arguments, files=True)
        finally:
            os.chdir(before)


def figure(answer: object, path: str) -> object:
    """Return a value of a structured answer by its path; -NAME is the row of the GPU count that NAME has."""
    found: object = answer
    for key in path.split("."):
        if isinstance(found, list) and key.startswith("-"):
            found = next(one for one in found if one["gpus"] == answer[key[1:]])  # type: ignore[index]  # JSON
        else:
            found = found[int(key) if isinstance(found, list) else key]  # type: ignore[index]  # JSON
    return found


def page() -> str:
    """Return the page."""
    rows = []
    for one in QUESTIONS:
        found = answered(one)
        arguments = json.dumps(one.arguments)
        shown = arguments if len(arguments) < 160 else f"{arguments[:150]}…"
        outcome = f"refused; fix: `{found.answer['error']['fix'][0]}`" if found.failed else _value(one, found)
        rows.append((one.text, f"`{one.tool} {shown}`", outcome))
    tools = [(f"`{tool.name}`", tool.summary) for tool in TOOLS.values()]
    text = TEXT + "## Tools\n\n" + table(("tool", "what it does"), tools) + f"\n## {len(QUESTIONS)} questions\n\n"
    text += "Tests send every call through `meshwright mcp` and compare its answer with the Python API.\n\n"
    return text + table(("question", "call as sent", "answer"), rows)


def _value(question: Question, found: Reply) -> str:
    value = figure(found.answer, question.path)
    return f"{question.path.replace('.-', ' at ').replace('.0.', ' 1: ')} = {value}"
