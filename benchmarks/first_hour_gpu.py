"""Type a fine-tuning user's first hour on this machine's GPU, and keep what every command printed.

    python benchmarks/first_hour_gpu.py OUT.json [--model qwen3_600m] [--goal qlora] [--tiny]

A folder of the model's real shape with random weights and a chat file are made on the spot. Then: `recommend`, the
training command that it prints with a held-out part, Ctrl-C, the resume command that the run prints, `evaluate`,
`generate`, `convert --merge`. At the end transformers (with peft for adapters) reads the exported folders, and its
logits are compared with those of the merged folder. `--tiny` shrinks the model, for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MESHWRIGHT = (sys.executable, "-m", "meshwright")
SAVED_AND_STOPPED = 75
LIMIT_S = 240
TOPICS = ("invoice", "password", "delivery", "refund", "outage", "contract")
SHRUNK = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512}
ASKED = ("data.seq_length=512", "train.global_batch_size=8", "train.steps=60")
TRAINED = ("data.validation_part=0.1", "train.eval_every=10", "checkpoint.save_every=20")


class Hour:
    """The commands typed so far, with exit code, seconds and the last lines that each printed."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows = out, []  # type: ignore[var-annotated]

    def type(self, words: list[str], interrupt_at: str = "", expected: int = 0) -> str:
        """Run a command and return what it printed; Ctrl-C once a line has `interrupt_at`."""
        began = time.monotonic()
        process = subprocess.Popen(
            [*MESHWRIGHT, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        lines: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if interrupt_at and re.search(interrupt_at, line):
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
        code = process.wait(LIMIT_S)
        row = {
            "command": "meshwright " + shlex.join(words),
            "exit": code,
            "seconds": round(time.monotonic() - began, 1),
            "printed": lines[-25:],
        }
        self.rows.append(row)
        print(f"{code:>3} {row['seconds']:>6} s  {row['command']}", flush=True)
        self.save()
        if code != expected:
            print("\n".join(lines[-40:]), flush=True)
            raise SystemExit(f"exit {code}, expected {expected}")
        return "\n".join(lines)

    def save(self, **more: Any) -> None:
        """Write the rows, where they were run, and `more`."""
        import torch
        import transformers

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": f"one {gpu}, torch {torch.__version__}, transformers {transformers.__version__}",
            "made_by": "python benchmarks/first_hour_gpu.py " + shlex.join(sys.argv[1:]),
            **more,
            "rows": self.rows,
        }
        self.out.write_text(json.dumps(found, indent=1) + "\n")


def write_model(model: str, folder: Path, tiny: bool) -> None:
    """Save a model of the catalogue's shape with random bf16 weights, and a tokenizer with a chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from meshwright.engine.data.byte_level import BYTES, TEMPLATE, write_byte_tokenizer

    catalogue = Path(__file__).resolve().parents[1] / "src/meshwright/models/catalogue.json"
    values = next(entry["config"] for entry in json.loads(catalogue.read_text()) if entry["name"] == model)
    config = AutoConfig.for_model(**(values | (SHRUNK if tiny else {})))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_byte_tokenizer(folder, BYTES, (), TEMPLATE)


def write_chats(path: Path, count: int = 240) -> None:
    """Write support chats; `system` and `tools` are on some rows only."""
    pick = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            topic = pick.choice(TOPICS)
            turns = [
                {"role": "user", "content": f"Question {number} about my {topic}."},
                {"role": "assistant", "content": f"We looked into the {topic} and solved case {number}."},
            ]
            row: dict[str, Any] = {"messages": turns * pick.randint(1, 3)}
            if number % 3 == 0:
                row["messages"] = [{"role": "system", "content": "You answer briefly."}, *row["messages"]]
            if number % 5 == 0:
                row["tools"] = [
                    {"type": "function", "function": {"name": "look_up", "description": "", "parameters": {}}}
                ]
            file.write(json.dumps(row) + "\n")


def logits_compared(merged: Path, base: Path, adapters: Path | None) -> dict[str, float]:
    """Return how far transformers' logits of the exported folders are apart, on one prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = AutoTokenizer.from_pretrained(merged)("We looked into the refund.", return_tensors="pt").input_ids.to(device)

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model.to(device).eval()(ids).logits.float()

    ours = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    first = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    untrained = logits(first)
    found = {"changed_by_training": (ours - untrained).abs().max().item()}
    if adapters is not None:
        from peft import PeftModel

        found["merged_against_peft"] = (ours - logits(PeftModel.from_pretrained(first, adapters))).abs().max().item()
    return found


def main() -> None:
    """Type the commands one after another; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3_600m")
    parser.add_argument("--goal", default="qlora", choices=("sft", "lora", "qlora"))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="first-hour-"))
    base, chats, run = work / "base", work / "chats.jsonl", work / "run"
    write_model(given.model, base, given.tiny)
    write_chats(chats)
    hour = Hour(given.out)
    try:
        gpus = "1xH100" if given.tiny else "auto"
        printed = hour.type(["recommend", str(base), "--gpus", gpus, "--goal", given.goal, *ASKED])
        start = _without(shlex.split(re.findall(r"meshwright +meshwright (train .*)", printed)[0]), "--dataset")
        start += ["--dataset", str(chats), "--out", str(run), *TRAINED]
        if given.tiny:  # compiling takes minutes on a CPU
            start = ["kernels.compile=false" if word == "kernels.compile=true" else word for word in start]
        start += [] if "checkpoint.pretrained" in printed else [f"checkpoint.pretrained={base}"]
        stopped = hour.type(start, interrupt_at=r"step +1\d\b|^ *1\d ", expected=SAVED_AND_STOPPED)
        resume = re.findall(r"meshwright (train .*)$", stopped, re.MULTILINE)
        hour.type(shlex.split(resume[-1]))
        hour.type(["evaluate", str(run)])
        hour.type(["generate", str(run), "Question 7 about my refund.", "--max-tokens", "12"])
        hour.type(["convert", str(run), str(work / "merged"), *(["--merge"] if given.goal != "sft" else [])])
        adapters = work / "adapters" if given.goal != "sft" else None
        if adapters:
            hour.type(["convert", str(run), str(adapters)])
        hour.save(logits=logits_compared(work / "merged", base, adapters))
    except BaseException as error:
        hour.save(failed=str(error))
        raise


def _without(words: list[str], option: str) -> list[str]:
    """Return the words without an option and its value."""
    if option not in words:
        return words
    at = words.index(option)
    return words[:at] + words[at + 2 :]


if __name__ == "__main__":
    main()
