"""Checks of LLaMA-Factory's parser and arguments."""

from __future__ import annotations

from meshwright.frameworks.start_checks.types import Given, StartCheck, Table, together
from meshwright.models import quantized_bits

PARSER = "src/llamafactory/hparams/parser.py: get_train_args"
TUNING = "src/llamafactory/hparams/finetuning_args.py: FinetuningArguments.__post_init__"
DATA = "src/llamafactory/hparams/data_args.py: DataArguments.__post_init__"
MODEL = "src/llamafactory/hparams/parser.py: _verify_model_args"
LORA_ONLY = ("loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
SFT_ONLY = ("predict_with_generate", "neat_packing", "train_on_prompt", "mask_history")
LOW_RANK = ("use_galore", "use_apollo", "use_badam")


def _is_zero3(given: Given) -> bool:
    name = given.text("deepspeed")
    return "z3" in name or "zero3" in name or "stage3" in name or "stage_3" in name


def _not_with_zero3(key: str) -> StartCheck:
    return StartCheck(key, lambda given: given.is_on(key) and _is_zero3(given),
        f"{{{key}}} does not work with ZeRO-3 ({{deepspeed}})", {key: False}, PARSER)  # fmt: skip


def _validates(given: Given) -> bool:
    return given.is_on("eval_dataset") or (given.number("val_size") or 0) >= 1e-6


def _of_lora(key: str) -> StartCheck:
    return StartCheck(key, lambda given: given.is_on(key) and given.text("finetuning_type") != "lora",
        f"{{{key}}} needs finetuning_type: lora, not {{finetuning_type}}", {key: None}, TUNING)  # fmt: skip


def _of_sft(key: str) -> StartCheck:
    return StartCheck(key, lambda given: given.is_on(key) and given.text("stage") != "sft",
        f"{{{key}}} needs stage: sft, not {{stage}}", {key: False}, PARSER)  # fmt: skip


QUANTIZED = "src/llamafactory/model/model_utils/quantization.py: configure_quantization"
BITS = {"bnb": ("4", "8"), "hqq": ("1", "2", "3", "4", "5", "6", "8"), "eetq": ("8",)}
"""Bits that each quantization_method has; the others load weights that are quantized already."""
EXPORTED_BITS = ("2", "3", "4", "8")


def _bits(method: str, bits: tuple[str, ...]) -> StartCheck:
    return StartCheck("quantization_bit",
        lambda given: given.text("quantization_method") == method and given.text("quantization_bit") not in ("", *bits)
        and not given.is_on("export_quantization_bit") and not quantized_bits(given.text("model_name_or_path")),
        f"{{quantization_bit}} is none of {', '.join(bits)}, which quantization_method: {method} has",
        {"quantization_bit": 4 if "4" in bits else 8}, QUANTIZED)  # fmt: skip


LLAMA_FACTORY = Table(
    "LLaMA-Factory",
    {"stage": "sft", "finetuning_type": "lora", "max_steps": -1, "mix_strategy": "concat", "pref_loss": "sigmoid",
        "reward_model_type": "lora", "badam_mode": "layer", "quantization_method": "bnb"},
    (
        *(_of_sft(key) for key in SFT_ONLY),
        *(_of_lora(key) for key in LORA_ONLY),
        *(_not_with_zero3(key) for key in ("predict_with_generate", "pissa_init", "pure_bf16", "use_unsloth")),
        StartCheck("do_predict",
            lambda given: given.is_on("do_predict") and not given.is_on("predict_with_generate")
            and given.text("stage") == "sft",
            "{do_predict} needs predict_with_generate", {"predict_with_generate": True}, PARSER),
        StartCheck("load_best_model_at_end",
            lambda given: given.is_on("load_best_model_at_end") and given.text("stage") in ("rm", "ppo"),
            "{load_best_model_at_end} does not work with {stage}", {"load_best_model_at_end": False}, PARSER),
        StartCheck("max_steps", lambda given: given.is_on("streaming") and given.text("max_steps") in ("-1", "-1.0"),
            "{streaming} needs max_steps: the length of the data is not known", {"max_steps": 1000}, PARSER),
        StartCheck("do_eval",
            lambda given: given.any_on("do_eval", "do_predict", "predict_with_generate") and not _validates(given),
            "an evaluation needs eval_dataset or val_size", {"val_size": 0.1}, PARSER),
        StartCheck("eval_strategy",  # it turns do_eval on
            lambda given: given.is_on("eval_strategy") and not given.is_on("do_eval") and not _validates(given),
            "{eval_strategy} needs eval_dataset or val_size", {"val_size": 0.1}, PARSER),
        StartCheck("compute_accuracy", together("predict_with_generate", "compute_accuracy"),
            "{predict_with_generate} and {compute_accuracy} exclude each other", {"compute_accuracy": False}, PARSER),
        StartCheck("quantization_device_map",
            lambda given: given.is_on("do_train") and given.text("quantization_device_map") == "auto",
            "{quantization_device_map} is for inference", {"quantization_device_map": None}, PARSER),
        StartCheck("deepspeed", lambda given: given.is_on("deepspeed") and given.any_on("use_galore", "use_apollo"),
            "GaLore and APOLLO do not work with {deepspeed}", {"deepspeed": None}, PARSER),
        StartCheck("fp8", lambda given: given.is_on("fp8", "quantization_bit") and not given.is_on("use_mca"),
            "{fp8} does not work with {quantization_bit}", {"fp8": False}, PARSER),
        StartCheck("adapter_name_or_path",
            lambda given: given.is_on("adapter_name_or_path") and given.text("finetuning_type") != "lora",
            "{adapter_name_or_path} needs finetuning_type: lora, not {finetuning_type}", {"finetuning_type": "lora"},
            MODEL),
        StartCheck("quantization_bit",
            lambda given: given.is_on("quantization_bit") and given.text("finetuning_type") not in ("lora", "oft"),
            "{quantization_bit} needs finetuning_type: lora or oft, not {finetuning_type}",
            {"finetuning_type": "lora"}, MODEL),
        *(_bits(method, bits) for method, bits in BITS.items()),
        StartCheck("export_quantization_bit",
            lambda given: given.text("export_quantization_bit") not in ("", *EXPORTED_BITS),
            f"{{export_quantization_bit}} is none of {', '.join(EXPORTED_BITS)}", {"export_quantization_bit": 4},
            QUANTIZED),
        *(StartCheck(key, together("quantization_bit", key), f"{{{key}}} does not work with {{quantization_bit}}",
            {key: False}, MODEL) for key in ("pissa_init", "resize_vocab")),
        StartCheck("create_new_adapter", together("quantization_bit", "adapter_name_or_path", "create_new_adapter"),
            "{create_new_adapter} does not work with {quantization_bit}", {"create_new_adapter": False}, MODEL),
        StartCheck("val_size", lambda given: given.is_on("eval_dataset") and (given.number("val_size") or 0) > 1e-6,
            "{val_size} and {eval_dataset} exclude each other", {"val_size": None}, DATA),
        StartCheck("interleave_probs",
            lambda given: given.is_on("interleave_probs") and given.text("mix_strategy") == "concat",
            "{interleave_probs} needs interleaved data, not {mix_strategy}", {"mix_strategy": "interleave_under"},
            DATA),
        StartCheck("val_size",
            lambda given: given.is_on("streaming") and 1e-6 < (given.number("val_size") or 0) < 1,
            "{val_size} must be a number of samples with {streaming}", {"val_size": 1000}, DATA),
        StartCheck("max_samples", together("streaming", "max_samples"),
            "{max_samples} does not work with {streaming}", {"max_samples": None}, DATA),
        StartCheck("mask_history", together("mask_history", "train_on_prompt"),
            "{mask_history} and {train_on_prompt} exclude each other", {"mask_history": False}, DATA),
        StartCheck("reward_model", lambda given: given.text("stage") == "ppo" and not given.is_on("reward_model"),
            "{stage} needs reward_model", {}, TUNING),
        StartCheck("reward_model_type",
            lambda given: given.text("stage") == "ppo" and given.text("finetuning_type") != "lora"
            and given.text("reward_model_type") == "lora",
            "{reward_model_type} needs finetuning_type: lora, not {finetuning_type}", {"reward_model_type": "full"},
            TUNING),
        StartCheck("use_llama_pro",
            lambda given: given.is_on("use_llama_pro") and given.text("finetuning_type") == "full",
            "{use_llama_pro} needs finetuning_type: lora or freeze, not {finetuning_type}", {"use_llama_pro": False},
            TUNING),
        StartCheck("finetuning_type",
            lambda given: given.any_on(*LOW_RANK) and given.text("finetuning_type") == "lora",
            "{finetuning_type} does not work with GaLore, APOLLO or BAdam", {"finetuning_type": "full"}, TUNING),
        StartCheck("use_galore", lambda given: sum(given.is_on(key) for key in LOW_RANK) > 1,
            "GaLore, APOLLO and BAdam exclude each other", {}, TUNING),
        StartCheck("dpo_label_smoothing",
            lambda given: given.text("stage") == "dpo" and given.text("pref_loss") != "sigmoid"
            and given.is_on("dpo_label_smoothing"),
            "{dpo_label_smoothing} needs pref_loss: sigmoid, not {pref_loss}", {"dpo_label_smoothing": None}, TUNING),
    ),
)  # fmt: skip
