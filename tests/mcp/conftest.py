"""The tools asked as an agent asks them, and the command line beside them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import anyio
import jsonschema
import pytest
from mcp import Client, StdioServerParameters
from tests.cli.conftest import meshwright  # noqa: F401  # a fixture

SOURCE = str(Path(__file__).parents[2] / "src")
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])}
COMMAND = ("-m", "meshwright", "mcp")
LIMIT_S = 120


@pytest.fixture(scope="session", autouse=True)
def schemas_checked_once() -> Iterator[None]:
    """Check every schema once: each client checks those of the tools that it calls, which takes longer than a call."""
    checker, checked = jsonschema.Draft202012Validator, set[str]()
    check = checker.check_schema

    def once(schema: Any, *arguments: Any, **options: Any) -> None:
        text = json.dumps(schema, sort_keys=True)
        if text not in checked:
            check(schema, *arguments, **options)
            checked.add(text)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checker, "check_schema", once)
        yield


class Call(NamedTuple):
    """A tool and its arguments."""

    tool: str
    arguments: Mapping[str, Any]


async def asked(server: Any, calls: Mapping[str, Call]) -> tuple[Any, dict[str, Any]]:
    """The tools that a server lists, and its answers to some calls."""
    with anyio.fail_after(LIMIT_S):
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            return tools, {
                name: await client.call_tool(call.tool, dict(call.arguments)) for name, call in calls.items()
            }


def over_stdio(calls: Mapping[str, Call], folder: Path) -> tuple[Any, dict[str, Any]]:
    """Calls answered by `meshwright mcp` in a process of its own."""
    server = StdioServerParameters(command=sys.executable, args=list(COMMAND), env=ENV, cwd=folder)
    return anyio.run(asked, server, calls)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where a `meshwright mcp --http` of its own listens."""
    words = [sys.executable, *COMMAND, "--http", "--port", "0", "--allow-host", "box.example"]
    with Popen(words, env=ENV, stdout=PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
