"""Datasets of the hub with short names: columns, validation split and, from their cards, how much they contain."""

from __future__ import annotations

import msgspec


class RegisteredDataset(msgspec.Struct, frozen=True):
    """A hub dataset with a short name."""

    hub_id: str
    config: str = ""
    columns: dict[str, str] = {}
    held_out: str = ""  # default validation split
    samples: int = 0  # of the train split, as the dataset's card publishes them; 0 if it does not
    text_bytes: int = 0  # of the same


TULU = RegisteredDataset(
    "allenai/tulu-3-sft-mixture", columns={"messages": "messages"}, samples=939_343, text_bytes=2_914_250_827
)
SQUAD = RegisteredDataset(
    "rajpurkar/squad",
    columns={"context": "context", "prompt": "question", "response": "answers"},
    held_out="validation",
    samples=87_599,
    text_bytes=79_317_110,
)
OPEN_MATH = RegisteredDataset(
    "nvidia/OpenMathInstruct-2",
    columns={"prompt": "problem", "response": "generated_solution"},
    samples=13_972_791,
    text_bytes=15_558_412_976,
)
REGISTRY: dict[str, RegisteredDataset] = {
    "squad": SQUAD,
    "llm-finetune": SQUAD,
    "tulu3": TULU,
    "openmathinstruct2": OPEN_MATH,
    "openmathinstruct2-thinking": OPEN_MATH,
    "gsm8k": RegisteredDataset(
        "openai/gsm8k", "main", {"prompt": "question", "response": "answer"}, "test", 7_473, 3_963_202
    ),
    "cord-v2": RegisteredDataset("naver-clova-ix/cord-v2", held_out="validation", samples=800),
    "medpix": RegisteredDataset(
        "mmoukouba/MedPix-VQA", columns={"images": "image_id", "prompt": "question", "response": "answer"}
    ),
    "rdr": RegisteredDataset("quintend/rdr-items"),
    "wikitext": RegisteredDataset(
        "Salesforce/wikitext", "wikitext-103-raw-v1", {"text": "text"}, "validation", 1_801_350, 546_500_949
    ),
}


def registered_dataset(name: str) -> RegisteredDataset | None:
    """Return the registered dataset with a short name or a hub id; None if there is none."""
    return REGISTRY.get(name) or next((one for one in REGISTRY.values() if one.hub_id == name), None)
