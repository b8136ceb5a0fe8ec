"""Checks of TRL's configs, trainers and scripts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.start_checks.groups import group_checks
from meshwright.frameworks.start_checks.trainer import FLASH_PLACE, IN_FIRST_STEP, flash_in_fp32
from meshwright.frameworks.start_checks.types import Changes, Given, StartCheck, Table, together, without
from meshwright.frameworks.trl_rows import CONVERSATIONS as CHAT_COLUMNS
from meshwright.frameworks.trl_rows import PAIR, columns_of, rows_of
from meshwright.similar import misspelled

PLACE = "trl/trainer/sft_trainer.py: SFTTrainer.__init__"
PACKING = "trl/trainer/sft_trainer.py: SFTTrainer._prepare_dataset"
SCRIPT = "trl/scripts/utils.py: get_dataset"
GRPO_PLACE = "trl/trainer/grpo_trainer.py: GRPOTrainer"
DPO_PLACE = "trl/trainer/dpo_trainer.py: DPOTrainer.__init__"
LOSSES = ("nll", "dft", "chunked_nll")  # loss_type of SFTTrainer
GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo", "vespo")
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")  # fmt: skip
OLDER_LOSSES = ("kto_pair", "aot_pair")  # of DPOTrainer before 0.29
SFT_KEYS = ("packing", "packing_strategy", "eval_packing", "dataset_text_field", "assistant_only_loss",
    "completion_only_loss", "chat_template_path", "dataset_kwargs")  # fmt: skip
"""Arguments that only TRL's SFTConfig has."""
DATA_FILES = re.compile(r"datasets\[\d+\]\.data_files(\[0\])?")
TORCH_DTYPES = ("dtype", "torch_dtype")
DTYPES = ("auto", "bfloat16", "float16", "float32")
SHORT_DTYPES = ("bf16", "fp16", "fp32", "half", "float")  # programs of others have names of their own
CHANGES_ROWS = re.compile(
    r"\.(map|rename_columns?|add_column|from_list|from_dict|from_generator)\(|\bformatting_func\b"
)
SHARE = re.compile(r"datasets\[(\d+)\]\.(\w+)")


def _with_images(key: str) -> Callable[[Given], bool]:
    return lambda given: _sees_images(given) and given.is_on(key)


def _sees_images(given: Given) -> bool:
    return given.model is not None and given.model.vision is not None


def _data_files(given: Given) -> Iterator[tuple[str, Path]]:
    """Yield the data files that SFTTrainer reads as they are, with their folders; none if a program may change rows."""
    for key, setting in given.settings.items():
        if setting.unresolved or not (key == "train_file" or DATA_FILES.fullmatch(key)):
            continue
        at = Path(setting.file)
        if key == "train_file" and (
            at.suffix != ".py" or not at.is_file() or CHANGES_ROWS.search(at.read_text("utf-8"))
        ):
            continue
        yield str(setting.value), at.parent


def _file_of_rows(given: Given) -> str:
    """Return the data file of texts that SFTTrainer reads as it is; empty if there is none."""
    files = _data_files(given)
    return next((name for name, folder in files if rows_of(name, folder) in ("completions", "texts")), "")


def _lacks_columns(given: Given) -> bool:
    """Return whether the rows of a data file have no column that SFTTrainer reads, such as Alpaca's."""
    text = given.text("dataset_text_field") or "text"
    read = {text, *CHAT_COLUMNS, "input_ids"}
    return not file_access.closed() and any(
        columns and not read & columns and not set(PAIR) <= columns
        for columns in (columns_of(name, folder) for name, folder in _data_files(given))
    )


def _lacks_conversations(given: Given) -> bool:
    return given.is_on("assistant_only_loss") and not file_access.closed() and bool(_file_of_rows(given))


def _by_default(given: Given) -> bool:
    """Return bf16 if it is not set: TRL computes in bf16 unless fp16 is on."""
    return not given.is_on("fp16")


def _loss(given: Given) -> str:
    return given.text("loss_type") or ("nll" if given.is_on("use_liger_kernel") else "chunked_nll")


def _has_mixture(given: Given) -> bool:
    return given.is_stated("datasets")


def _validates(given: Given) -> bool:
    return given.text("eval_strategy") not in ("", "no", "none", "false")


def _lacks_test_split(given: Given) -> bool:
    """Return whether a mixture of datasets is validated on a split that it does not have."""
    split = given.text("dataset_test_split") or "test"
    splits = ("train", "test") if given.is_on("test_split_size") else ("train",)
    return _has_mixture(given) and _validates(given) and split not in splits


def _with_test_split(given: Given) -> Changes:
    named = {"dataset_test_split": "test"} if given.text("dataset_test_split") not in ("", "test") else {}
    return {**({} if given.is_on("test_split_size") else {"test_split_size": 0.05}), **named}


def _has_some_fractions(given: Given) -> bool:
    """Return whether only some datasets of a mixture have a fraction."""
    found = [match for key, one in given.settings.items() if one.value is not None and (match := SHARE.match(key))]
    shared = {match[1] for match in found if match[2] == "fraction"}
    return bool(shared) and shared != {match[1] for match in found}


def _streams(given: Given) -> bool:
    return given.is_on("streaming" if _has_mixture(given) else "dataset_streaming")


def _near_dtype(given: Given, key: str) -> str:
    """Return the dtype that a misspelled one means; else empty."""
    name = given.text(key).removeprefix("torch.")
    return next(iter(misspelled(name, DTYPES)), "") if name not in (*DTYPES, *SHORT_DTYPES) else ""


def _misspells_dtype(given: Given, key: str) -> bool:
    return given.is_stated(key) and bool(_near_dtype(given, key))


def _dtype(given: Given, key: str) -> Changes:
    return {key: _near_dtype(given, key)}


def _both(first: str, second: str, place: str) -> StartCheck:
    return StartCheck(first, together(first, second), f"{{{first}}} and {{{second}}} exclude each other",
        {second: None}, place)  # fmt: skip


SCRIPTS = Table(
    "TRL's script",
    {"bf16": _by_default, "max_steps": -1, "logging_steps": 10},
    (
        StartCheck("eval_strategy", _lacks_test_split,
            "{eval_strategy} needs a test split: datasets have train only, unless test_split_size holds out a part",
            _with_test_split, SCRIPT),
        StartCheck("test_split_size", lambda given: _has_mixture(given) and given.is_on("test_split_size", "streaming"),
            "{test_split_size} does not split a streamed dataset", {"streaming": False}, SCRIPT),
        StartCheck("datasets", _has_some_fractions, "fraction must be set for all datasets or for none", {}, SCRIPT),
        StartCheck("streaming",
            lambda given: given.is_on("streaming") and any(key.endswith("].fraction") for key in given.settings),
            "{streaming} does not support the fraction of a dataset", {"streaming": False}, SCRIPT),
        StartCheck("max_steps", lambda given: _streams(given) and (given.number("max_steps") or -1) <= 0,
            "a streamed dataset has no length: max_steps must be set", {"max_steps": 1000},
            "transformers/trainer.py: Trainer.__init__"),
        *(
            StartCheck(key, partial(_misspells_dtype, key=key), f"{{{key}}} is no dtype of torch",
                partial(_dtype, key=key), "trl/scripts/sft.py: main")
            for key in TORCH_DTYPES
        ),
        StartCheck("load_in_8bit", together("load_in_4bit", "load_in_8bit"),
            "{load_in_4bit} and {load_in_8bit} exclude each other", {"load_in_8bit": False},
            "trl/trainer/model_config.py: ModelConfig.__post_init__"),
        StartCheck("attn_implementation",
            lambda given: not given.is_stated("dtype") and flash_in_fp32(given, "float32"),
            "{attn_implementation} takes fp16 or bf16, but dtype is float32 by default and mixed precision is off",
            {"bf16": True}, FLASH_PLACE, effect=IN_FIRST_STEP),
    ),
)  # fmt: skip

CONVERSATIONS = Table(
    "TRL's SFTTrainer",
    {},
    (
        StartCheck("train_file", _lacks_columns,
            "the rows of {train_file} have no column that SFTTrainer reads (messages, prompt and completion, or text): "
            "map them first, as dataset.map(lambda row: {{\"prompt\": …, \"completion\": …}}) does", {}, PACKING,
            "warning", effect="fails while it reads the data (KeyError: 'text')"),
        StartCheck("assistant_only_loss", _lacks_conversations,
            "{assistant_only_loss} needs conversations, but the rows of the data file are texts: TRL's default for "
            "prompt and completion is a loss on the completions", {"assistant_only_loss": False}, PLACE),
    ),
)  # fmt: skip
"""The check of the data that a program, or TRL's own script, passes to SFTTrainer."""
TRL = Table(
    "TRL's SFTTrainer",
    {"max_length": 1024},
    (
        StartCheck("packing", _with_images("packing"),
            "{packing} does not support vision-language models, also if they train on text", {"packing": False}, PLACE),
        StartCheck("padding_free", _with_images("padding_free"),
            "{padding_free} does not support vision-language models", {"padding_free": False}, PLACE),
        StartCheck("assistant_only_loss", _with_images("assistant_only_loss"),
            "{assistant_only_loss} does not support vision-language models", {"assistant_only_loss": False}, PLACE),
        StartCheck("truncation_mode",
            lambda given: _sees_images(given) and given.text("truncation_mode") == "keep_end"
            and given.is_on("max_length"),
            "{truncation_mode} does not support vision-language models", {"truncation_mode": "keep_start"}, PLACE),
        StartCheck("padding_free",
            lambda given: given.is_on("padding_free", "max_length") and not given.is_on("packing")
            and not _sees_images(given),
            "{padding_free} without packing does not cut samples to {max_length}", {"packing": True}, PLACE),
        StartCheck("lora_r", lambda given: given.is_on("use_peft") and (given.number("lora_r") or 1) < 1,
            "{lora_r}: peft refuses a rank below 1", {"lora_r": 16}, "peft/tuners/lora/layer.py: update_layer",
            effect="stops with a ValueError"),
        StartCheck("max_length", lambda given: (given.number("max_length") or 0) < 0,
            "{max_length}: a sample has at least one token", {"max_length": 1024},
            "trl/data_utils.py: truncate_dataset", effect="stops when the data is prepared"),
        StartCheck("max_length",
            lambda given: given.is_on("packing") and given.is_stated("max_length") and not given.is_on("max_length"),
            "{packing} needs max_length", {"max_length": 1024}, PACKING),
        StartCheck("loss_type",
            lambda given: not given.is_on("use_liger_kernel") and given.is_stated("loss_type")
            and _loss(given) not in LOSSES,
            f"{{loss_type}} is no loss of SFTTrainer: it has {', '.join(LOSSES)}", {"loss_type": "nll"}, PLACE),
        StartCheck("loss_type", lambda given: given.is_on("use_liger_kernel") and _loss(given) == "chunked_nll",
            "{loss_type} does not work with {use_liger_kernel}", {"loss_type": "nll"}, PLACE),
        StartCheck("lora_target_modules",
            lambda given: given.is_on("use_peft") and "lm_head" in given.items("lora_target_modules")
            and _loss(given) == "chunked_nll",
            "adapters of lm_head do not work with the loss chunked_nll, the default", {"loss_type": "nll"}, PLACE),
    ),
)  # fmt: skip


def _known_loss(losses: tuple[str, ...], place: str) -> StartCheck:
    def unknown(given: Given) -> str:
        return next((one for one in given.items("loss_type") if one not in (*losses, *OLDER_LOSSES)), "")

    def fix(given: Given) -> Changes:
        near = next(iter(misspelled(unknown(given), losses)), "")
        return {"loss_type": near} if near and len(given.items("loss_type")) == 1 else {}

    return StartCheck("loss_type", lambda given: given.is_stated("loss_type") and bool(unknown(given)),
        f"{{loss_type}} is none of {', '.join(losses)}", fix, place, effect=IN_FIRST_STEP)  # fmt: skip


DPO = Table(
    "TRL's DPOTrainer",
    {"loss_type": "sigmoid", "label_smoothing": 0.0},
    (
        _known_loss(DPO_LOSSES, "trl/trainer/dpo_trainer.py: DPOTrainer._compute_loss"),
        StartCheck("loss_weights",
            lambda given: given.is_on("loss_weights")
            and len(given.items("loss_weights")) != len(given.items("loss_type")),
            "{loss_weights} must have one weight for each of {loss_type}", {"loss_weights": None},
            "trl/trainer/dpo_config.py: DPOConfig.__post_init__"),
        StartCheck("use_weighting",
            lambda given: given.is_on("use_weighting") and bool({"aot", "aot_unpaired"} & {*given.items("loss_type")}),
            "{use_weighting} does not work with {loss_type}, which sorts samples", {"use_weighting": False}, DPO_PLACE),
        StartCheck("label_smoothing",
            lambda given: "exo_pair" in given.items("loss_type") and given.number("label_smoothing") == 0,
            "{loss_type} needs label_smoothing above 0", {"label_smoothing": 1e-3}, DPO_PLACE),
        StartCheck("use_liger_kernel",
            lambda given: given.is_on("use_liger_kernel") and len(given.items("loss_type")) > 1,
            "{use_liger_kernel} supports one loss, not {loss_type}", {"use_liger_kernel": False}, DPO_PLACE),
        StartCheck("precompute_ref_log_probs", together("use_liger_kernel", "precompute_ref_log_probs"),
            "{precompute_ref_log_probs} does not work with {use_liger_kernel}", {"precompute_ref_log_probs": False},
            DPO_PLACE),
        StartCheck("use_liger_kernel",
            lambda given: given.is_on("use_liger_kernel", "use_peft")
            and "lm_head" in given.items("lora_target_modules"),
            "{use_liger_kernel} does not work with adapters of lm_head", {"use_liger_kernel": False}, DPO_PLACE),
    ),
)  # fmt: skip


BATCHES = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1}


def _generates(title: str, module: str) -> Table:
    """Return the checks of a config whose trainer generates answers."""
    place = f"trl/trainer/{module}.py: {title}Config.__post_init__"
    return Table(
        f"TRL's {title}Config",
        {"num_generations": 8 if title == "GRPO" else 2, "vllm_importance_sampling_clip_max": 3.0, **BATCHES},
        (
            StartCheck("auto_find_batch_size", lambda given: given.is_on("auto_find_batch_size"),
                "{auto_find_batch_size}: a smaller batch would split the answers of a prompt",
                {"auto_find_batch_size": False}, place),
            _both("generation_batch_size", "steps_per_generation", place),
            StartCheck("log_completions_hub_repo", without("log_completions_hub_repo", "log_completions"),
                "{log_completions_hub_repo} needs log_completions", {"log_completions": True}, place),
            StartCheck("num_generations", lambda given: (given.number("num_generations") or 0) < 2,
                "{num_generations}: an advantage needs at least 2 answers per prompt", {"num_generations": 8}, place),
            *group_checks(place),
            *((_known_loss(GRPO_LOSSES, f"{GRPO_PLACE}._compute_loss"),) if title == "GRPO" else ()),
            StartCheck("vllm_importance_sampling_clip_min",
                lambda given: (low := given.number("vllm_importance_sampling_clip_min")) is not None
                and (high := given.number("vllm_importance_sampling_clip_max")) is not None and low >= high,
                "{vllm_importance_sampling_clip_min} must be below {vllm_importance_sampling_clip_max}",
                {"vllm_importance_sampling_clip_min": None}, place),
        ),
    )  # fmt: skip


GENERATES = "num_generations"
GROUPS = Table("TRL's trainer", BATCHES, group_checks("trl/trainer/grpo_config.py: GRPOConfig.__post_init__"))
"""Checks of a YAML file for any trainer that generates answers."""
METHODS = {"dpo": DPO, "grpo": _generates("GRPO", "grpo_config"), "rloo": _generates("RLOO", "rloo_config")}
"""Checks of the other trainings that the command has."""
