"""What differs between the fine-tuning front ends: their tables, commands and names of the Trainer's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.frameworks.front_ends import older_keys
from meshwright.frameworks.front_ends.near_values import (
    axolotl_data_findings,
    axolotl_dataset_types,
    swift_refused,
    swift_template_findings,
)
from meshwright.frameworks.front_ends.older_keys import Removed
from meshwright.frameworks.front_ends.sharding import AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, MS_SWIFT, TRL, Configs
from meshwright.frameworks.front_ends.templates import template_findings
from meshwright.frameworks.front_ends.weights import (
    WeightDtype,
    axolotl_weights,
    llama_factory_weights,
    ms_swift_weights,
    trl_weights,
)
from meshwright.frameworks.key_table import KeyTable, read_table
from meshwright.frameworks.trl_data import is_of_command
from meshwright.frameworks.types import Settings
from meshwright.recipes.replacements import WarmupShare
from meshwright.rules.rule import Finding
from meshwright.similar import closest

Values = Mapping[str, Any]
SAME = (
    "gradient_accumulation_steps", "learning_rate", "warmup_steps", "warmup_ratio", "weight_decay", "max_steps",
    "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "save_steps", "save_total_limit", "eval_steps",
    "logging_steps", "lora_alpha", "lora_dropout", "lora_target_modules", "target_modules", "bf16", "fp16",
    "gradient_checkpointing", "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size",
    "num_train_epochs", "lr_scheduler_type", "optim", "lora_rank", "lora_r", "packing", "save_strategy",
    "eval_strategy", "max_length", "use_liger_kernel",
)  # fmt: skip
"""Arguments of the Trainer, TRL and peft that front ends name as those libraries do."""
FUSED_LOSS = "use_liger_kernel"
"""The Trainer's argument for a loss fused with the output layer, which no logits leave; of any library."""
CUT_CROSS_ENTROPY = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
DATASET_TYPE = re.compile(r"datasets\[\d+\]\.type")
METHOD_KEYS = ("adapter", "finetuning_type", "tuner_type", "train_type")
"""Keys of the front ends that name the adapters, or that all weights are trained."""
MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "use_mca",
    "use_megatron_bridge")  # fmt: skip


class FrontEnd(msgspec.Struct, frozen=True):
    """A fine-tuning front end."""

    name: str
    title: str
    marks: tuple[tuple[str, ...], ...]  # keys of its YAML files: all of one of these tuples
    names: Mapping[str, str]  # its key → argument of the Trainer, TRL or peft
    inputs: tuple[str, ...]
    rejects: bool  # whether it refuses to start with an unknown key; else it ignores the key
    programs: Mapping[str, str] = {}  # program of a command → table of its arguments
    other: Callable[[Values], str] = lambda values: ""  # why the training is not that of the Trainer; empty: it is
    recomputes: Callable[[Values], bool] = lambda values: False  # if its file has no gradient_checkpointing
    turns_adapters_on: tuple[str, str] = ("", "")  # key and value
    adapters: Callable[[Values], str] = lambda values: ""  # lora, qlora, another method, or empty for all weights
    other_tables: tuple[tuple[tuple[str, ...], str], ...] = ()  # keys of files → the table that has their keys
    not_with: tuple[str, ...] = ()  # keys of its files that do not train
    open_with: tuple[str, ...] = ()  # keys of other libraries, whose keys no table has
    truncation: Callable[[Values], str] = lambda values: "end"  # data.truncation of a file
    all_tokens: Callable[[Values], bool] | None = None  # whether prompts are in the loss; None: TRL's own keys say so
    plugins: Mapping[str, str] = {}  # first letters of keys → the plugin without which they are ignored
    fused_losses: Mapping[str, str] = {}  # keys of more fused losses → the plugin that turns an unset one on
    required: tuple[tuple[str, ...], ...] = ()  # keys of which one of each tuple must be set
    infers_with: tuple[str, ...] = ()  # keys of trained weights: a file with them may only generate
    trains_with: tuple[str, ...] = ()  # keys of which a file that trains has one; empty: any file
    usual: tuple[str, ...] = ()  # keys without which it does not start, unless the command adds them
    kernels: tuple[str, ...] = ()  # keys that put a plugin's kernels in the place of attn_implementation
    keeps_text: bool = False  # whether a number in quotes stays text
    isolates: bool = False  # whether it masks packed samples from each other with every attention kernel it names
    removed: Mapping[str, Removed] = {}  # keys of older releases by the table that no longer has them
    is_of_command: Callable[[str], bool] = lambda key: False  # keys of its files for its command, not its arguments
    starts_a_rank_per_device: bool = True  # else one process spreads the layers, unless NPROC_PER_NODE is set
    uses_click: bool = False  # parser of its command: click; else HfArgumentParser of transformers
    warmup: WarmupShare = WarmupShare()  # if its file has neither warmup_steps nor warmup_ratio
    weights: Callable[[Values], WeightDtype] = trl_weights  # dtype in which all weights are trained
    upcasts_trained: bool = False  # whether weights are loaded in the dtype of the computation, and trained ones cast
    scales_other_dtypes: bool = False  # whether weights in fp16 and fp32 are computed in fp16
    keeps_one_half: bool = False  # whether it turns off bf16 or fp16 if both are set
    fsdp_version: int = 2  # of a file that names none
    keeps_dtype_in_fsdp2: bool = False  # whether FSDP2 leaves that dtype; Accelerate's own casts to fp32
    sharding: Mapping[str, Configs] = {}  # settings that shard the training, by table
    has_other_programs: bool = False  # whether programs of others read its files too, with keys of their own
    own_findings: Callable[[Settings, bool], Iterator[Finding]] = lambda settings, is_command: iter(())
    refused: Callable[[Values], Iterator[tuple[str, str, str]]] = lambda values: iter(())
    """Values that it refuses: key, reason, and the value to write instead; empty if there is none."""

    @property
    def table(self) -> KeyTable:
        """The keys that its files accept."""
        return table(self.name.replace("-", "_"))


def table(name: str) -> KeyTable:
    """Return a table of this package."""
    return read_table(Path(__file__).with_name(f"{name}.tsv"))


def _text(values: Values, *keys: str) -> str:
    return next((str(values[key]).lower() for key in keys if values.get(key) not in (None, "")), "")


def _is_on(values: Values, key: str) -> bool:
    return str(values.get(key)).lower() == "true"


def _axolotl_other(values: Values) -> str:
    if _text(values, "rl"):
        return f"rl: {values['rl']}"
    for key in ("reward_model", "process_reward_model", "do_causal_lm_eval", "diffusion.noise_schedule"):
        if _is_on(values, key):
            return key
    return "a vision-language model" if _text(values, "processor_type") else ""


QUANTIZED_LORA = {4: "qlora", 8: "lora8bit"}
"""LoRA on frozen weights of so many bits."""


def _quantized(kind: str, bits: str) -> str:
    """Return LoRA by the bits of its frozen weights; other methods stay."""
    return QUANTIZED_LORA.get(int(bits), kind) if kind == "lora" and bits.isdecimal() else kind


def _axolotl_adapters(values: Values) -> str:
    """Return the adapters; adapter: lora is loaded in 8 bits or 16 (loaders/model.py: _set_quantization_config)."""
    named = _text(values, "adapter")
    return "lora8bit" if named == "lora" and _is_on(values, "load_in_8bit") else named


def _axolotl_all_tokens(values: Values) -> bool:
    """Return whether prompts are in the loss: by train_on_inputs, or because the data is plain text."""
    types = [str(value).partition(":")[0] for key, value in values.items() if DATASET_TYPE.fullmatch(key)]
    is_text = bool(types) and all(one == "completion" for one in types)
    return is_text or _is_on(values, "train_on_inputs") or any(key.startswith("pretraining_dataset") for key in values)


AXOLOTL_ADAPTERS = ("lora", "qlora", "llama-adapter")  # others are those of plugins
AXOLOTL_ELSEWHERE = {
    "mora": "it is that of the plugin axolotl.integrations.mora.MoraPlugin",
    "dora": "write adapter: lora and peft_use_dora: true",
    "qdora": "write adapter: qlora and peft_use_dora: true",
    "full": "leave adapter empty to train all weights",
    "none": "leave adapter empty to train all weights",
}
"""Methods that other keys of Axolotl name."""


def _axolotl_refused(values: Values) -> Iterator[tuple[str, str, str]]:
    yield from axolotl_dataset_types(values)
    named, bits = _text(values, "adapter"), [key for key in ("load_in_4bit", "load_in_8bit") if _is_on(values, key)]
    if not named:
        for key in bits:
            yield key, f"{key} needs adapter: qlora or lora; without an adapter all weights are trained", "false"
        return
    has_plugins = any(key.startswith("plugins") and values[key] for key in values)
    if values["adapter"] not in AXOLOTL_ADAPTERS and not has_plugins:
        near = () if named in AXOLOTL_ELSEWHERE else closest(named, AXOLOTL_ADAPTERS, 1)
        hint = AXOLOTL_ELSEWHERE.get(named, f"did you mean {near[0]}?" if near else "")
        allowed = f"allowed: {', '.join(AXOLOTL_ADAPTERS)}, or one of a plugin in plugins"
        yield "adapter", f"unknown adapter; {hint}{' ' if near else '; ' if hint else ''}{allowed}", "".join(near)
    if named != "qlora":
        return
    if "load_in_8bit" in bits:
        yield "load_in_8bit", "adapter: qlora is not loaded in 8 bits", "false"
    if _is_on(values, "gptq"):
        yield "gptq", "adapter: qlora does not train a GPTQ model", "false"
    if "load_in_4bit" not in bits:
        yield "load_in_4bit", "adapter: qlora requires load_in_4bit: true; adapter: lora trains 16-bit weights", "true"


def _factory_other(values: Values) -> str:
    if _is_on(values, "use_kt"):
        return "KTransformers keeps experts in host memory"
    stage = _text(values, "stage")
    return f"stage: {stage}" if stage not in ("", "sft", "pt") else ""


FACTORY_INFERENCE = ("infer_backend", "export_dir", "n_shot")


FACTORY_V1 = ("train_dataset", "dist_config", "peft_config")
"""Keys of files for LLaMA-Factory's v1, which trains all weights without a peft_config."""


def _factory_adapters(values: Values) -> str:
    is_v1 = any(key.partition(".")[0] in FACTORY_V1 for key in values)
    kind = _text(values, "peft_config.name") or "full" if is_v1 else _text(values, "finetuning_type") or "lora"
    bits = _text(values, "quantization_bit", "peft_config.quantization_bit")
    return "" if kind == "full" else _quantized(kind, bits)


SWIFT_TRUNCATES = {"left": "start", "right": "end", "split": "end"}


def _swift_other(values: Values) -> str:
    found = _text(values, "rlhf_type", "task_type")
    if found not in ("", "causal_lm"):
        return found
    parts = _text(values, "sequence_parallel_size")
    return f"sequence_parallel_size {parts}" if parts not in ("", "1") else ""


def _swift_adapters(values: Values) -> str:
    kind = _text(values, "train_type", "tuner_type") or "lora"
    bits = _text(values, "quant_bits", "quantization_bit")
    return "" if kind == "full" else _quantized(kind, bits)


def _trl_adapters(values: Values) -> str:
    bits = 4 if _is_on(values, "load_in_4bit") else 8 if _is_on(values, "load_in_8bit") else 16
    return QUANTIZED_LORA.get(bits, "lora") if _is_on(values, "use_peft") else ""


def _same(**names: str) -> dict[str, str]:
    return {**{name: name for name in SAME}, **names}


DATASET_MIXTURES = ("dataset_mixer", "dataset_mixture")
"""Keys of programs that train with TRL on several datasets."""
FRONT_ENDS: Mapping[str, FrontEnd] = {
    "axolotl": FrontEnd(
        "axolotl",
        "Axolotl",
        (("base_model", "sequence_len"), ("base_model", "datasets"), ("base_model", "micro_batch_size"),
            ("base_model", "pretraining_dataset")),
        _same(
            base_model="model_name_or_path", micro_batch_size="per_device_train_batch_size", sequence_len="max_length",
            num_epochs="num_train_epochs", optimizer="optim", lr_scheduler="lr_scheduler_type",
            cosine_min_lr_ratio="cosine_min_lr_ratio",
            sample_packing="packing", attn_implementation="attn_implementation",
            lora_target_linear="lora_target_linear", liger_fused_linear_cross_entropy=FUSED_LOSS,
            **{"datasets[0].path": "dataset_name"},
        ),
        ("YAML files", "the command `axolotl train FILE.yaml`"),
        rejects=False,
        programs={"axolotl": "axolotl"},
        other=_axolotl_other,
        adapters=_axolotl_adapters,
        turns_adapters_on=("adapter", "lora"),
        refused=_axolotl_refused,
        all_tokens=_axolotl_all_tokens,
        truncation=lambda values: "end" if _text(values, "excess_length_strategy") == "truncate" else "drop",
        plugins={"liger_": "axolotl.integrations.liger.LigerPlugin", "cut_cross_entropy": CUT_CROSS_ENTROPY},
        fused_losses={"cut_cross_entropy": CUT_CROSS_ENTROPY},  # integrations/cut_cross_entropy/args.py
        required=(("learning_rate",), ("datasets", "pretraining_dataset")),
        infers_with=("lora_model_dir",),
        kernels=("use_dsv4_kernels", "use_glm_dsa_kernels", "fused_attn_kernel"),
        isolates=True,
        uses_click=True,
        warmup=WarmupShare(0.03, most=100, rounds_down=True),  # core/builders/base.py: min(int(0.03 * steps), 100)
        weights=axolotl_weights,
        keeps_one_half=True,  # utils/config/__init__.py: resolve_dtype
        fsdp_version=1,  # schemas/validation.py: check_fsdp_version_in_fsdp_config
        keeps_dtype_in_fsdp2=True,  # monkeypatch/accelerate/fsdp2.py replaces fsdp2_prepare_model, without the cast
        own_findings=axolotl_data_findings,
        sharding={"axolotl": AXOLOTL},
        removed={"axolotl": older_keys.AXOLOTL},
    ),
    "llama-factory": FrontEnd(
        "llama-factory",
        "LLaMA-Factory",
        (("model_name_or_path", "finetuning_type"), ("model_name_or_path", "stage"), ("model", "train_dataset"),
            ("model", "dist_config"), ("model_name_or_path", "template", "do_train"),
            ("stage", "finetuning_type", "template")),
        _same(
            model_name_or_path="model_name_or_path", model="model_name_or_path", cutoff_len="cutoff_len",
            lora_target="lora_target", dataset="dataset", flash_attn="attn_implementation",
            micro_batch_size="per_device_train_batch_size", enable_liger_kernel="use_liger_kernel",
        ),
        ("YAML files", "the command `llamafactory-cli train FILE.yaml`"),
        rejects=True,
        keeps_text=True,
        programs={"llamafactory-cli": "llama_factory", "lmf": "llama_factory"},
        other=_factory_other,
        adapters=_factory_adapters,
        turns_adapters_on=("finetuning_type", "lora"),
        all_tokens=lambda values: _text(values, "stage") == "pt" or _is_on(values, "train_on_prompt"),
        other_tables=((("train_dataset",), "llama_factory_v1"), (("dist_config",), "llama_factory_v1"),
            (("model", "peft_config"), "llama_factory_v1")),
        recomputes=lambda values: not _is_on(values, "disable_gradient_checkpointing"),
        required=(("dataset", "train_dataset", "eval_dataset"),),
        usual=("model_name_or_path",),
        trains_with=("stage", "do_train", "dataset", "train_dataset", "output_dir", "learning_rate", "peft_config",
            "dist_config", "num_train_epochs", "max_steps"),
        not_with=FACTORY_INFERENCE,
        open_with=MEGATRON,
        weights=llama_factory_weights,
        upcasts_trained=True,
        own_findings=template_findings,
        sharding={"llama_factory": LLAMA_FACTORY, "llama_factory_v1": LLAMA_FACTORY_V1},
        removed={"llama_factory": older_keys.LLAMA_FACTORY},
    ),
    "ms-swift": FrontEnd(
        "ms-swift",
        "ms-swift",
        (("model", "tuner_type"), ("model", "train_type"), ("model", "rlhf_type"),
            ("model", "dataset", "learning_rate"), ("model", "dataset", "max_length")),
        _same(model="model_name_or_path", dataset="dataset", attn_impl="attn_implementation"),
        ("the commands `swift sft …`, `swift pt …`, `swift rlhf …` and `megatron sft …`",
            "YAML files of their --config"),
        rejects=True,
        programs={"swift": "ms_swift", "megatron": "ms_swift_megatron"},
        starts_a_rank_per_device=False,
        truncation=lambda values: SWIFT_TRUNCATES.get(_text(values, "truncation_strategy"), "drop"),
        other_tables=tuple(((key,), "ms_swift_megatron") for key in ("micro_batch_size", *MEGATRON[:3])),
        recomputes=lambda values: True,
        not_with=("sampler_engine", "sampler_type", "infer_backend", "load_args"),
        open_with=("colocate_groups", "device_groups", "train", "rollout"),
        other=_swift_other,
        adapters=_swift_adapters,
        turns_adapters_on=("tuner_type", "lora"),
        own_findings=swift_template_findings,
        refused=swift_refused,
        all_tokens=lambda values: _text(values, "loss_scale") == "all",
        removed={"ms_swift": older_keys.SWIFT, "ms_swift_megatron": older_keys.SWIFT_MEGATRON},
        weights=ms_swift_weights,
        scales_other_dtypes=True,  # _init_mixed_precision of its model_args.py
        sharding={"ms_swift": MS_SWIFT},
    ),
    "trl": FrontEnd(
        "trl",
        "TRL",
        (("model_name_or_path", "dataset_name"), ("model_name_or_path", "datasets"),
            *(("model_name_or_path", key) for key in ("per_device_train_batch_size", *DATASET_MIXTURES))),
        _same(model_name_or_path="model_name_or_path", dataset_name="dataset_name", use_peft="use_peft",
            load_in_4bit="load_in_4bit", load_in_8bit="load_in_8bit", attn_implementation="attn_implementation",
            test_split_size="test_split_size"),
        ("YAML files of `trl sft --config FILE.yaml`", "the commands `trl dpo …`, `trl grpo …` and others"),
        rejects=True,
        programs={"trl": "trl"},
        recomputes=lambda values: True,
        adapters=_trl_adapters,
        turns_adapters_on=("use_peft", "true"),
        removed={"trl": older_keys.TRL},
        weights=trl_weights,
        sharding={"trl": TRL},
        has_other_programs=True,
        is_of_command=is_of_command,
    ),
}  # fmt: skip
"""The front ends by name."""
