"""The estimate of an adapted model counts the adapters that the engine builds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.each import each

GIB = 2**30
LLAMA3_8B_RANK_8 = 20_971_520  # adapters on q, k, v, o, gate, up and down of 32 layers, as peft prints them
LLAMA3_8B_OUTPUTS = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
MOONLIGHT_16B_OPTIMIZER = 0.002781  # of the dry run: latent attention, shared experts, 8 ranks


def test_an_estimate_counts_one_adapter_per_projection(meshwright: Any) -> None:
    @each(
        ("words", "part", "expected"),
        [
            (("llama3_8b_peft_config",), "gradients", 4 * LLAMA3_8B_RANK_8 / GIB),
            (("llama3_8b_peft_config",), "optimizer", 8 * LLAMA3_8B_RANK_8 / GIB),
            (
                ("llama3_8b_peft_config", "peft.method=dora"),
                "gradients",
                4 * (LLAMA3_8B_RANK_8 + LLAMA3_8B_OUTPUTS) / GIB,
            ),
            (("moonlight_16b_peft_config",), "optimizer", MOONLIGHT_16B_OPTIMIZER),
        ],
    )
    def counted(words: tuple[str, ...], part: str, expected: float) -> None:
        answer = meshwright("estimate", *words, "--json")
        assert answer.json["estimate"]["memory_gib"][part] == pytest.approx(expected, rel=1e-3)

    counted()
