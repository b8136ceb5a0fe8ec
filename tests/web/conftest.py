"""The application in this process, and the command line beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from meshwright.cli.run import run
from meshwright.web.app import Settings, create_app


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    """A browser at the page; questions are answered in this process."""
    with TestClient(create_app(Settings(workers=0)), base_url="http://127.0.0.1") as opened:
        yield opened


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The JSON object of `meshwright WORDS… --json`."""

    def call(*words: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            run([*words, "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


class Opened:
    """Files that this process opens while it is watched; Python cannot take such a watch away, so it is switched."""

    def __init__(self) -> None:
        self.on, self.paths = False, list[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and (event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str | bytes)):
            self.paths.append(str(args[0]))
        elif self.on and event in ("subprocess.Popen", "os.system", "socket.connect"):
            self.paths.append(event)

    def __enter__(self) -> Opened:
        self.on, self.paths = True, []
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False


@pytest.fixture(scope="session")
def opened() -> Opened:
    """What is opened meanwhile: `with opened: …; opened.paths`."""
    return Opened()
