"""The samples that the engine opens for a recipe, as comparable values, and small files to open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokenizer import write_tiny_tokenizer

from meshwright.engine.data.open_dataset import open_dataset
from meshwright.recipes.types import Recipe

VOCAB = 512
STEPS = 4


def write_files(folder: Path) -> dict[str, str]:
    """Write small datasets, a chat template and a tokenizer; return their paths by name."""
    answers = [f"answer {n} " * (n % 5 + 1) for n in range(16)]
    chats = [
        {"messages": [turn for text in (answer, f"more of {n}") for turn in _turns(f"question {n}", text)]}
        for n, answer in enumerate(answers)
    ]
    pairs = [{"prompt": f"q{n}", "response": f"a{n}", "other": f"b{n}"} for n in range(16)]
    text = "\n\n".join(f"first line of {n}\nsecond line of {n}" for n in range(40))
    ruled = [{"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]} for row in chats]
    split = folder / "split"
    split.mkdir()
    files = {"chats": chats, "ruled": ruled, "pairs": pairs, "split/train": chats[:8], "split/test": chats[8:]}
    for path, rows in files.items():
        (folder / f"{path}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "text.txt").write_text(text)
    (folder / "template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    write_tiny_tokenizer(folder / "tokenizer", 300)
    names = ("tokenizer", "chats.jsonl", "ruled.jsonl", "pairs.jsonl", "text.txt", "template.jinja", "split")
    return {name.partition(".")[0]: str(folder / name) for name in names}


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def samples_of(recipe: Recipe, held_out: bool) -> Any:
    """Return the kind of source that a recipe opens and the samples of its first steps."""
    source = open_dataset(recipe, VOCAB, held_out, None)
    batch = recipe.train.global_batch_size
    steps = [source.samples(range(step * batch, (step + 1) * batch)) for step in range(STEPS)]
    return [type(source).__name__, *((one.tokens.tolist(), one.loss_mask.tolist(), _listed(one)) for one in steps)]


def _listed(samples: Any) -> Any:
    return None if samples.documents is None else samples.documents.tolist()
