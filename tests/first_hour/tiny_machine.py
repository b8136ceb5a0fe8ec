"""A folder as a user's machine has it: a small base model with its tokenizer, chats, and runs made there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest


def write_base_and_chats(folder: Path) -> None:
    """Write `base`, a tiny Llama with a tokenizer, and `chats.jsonl`."""
    from tests.engine.families import FAMILIES
    from tests.engine.hf_folder import write_tiny_folder
    from tests.engine.tiny_tokenizer import write_tiny_tokenizer

    write_tiny_tokenizer(write_tiny_folder(folder / "base", FAMILIES["llama"] | {"vocab_size": 256}, shards=1))
    rows = [{"prompt": f"what is {i}?", "response": f"{i}, as asked"} for i in range(12)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def type_in(folder: Path, *commands: Sequence[str]) -> None:
    """Type commands in a folder; each must end without an error."""
    from meshwright.cli.run import run

    before = Path.cwd()
    os.chdir(folder)
    try:
        for words in commands:
            with pytest.raises(SystemExit) as ended:
                run([*words])
            assert not ended.value.code
    finally:
        os.chdir(before)
