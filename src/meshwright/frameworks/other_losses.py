"""Losses of preferences and rewards that other trainers have and ours does not: how their files name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

LOSSES = ("dpo", "ipo", "kto", "orpo", "cpo", "bco", "grpo", "gdpo", "rloo", "ppo", "gkd", "nash_md", "online_dpo",
    "xpo", "simpo", "ebft")  # fmt: skip
"""Losses that are not computed from the tokens of samples, as trainers spell them."""
REWARD_MODEL = "a reward model"
NAMES = {"simpo": "SimPO", "rm": REWARD_MODEL, "reward": REWARD_MODEL, "online_dpo": "online DPO"}
PREFERENCE_LOSSES = ("hinge", "ipo", "kto_pair", "orpo", "simpo")  # of LLaMA-Factory's pref_loss besides DPO's sigmoid
STAGES = ("dpo", "kto", "ppo", "rm")  # of LLaMA-Factory
SWIFT_DEFAULT = "dpo"  # loss of `swift rlhf` without --rlhf_type
NOT_PLANNED = (
    "losses of preferences or rewards are neither read nor planned; the fix plans supervised fine-tuning of the same "
    "model: add the memory of a reference or reward model, and the time of generated answers"
)


class OtherLoss(msgspec.Struct, frozen=True):
    """A loss that is not supported, and the setting that chooses it."""

    title: str
    setting: str

    @property
    def trains(self) -> str:
        """What a run with it does, as part of a sentence."""
        return trains(self.title)

    def note(self) -> str:
        """Return why the memory of a checked file is not estimated."""
        return f"{self.setting}: it {self.trains}, which is not supported (only supervised fine-tuning is)"


def trains(title: str, library: str = "") -> str:
    """Return what a run with a loss does, as part of a sentence."""
    if title == REWARD_MODEL:
        return f"trains {title} with {library}" if library else f"trains {title}"
    return f"trains with {library}'s {title}" if library else f"trains with {title}"


def title_of(loss: str) -> str:
    """Return a loss as people write it."""
    plain = loss.lower()
    return NAMES.get(plain, plain.upper().replace("_", "-"))


def loss_of(values: Mapping[str, Any], command: str = "") -> OtherLoss | None:
    """Return the loss that settings of LLaMA-Factory, Axolotl, ms-swift or a command choose; None for others."""
    stage = _text(values, "stage")
    if stage in STAGES:
        preference = _text(values, "pref_loss")
        if stage == "dpo" and preference in PREFERENCE_LOSSES:
            return OtherLoss(title_of(preference), f"stage: dpo, pref_loss: {preference}")
        return OtherLoss(title_of(stage), f"stage: {stage}")
    for key in ("rl", "rlhf_type"):
        if found := _text(values, key):
            return OtherLoss(title_of(found), f"{key}: {found}")
    for key in ("reward_model", "process_reward_model"):
        if _text(values, key) == "true":
            return OtherLoss(REWARD_MODEL, f"{key}: true")
    if command == "rlhf":
        return OtherLoss(title_of(SWIFT_DEFAULT), f"rlhf, by default {SWIFT_DEFAULT}")
    return OtherLoss(title_of(command), command) if command in (*LOSSES, "reward") else None


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return "" if value in (None, "", False) else str(value).lower()
