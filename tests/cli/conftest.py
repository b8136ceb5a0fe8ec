"""Running the command line as a user does, in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.cli.run import run


@dataclass(frozen=True)
class Answer:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        assert next(iter(found)) == "schema"
        assert found["schema"] == "meshwright/2"
        return found


@pytest.fixture
def meshwright(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs `meshwright WORDS…`."""

    def call(*words: str) -> Answer:
        with pytest.raises(SystemExit) as ended:
            run(list(words))
        captured = capsys.readouterr()
        return Answer(int(ended.value.code or 0), captured.out, captured.err)

    return call
