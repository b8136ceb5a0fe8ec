"""Names that users choose from. Kept apart from the packages that implement them, so that reading options is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Goal = Literal["pretrain", "sft", "peft"]
Engine = Literal["meshwright", "megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"]
Framework = Literal[
    "megatron-lm", "megatron-bridge", "automodel", "torchtitan", "kempnerforge", "deepspeed", "accelerate"
]
Scheduler = Literal["torchrun", "slurm", "hosts", "kubernetes", "skypilot"]
RecipeFormat = Literal["toml", "yaml", "json", "python"]
Backend = Literal["auto", "nccl", "gloo"]

GOALS: tuple[Goal, ...] = get_args(Goal)
ENGINES: tuple[Engine, ...] = get_args(Engine)
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
FRONT_ENDS = ("axolotl", "llama-factory", "ms-swift", "trl")  # whose files are checked, and nothing is exported to
CHECKED_ONLY = ("megatron-deepspeed",)  # frameworks whose files are read, and nothing is exported to
CLOSED_KINDS = ("goals", "engines", "frameworks")
"""Kinds of completed names that are all there are; the others accept a file too."""
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)
FORMATS: tuple[RecipeFormat, ...] = get_args(RecipeFormat)
REPORT_FORMATS = ("text", "json", "sarif", "github")
FAIL_ON = ("error", "warning", "never")


LORA_KINDS = ("peft.method=rslora", "peft.method=dora", "peft.method=qlora", "peft.method=lora8bit")


class Synonym(NamedTuple):
    """What another word for a choice means here; `overrides` are the recipe fields that belong to it.

    `{weights}` in an override is the folder or hub id of the weights of the requested model.
    """

    value: str
    meaning: str
    overrides: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()  # other overrides that name a kind of it, so that they do not contradict it


_PRETRAIN = Synonym("pretrain", "train all weights on plain text")
_CONTINUED = Synonym(
    "pretrain",
    "train all weights on plain text, starting from the model's existing weights",
    ("checkpoint.pretrained={weights}",),
)
_CONTINUED_WORDS = ("continued", "continual", "continue", "continuous", "further", "domain-adaptive")
_SFT = Synonym("sft", "train all weights on prompts and answers; lora and qlora train adapters, in less memory")
_PEFT = Synonym("peft", "train adapters; the model's weights stay frozen")
_MEGATRON = Synonym("megatron", "Megatron-Core, which Megatron-LM and Megatron-Bridge both run on")
_AUTOMODEL = Synonym("automodel", "NeMo AutoModel")
_FSDP1 = Synonym("fsdp1", "PyTorch's FSDP1, as Accelerate and the transformers Trainer use it")
_BRIDGE = Synonym("megatron-bridge", "Megatron-Bridge")
_ACCELERATE = Synonym("accelerate", "an Accelerate config, which the transformers Trainer and TRL also read")

# Keys are compared without case, spaces and punctuation.
SYNONYMS: Mapping[str, Mapping[str, Synonym]] = {
    "goal": {
        **dict.fromkeys(("pretraining", "from-scratch", "scratch"), _PRETRAIN),
        **dict.fromkeys((f"{first}-pretrain{end}" for first in _CONTINUED_WORDS for end in ("ing", "")), _CONTINUED),
        **dict.fromkeys(("cpt", "dapt", "mid-training", "mid-train"), _CONTINUED),
        **dict.fromkeys(("full", "fine-tune", "fine-tuning", "full-fine-tune", "full-fine-tuning", "fft", "ft"), _SFT),
        **dict.fromkeys(("full-sft", "sft-full", "full-parameter", "full-parameter-fine-tuning", "full-tuning"), _SFT),
        **dict.fromkeys(
            ("supervised-fine-tuning", "supervised", "instruct", "instruction-tuning", "instruction", "chat"), _SFT
        ),
        **dict.fromkeys(("adapter", "adapters", "adapter-tuning", "parameter-efficient"), _PEFT),
        "lora": Synonym(
            "peft", "train LoRA adapters; the model's weights stay frozen", ("peft.method=lora",), LORA_KINDS
        ),
        "qlora": Synonym(
            "peft", "train LoRA adapters on frozen weights stored in 4 bits (NF4)", ("peft.method=qlora",)
        ),
        "dora": Synonym("peft", "train DoRA adapters; the model's weights stay frozen", ("peft.method=dora",)),
        "rslora": Synonym("peft", "train rank-stabilized LoRA adapters; weights stay frozen", ("peft.method=rslora",)),
    },
    "engine": {
        **dict.fromkeys(("megatron-bridge", "megatron-lm", "megatron-core", "mcore", "bridge"), _MEGATRON),
        **dict.fromkeys(("nemo-automodel", "nemo-auto-model"), _AUTOMODEL),
        **dict.fromkeys(("hf", "huggingface", "transformers", "trainer", "trl", "accelerate"), _FSDP1),
        "titan": Synonym("torchtitan", "torchtitan"),
        "kempner": Synonym("kempnerforge", "KempnerForge"),
        **dict.fromkeys(("zero", "zero-2", "zero-3", "ds"), Synonym("deepspeed", "DeepSpeed ZeRO")),
    },
    "framework": {
        **dict.fromkeys(("bridge", "nemo-bridge"), _BRIDGE),
        **dict.fromkeys(
            ("megatron-core", "mcore"), Synonym("megatron-lm", "Megatron-LM, the scripts of Megatron-Core")
        ),
        "nemo-automodel": _AUTOMODEL,
        **dict.fromkeys(("hf", "huggingface", "transformers", "trainer", "trl"), _ACCELERATE),
        "titan": Synonym("torchtitan", "torchtitan"),
        "kempner": Synonym("kempnerforge", "KempnerForge"),
        **dict.fromkeys(("ds", "zero"), Synonym("deepspeed", "a DeepSpeed config")),
    },
    "dtype": {
        **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf"), Synonym("bf16", "bfloat16")),
        **dict.fromkeys(("float16", "half", "torch.float16", "torch.half"), Synonym("fp16", "16-bit floating point")),
        **dict.fromkeys(("float32", "float", "torch.float32", "full"), Synonym("fp32", "32-bit floating point")),
    },
    "scheduler": {
        **dict.fromkeys(("sbatch", "srun"), Synonym("slurm", "a SLURM batch script")),
        **dict.fromkeys(("k8s", "kube"), Synonym("kubernetes", "a Kubernetes job")),
        "sky": Synonym("skypilot", "a SkyPilot task"),
        **dict.fromkeys(("local", "torch"), Synonym("torchrun", "one torchrun command per node")),
        "ssh": Synonym("hosts", "one command per named host"),
    },
}
"""Words that the field uses for our choices, by kind of choice."""

_LOSSES = (
    "our engine trains with next-token or denoising losses only, not with preferences, rewards or a teacher: TRL, "
    "Axolotl, LLaMA-Factory and verl do, from a model that sft or peft trained here (meshwright convert RUN OUT "
    "--merge)"
)
UNSUPPORTED: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "goal": dict.fromkeys(
        ("dpo", "rlhf", "rl", "ppo", "grpo", "rlvr", "orpo", "kto", "simpo", "reward-model", "distillation", "distill"),
        (_LOSSES, ("sft", "peft")),
    ),
    "engine": {
        "nemo": ("NeMo has two engines", ("megatron", "automodel")),
        **dict.fromkeys(
            ("fsdp", "pytorch", "torch"),
            ("torch has two versions of FSDP; our engine uses FSDP2", ("meshwright", "fsdp1")),
        ),
        "fsdp-2": (
            "FSDP2 is a strategy (layout.strategy=fsdp2) of these engines",
            ("meshwright", "torchtitan", "automodel"),
        ),
    },
    "framework": {
        "nemo": ("NeMo has two frameworks", ("megatron-bridge", "automodel")),
        "megatron": ("Megatron-Core has two frameworks", ("megatron-lm", "megatron-bridge")),
        **{
            name: (
                f"configs of {title} are not written"
                + (", and only `meshwright check FILE` reads them" if title.lower() in FRONT_ENDS else ""),
                ("accelerate", "automodel"),
            )
            for name, title in (
                ("axolotl", "Axolotl"),
                ("llama-factory", "LLaMA-Factory"),
                ("ms-swift", "ms-swift"),
                ("swift", "ms-swift"),
                ("torchtune", "torchtune"),
                ("unsloth", "Unsloth"),
            )
        },
    },
}
"""Words that mean something we do not have, or more than one choice: the reason, and what to choose instead."""


def simplified(word: str) -> str:
    """Return a word without case, spaces and punctuation."""
    return "".join(character for character in word.lower() if character.isalnum())


def synonym(kind: str, word: str) -> Synonym | None:
    """Return what a word means, if it is a known one for a choice of this kind."""
    return next((one for name, one in SYNONYMS.get(kind, {}).items() if simplified(name) == simplified(word)), None)


def unsupported(kind: str, word: str) -> tuple[str, tuple[str, ...]] | None:
    """Return why a known word cannot be accepted, and the choices instead."""
    found = UNSUPPORTED.get(kind, {}).items()
    return next((one for name, one in found if simplified(name) == simplified(word)), None)
