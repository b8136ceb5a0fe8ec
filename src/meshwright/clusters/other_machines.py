"""Machines that people name in place of GPUs that are planned, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.clusters.catalogue import gpus

PLANNED = "plans are for NVIDIA and AMD GPUs"
HERE = "meshwright train RECIPE --tiny tries a small model on this machine's CPU"
EXAMPLES = ("8xH100", "4x8xH100")
SAME_MEMORY = 0.1
LISTED = 4
_MEMORY = re.compile(r"(?:(?P<count>[0-9]+) ?x ?)?(?P<memory>[0-9]{1,3}) ?gi?b(?: of)?(?: v?ram| memory)?")
_MACHINES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"(?:^|(?<=[ x0-9]))cpus?(?: only)?$", f"plans are for GPUs; {HERE}", EXAMPLES),
    (r"\b(?:mac\w*|apple.*|mps|metal)\b|(?:^|(?<=[ x]))m[1-5](?: (?:pro|max|ultra))?$",
     f"{PLANNED}; Apple's are not among them; {HERE}", EXAMPLES),
    (r"(?:^|(?<=[ x0-9]))(?:tpu|ironwood|trillium)", f"{PLANNED}; TPUs are not among them", EXAMPLES),
    (r"(?:^|(?<=[ x0-9]))(?:gaudi|hpu|trn|trainium|inferentia|ascend|npu|arc |xpu|max 1[15]50|cerebras|wse)",
     f"{PLANNED}; other accelerators are not among them", EXAMPLES),
    (r"(?:^|(?<=[ x]))(?:p(?:4|6|40|100)|k[468]0|m(?:4|40|60))(?= |$)|\bg?tx ?(?:9|10)[0-9]0|titan ?xp?\b",
     "GPUs before Turing, except the V100, have no tensor cores and are not planned", ("1xT4", "1xV100-16")),
    (r"\bgtx ?16[0-9]0", "GTX 16 cards have no tensor cores and are not planned", ("1xT4", "1xRTX3060")),
    (r"titan ?rtx|quadro ?rtx", "Turing cards of workstations are not in the catalogue; a cluster file describes one",
     ('a cluster file: gpu = "RTX2080-Ti", gpus_per_node = 1, memory_gib = 24 or 48',)),
    (r"dgx spark|\bgb10\b|(?<=x)gb10\b|jetson|strix|ryzen ai",
     "machines whose GPU shares the memory of its CPU are not in the catalogue; a cluster file with a [gpu] table "
     "describes one", ("meshwright explain cluster_file",)),
    (r"laptop|mobile|max-?q", "a laptop's card has less memory and power than the card of its name",
     ('a cluster file: gpu = "RTX4090", gpus_per_node = 1, memory_gib = 16 (docs/plan.md)',)),
    (r"\bcolab\b", "Colab gives one of several GPUs; nvidia-smi there says which", ("1xT4", "1xL4", "1xA100-40")),
    (r"\bkaggle\b", "Kaggle gives one of several GPUs; nvidia-smi there says which", ("2xT4", "1xT4")),
)  # fmt: skip


def instead_of(plain: str) -> tuple[str, tuple[str, ...]] | None:
    """Return why a text in lower case names no GPU, and what to write; None if it is no machine known here."""
    for pattern, reason, fixes in _MACHINES:
        if re.search(pattern, plain):
            return reason, fixes
    sized = _MEMORY.fullmatch(plain)
    if sized is None:
        return None
    near = [f"{sized['count'] or 1}x{name}" for name in _of_memory(int(sized["memory"]))][:LISTED]
    return "the memory alone does not say how fast a GPU is; name it", tuple(near) or EXAMPLES


def _of_memory(gib: int) -> Iterator[str]:
    """Yield the GPUs of about this memory, cards for one's own machine first."""
    found = [one for one in gpus() if abs(one.memory_gib / gib - 1) <= SAME_MEMORY]
    yield from sorted((one.name for one in found), key=lambda name: not name.startswith("RTX"))
