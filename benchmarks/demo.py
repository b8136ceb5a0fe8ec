"""Demo: recommendations for this machine and example clusters, then a real (tiny) training run."""

from __future__ import annotations

import json
import subprocess
import sys

EXAMPLES = (
    ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--explain"),
    ("recommend", "qwen3-30b-a3b", "--gpus", "4x8xH100", "--goal", "pretrain", "--seq", "32k"),
    ("check", "llama3_8b_pretrain_config", "--gpus", "8xA100-40", "layout.tp=3"),
)
TRAINING = ("train", "qwen3_30b_a3b_pretrain_config", "--tiny", "--nproc", "2", "--json")


def meshwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a meshwright command."""
    return subprocess.run([sys.executable, "-m", "meshwright", *arguments], text=True, capture_output=True, check=False)


def show(arguments: tuple[str, ...]) -> int:
    """Print a command and its output; return its exit code."""
    done = meshwright(*arguments)
    print(f"$ meshwright {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.returncode


def main() -> int:
    """Return 0 if every command has the expected exit code."""
    this_machine = ("recommend", "llama3-8b", "--gpus", "auto", "--goal", "peft")
    print("== this machine ==")
    code = show(this_machine)
    if code == 2:
        print("(no GPU here; a workstation with one RTX 4090 would get this)\n")
        code = show(("recommend", "qwen3-1.7b", "--gpus", "1xRTX4090", "--goal", "peft"))
    print("== example clusters ==")
    codes = [show(arguments) for arguments in EXAMPLES]
    print("== a real training run: the recipe's structure and layout with a tiny model ==")
    fell = train()
    return 0 if code in (0, 1) and codes == [0, 0, 1] and fell else 1


def train() -> bool:
    """Train for a few seconds on two processes; return whether the loss fell."""
    print(f"$ meshwright {' '.join(TRAINING)}")
    done = meshwright(*TRAINING)
    if done.returncode:
        print(done.stdout, done.stderr)
        return False
    run = json.loads(done.stdout)
    losses, layout = run["losses"], run["layout"]
    print(
        f"{run['steps']} steps on {run['ranks']} {run['device']} processes ({layout['strategy']}, ep {layout['ep']}): "
        f"loss {losses[0]:.3f} → {losses[-1]:.3f}, {run['tokens_per_s_per_gpu']:,.0f} tokens/s per process"
    )
    return bool(losses[-1] < 0.95 * losses[0])


if __name__ == "__main__":
    sys.exit(main())
