"""Checks of Axolotl's schema."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.frameworks.start_checks.groups import axolotl_group_checks
from meshwright.frameworks.start_checks.model_classes import model_class_check, tokenizer_class_check
from meshwright.frameworks.start_checks.trainer import IN_FIRST_STEP, skipped_targets, unknown_targets, wrong_direction
from meshwright.frameworks.start_checks.types import Changes, Given, StartCheck, Table, together, without
from meshwright.models import quantized_bits
from meshwright.models.layer_classes import layer_class, wrong_layer_class

PLACE = "src/axolotl/utils/schemas/validation.py: "
SCHEMA = "src/axolotl/utils/schemas/config.py: "
ATTENTION_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""Older switches of attn_implementation; the first that is on wins."""
ISOLATING = ("flash", "flex_attention", "xformers", "sage", "sdpa", "eager")  # in the names of kernels
OWN_ATTENTION = ("use_dsv4_kernels", "use_glm_dsa_kernels", "fused_attn_kernel", "gemma4_hybrid_attn_impl", "diffusion")
"""Keys of kernels and objectives with attention masks of their own."""
LOSSES = ("cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy")
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
UNSLOTH = ("cross_entropy_loss", "lora_mlp", "lora_qkv", "lora_o", "rms_norm", "rope")
MISTRAL_REFUSES = ("added_tokens_overrides", "special_tokens", "tokens", "chat_template", "processor_kwargs")
WRAPPED = ("fsdp_config.transformer_layer_cls_to_wrap", "fsdp_config.fsdp_transformer_layer_cls_to_wrap")
RELORA_REFUSES = ("fsdp", "fsdp_config", "deepspeed")


def attention_kernel(given: Given) -> str:
    """Return the attention implementation: attn_implementation, or that of an older switch; empty if there is none."""
    named = given.text("attn_implementation")
    return named or next((name for flag, name in ATTENTION_FLAGS.items() if given.is_on(flag)), "")


def _uses_flash(given: Given) -> bool:
    return "flash" in attention_kernel(given)


def _fsdp_version(given: Given) -> str:
    return given.text("fsdp_version") or given.text("fsdp_config.fsdp_version") or given.text("fsdp_config.version")


def _is_fsdp1(given: Given) -> bool:
    return given.any_on("fsdp", "fsdp_config") and _fsdp_version(given) != "2"


def _fsdp_option(given: Given, name: str) -> bool:
    return given.any_on(f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}")


def _evaluates_nothing(given: Given) -> bool:
    wanted = given.is_on("eval_steps") or given.text("eval_strategy") not in ("", "no", "false")
    never = given.is_on("test_datasets") or given.text("eval_strategy") == "no"
    return given.number("val_set_size") == 0 and wanted and not never


def _without_evaluations(given: Given) -> Changes:
    keys = ("eval_steps", "eval_strategy", "early_stopping_patience")
    return {key: None for key in keys if given.is_stated(key)}


def _stops_early_without_steps(given: Given) -> bool:
    return given.is_on("early_stopping_patience") and not given.is_on("save_steps", "eval_steps")


def _stops_early_between_saves(given: Given) -> bool:
    save, every = given.number("save_steps"), given.number("eval_steps")
    return given.is_on("early_stopping_patience") and bool(save and every) and (save or 0) % (every or 1) != 0


def _in_steps(given: Given) -> Changes:
    """Evaluate and save by steps, which early stopping compares: as often in an epoch as before, else ten times."""
    times = (given.number("evals_per_epoch") or 0) * (given.number("num_epochs") or 1)
    every = given.number("eval_steps") or given.number("save_steps") or round(1 / (times if times > 1 else 10), 4)
    changes: dict[str, object] = {key: None for key in ("evals_per_epoch", "saves_per_epoch") if given.is_on(key)}
    wanted = {"eval_steps": int(every) if every >= 1 else every, "save_steps": int(every) if every >= 1 else every}
    return {**changes, **{key: value for key, value in wanted.items() if not given.is_on(key)}}


def _multiple_below(given: Given) -> Changes:
    """Save at the last evaluation before the stated steps: a later one may be after the end of the run."""
    save, every = given.number("save_steps") or 1, given.number("eval_steps") or 1
    return {"save_steps": int(max(1, save // every) * every)} if every >= 1 else {"save_steps": every}


def _loads_16_bits(given: Given) -> bool:
    """Return whether adapter: lora is given 4 bits, which only qlora and its quantized experts load."""
    is_published = bool(quantized_bits(given.text("base_model")))
    is_lora = given.text("adapter") == "lora" and given.is_on("load_in_4bit")
    return is_lora and not is_published and not given.any_on("quantize_moe_experts", "gptq", "load_in_8bit")


def _layer_names(given: Given) -> list[str]:
    value = next((given.get(key) for key in WRAPPED if given.is_stated(key)), None) or ""
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]


def _wraps_other_layers(given: Given) -> bool:
    return given.model is not None and bool(wrong_layer_class(given.model, _layer_names(given)))


def _own_layers(given: Given) -> Changes:
    key = next(key for key in WRAPPED if given.is_stated(key))
    return {} if given.model is None else {key: layer_class(given.model)}


def _stated_strategy(name: str) -> Callable[[Given], bool]:
    return lambda given: given.is_on(f"{name}_steps") and given.text(f"{name}_strategy") not in ("", "steps", "false")


def _one_of(first: str, second: str, place: str) -> StartCheck:
    return StartCheck(second, together(first, second), f"{{{first}}} and {{{second}}} exclude each other",
        {second: None}, place)  # fmt: skip


AXOLOTL = Table(
    "Axolotl",
    {},
    (
        StartCheck("eval_steps", _evaluates_nothing, "{val_set_size} leaves nothing to evaluate every {eval_steps}",
            _without_evaluations, f"{PLACE}check_evals"),
        StartCheck("eval_steps", _stated_strategy("eval"),
            "{eval_steps} needs eval_strategy: steps, not {eval_strategy}",
            {"eval_strategy": "steps"}, f"{PLACE}check_evals"),
        _one_of("eval_steps", "evals_per_epoch", f"{PLACE}check_evals"),
        StartCheck("evals_per_epoch",
            lambda given: given.is_on("evals_per_epoch") and given.text("eval_strategy") not in ("", "steps", "false"),
            "{evals_per_epoch} needs eval_strategy: steps, not {eval_strategy}", {"eval_strategy": None},
            f"{PLACE}check_evals"),
        StartCheck("do_bench_eval",
            lambda given: given.is_on("do_bench_eval") and not given.any_on("evals_per_epoch", "eval_steps"),
            "{do_bench_eval} needs evals_per_epoch or eval_steps", {"evals_per_epoch": 1}, f"{PLACE}check_evals"),
        StartCheck("save_steps", _stated_strategy("save"),
            "{save_steps} needs save_strategy: steps, not {save_strategy}",
            {"save_strategy": "steps"}, f"{PLACE}check_saves"),
        _one_of("save_steps", "saves_per_epoch", f"{PLACE}check_saves"),
        StartCheck("early_stopping_patience", _stops_early_without_steps,
            "{early_stopping_patience} needs eval_steps and save_steps", _in_steps, f"{PLACE}check_early_stopping"),
        StartCheck("early_stopping_patience", _stops_early_between_saves,
            "{early_stopping_patience} needs {save_steps} to be a multiple of {eval_steps}", _multiple_below,
            f"{PLACE}check_early_stopping"),
        wrong_direction(f"{SCHEMA}greater_is_better"),
        *(model_class_check("base_model", key, "src/axolotl/loaders/model.py: _build_model")
            for key in ("model_type", "type_of_model")),
        tokenizer_class_check("base_model", "tokenizer_type", "tokenizer_config",
            "src/axolotl/loaders/tokenizer.py: load_tokenizer"),
        unknown_targets("lora_target_modules", {"lora_target_modules": None, "lora_target_linear": True}),
        skipped_targets("lora_target_modules"),
        StartCheck("load_in_4bit", _loads_16_bits, "{load_in_4bit} needs adapter: qlora, not {adapter}",
            {"adapter": "qlora"}, "src/axolotl/loaders/model.py: _set_quantization_config", "warning",
            effect="loads weights in 16 bits"),
        StartCheck("save_strategy",
            lambda given: given.text("save_strategy") == "best" and not given.is_on("metric_for_best_model"),
            "{save_strategy} needs metric_for_best_model", {"metric_for_best_model": "eval_loss"},
            f"{SCHEMA}check_save_strategy_best_requires_metric"),
        _one_of("warmup_steps", "warmup_ratio", f"{PLACE}check_warmup"),
        StartCheck("batch_size", together("gradient_accumulation_steps", "batch_size"),
            "{gradient_accumulation_steps} and {batch_size} exclude each other", {"batch_size": None},
            f"{PLACE}check_gas_bsz"),
        StartCheck("micro_batch_size",
            lambda given: sum(given.is_on(key) for key in ("micro_batch_size", "gradient_accumulation_steps",
                "batch_size")) < 2,
            "two of micro_batch_size, gradient_accumulation_steps and batch_size must be set",
            lambda given: {key: 1 for key in ("micro_batch_size", "gradient_accumulation_steps") if not
                given.is_on(key)},
            f"{PLACE}check_batch_size_fields"),
        StartCheck("val_set_size", together("test_datasets", "val_set_size"),
            "{val_set_size} and test_datasets exclude each other", {"val_set_size": 0},
            f"{PLACE}check_val_w_test_datasets"),
        StartCheck("push_dataset_to_hub",
            without("push_dataset_to_hub", "hf_use_auth_token"),
            "{push_dataset_to_hub} needs hf_use_auth_token: true", {"hf_use_auth_token": True},
            f"{PLACE}check_push_ds_auth"),
        StartCheck("eval_table_size",
            lambda given: given.is_on("sample_packing", "eval_table_size")
            and given.text("eval_sample_packing") != "false",
            "{eval_table_size} does not work with packed samples", {"eval_sample_packing": False},
            f"{PLACE}check_eval_packing"),
        StartCheck("sample_packing", together("sample_packing", "rl"), "{sample_packing} does not work with {rl}",
            {"sample_packing": False}, f"{PLACE}check_sample_packing_w_rl"),
        StartCheck("remove_unused_columns",
            lambda given: given.text("rl") == "kto" and given.text("remove_unused_columns") != "false",
            "{rl} needs remove_unused_columns: false", {"remove_unused_columns": False}, f"{PLACE}check_kto_config"),
        StartCheck("dpo_loss_type",
            lambda given: given.any_on("dpo_loss_type", "dpo_loss_weights") and given.text("rl") != "dpo",
            "dpo_loss_type and dpo_loss_weights need rl: dpo", {"rl": "dpo"}, f"{PLACE}check_dpo"),
        StartCheck("warmup_ratio", lambda given: given.text("rl") == "simpo" and given.is_on("warmup_ratio"),
            "{warmup_ratio} does not work with {rl}", {"warmup_ratio": None, "warmup_steps": 10},
            f"{PLACE}check_simpo_warmup"),
        StartCheck("trl.num_generations",
            lambda given: given.text("rl") == "grpo" and (given.number("trl.num_generations") or 2) < 2,
            "{trl.num_generations}: a group needs two answers or more", {"trl.num_generations": 8},
            f"{PLACE}check_grpo_batch_size_divisibility"),
        *axolotl_group_checks(f"{PLACE}check_grpo_batch_size_divisibility"),
        StartCheck("sample_packing",
            lambda given: given.is_on("sample_packing")
            and not any(name in attention_kernel(given) for name in ISOLATING)
            and not given.any_on(*OWN_ATTENTION),
            "{sample_packing} without attn_implementation: packed samples attend to each other",
            {"attn_implementation": "flash_attention_2"}, f"{PLACE}check_sample_packing_without_attention", "warning",
            "data.packing-attention"),
        StartCheck("sample_packing",
            lambda given: given.is_on("sample_packing") and attention_kernel(given) in ("sdpa", "eager")
            and not given.any_on(*OWN_ATTENTION),
            "{sample_packing} with sdpa or eager attention: packed samples attend to each other before version 0.18",
            lambda given: {"attn_implementation": "flash_attention_2",
                **{flag: None for flag in ATTENTION_FLAGS if given.is_on(flag)}},
            f"{PLACE}check_sample_packing_without_attention", "warning",
            "data.packing-attention"),
        StartCheck("attn_implementation",
            lambda given: given.is_on("attn_implementation") and given.any_on(*ATTENTION_FLAGS),
            "{attn_implementation} and an older switch of attention exclude each other",
            lambda given: {flag: None for flag in ATTENTION_FLAGS if given.is_on(flag)},
            f"{SCHEMA}normalize_attn_implementation"),
        StartCheck("bf16",
            lambda given: _uses_flash(given) and given.is_stated("bf16")
            and not given.any_on("bf16", "bfloat16", "fp16", "float16", "load_in_8bit", "load_in_4bit", "deepspeed"),
            "{bf16} without fp16 loads and computes in float32, and flash attention takes fp16 or bf16",
            {"bf16": "auto"}, "src/axolotl/utils/config/__init__.py: resolve_dtype", effect=IN_FIRST_STEP),
        StartCheck("scaling_softmax",
            lambda given: given.is_on("scaling_softmax") and attention_kernel(given) != "flex_attention",
            "{scaling_softmax} needs attn_implementation: flex_attention", {"attn_implementation": "flex_attention"},
            f"{PLACE}check_scaling_softmax_requires_flex"),
        StartCheck("context_parallel_size",
            lambda given: (given.number("context_parallel_size") or 1) > 1 and not _uses_flash(given)
            and not given.is_on("use_glm_dsa_kernels"),
            "{context_parallel_size} needs flash attention", {"attn_implementation": "flash_attention_2"},
            f"{PLACE}check_context_parallel_size"),
        StartCheck("micro_batch_size",
            lambda given: (given.number("context_parallel_size") or 1) > 1 and given.is_on("sample_packing")
            and (given.number("micro_batch_size") or 1) > 1 and not given.is_on("use_glm_dsa_kernels"),
            "{context_parallel_size} with packed samples needs micro_batch_size: 1, not {micro_batch_size}",
            {"micro_batch_size": 1}, f"{PLACE}check_context_parallel_size"),
        StartCheck("batch_flattening",
            lambda given: given.text("batch_flattening") == "true" and given.is_on("sample_packing"),
            "{batch_flattening} and {sample_packing} exclude each other", {"batch_flattening": False},
            f"{PLACE}check_batch_flattening_fa"),
        StartCheck("fp8_enable_fsdp_float8_all_gather",
            lambda given: given.is_on("fp8_enable_fsdp_float8_all_gather") and _fsdp_version(given) != "2",
            "{fp8_enable_fsdp_float8_all_gather} needs fsdp_version: 2", {"fsdp_version": 2},
            f"{PLACE}check_fp8_config"),
        StartCheck("fp32_norms",
            lambda given: given.is_on("fp32_norms") and _fsdp_version(given) != "2",
            "{fp32_norms} needs FSDP2", {"fsdp_version": 2}, f"{SCHEMA}check_fp32_norms"),
        StartCheck("gradient_checkpointing_kwargs.use_reentrant",
            together("unfrozen_parameters", "gradient_checkpointing_kwargs.use_reentrant"),
            "use_reentrant must be false if some parameters are frozen",
            {"gradient_checkpointing_kwargs.use_reentrant": False}, f"{PLACE}check_use_reentrant_mismatch"),
        StartCheck("activation_offloading",
            without("activation_offloading", "gradient_checkpointing"),
            "{activation_offloading} needs gradient_checkpointing", {"gradient_checkpointing": True},
            f"{PLACE}check_activation_offloading_wo_gc"),
        StartCheck("selective_checkpointing",
            without("selective_checkpointing", "gradient_checkpointing"),
            "selective_checkpointing needs gradient_checkpointing", {"gradient_checkpointing": True},
            f"{PLACE}check_selective_checkpointing"),
        StartCheck("eval_sample_packing", together("do_causal_lm_eval", "eval_sample_packing"),
            "{do_causal_lm_eval} does not work with {eval_sample_packing}", {"eval_sample_packing": False},
            f"{PLACE}check_causal_lm_evals"),
        StartCheck("include_tokens_per_second", together("pretraining_dataset", "include_tokens_per_second"),
            "{include_tokens_per_second} does not work with pretraining_dataset", {"include_tokens_per_second": False},
            f"{PLACE}pretrain_with_tps"),
        *(StartCheck(key, together("tokenizer_use_mistral_common", key),
            f"{key} does not work with {{tokenizer_use_mistral_common}}", {key: None},
            f"{PLACE}check_mistral_common_incompatible_options") for key in MISTRAL_REFUSES),
        *(StartCheck(f"unsloth_{part}", together(f"unsloth_{part}"), f"{{unsloth_{part}}} was removed",
            {f"unsloth_{part}": None}, f"{PLACE}check_deprecated_unsloth_fields", since="0.17") for part in UNSLOTH),
        _one_of("lr_groups", "loraplus_lr_ratio", f"{PLACE}check_lr_groups"),
        StartCheck("peft_layers_pattern",
            without("peft_layers_pattern", "peft_layers_to_transform"),
            "peft_layers_pattern needs peft_layers_to_transform", {"peft_layers_pattern": None},
            f"{PLACE}check_peft_layers_pattern"),
        StartCheck("unfrozen_parameters", together("adapter", "peft_layers_to_transform", "unfrozen_parameters"),
            "unfrozen_parameters and peft_layers_to_transform exclude each other", {"unfrozen_parameters": None},
            f"{PLACE}check_frozen"),
        StartCheck("flash_attn_fuse_mlp",
            lambda given: given.is_on("flash_attn_fuse_mlp") and given.text("adapter") in ("lora", "qlora"),
            "{flash_attn_fuse_mlp} does not work with {adapter}", {"flash_attn_fuse_mlp": False},
            f"{PLACE}check_fused_lora"),
        StartCheck("load_in_8bit",
            lambda given: given.any_on(*LORA_KERNELS) and given.text("adapter") == "lora"
            and given.is_on("load_in_8bit"),
            "{load_in_8bit} does not work with kernels of LoRA", dict.fromkeys(LORA_KERNELS, False),
            f"{PLACE}check_lora_kernels_8bit"),
        StartCheck("trust_remote_code",
            lambda given: given.any_on(*LORA_KERNELS) and given.is_on("trust_remote_code"),
            "{trust_remote_code} does not work with kernels of LoRA", dict.fromkeys(LORA_KERNELS, False),
            f"{PLACE}check_lora_kernels_trust_remote_code"),
        StartCheck("liger_fused_linear_cross_entropy", lambda given: sum(given.is_on(key) for key in LOSSES) > 1,
            f"only one of {', '.join(LOSSES)} can be on",
            lambda given: dict.fromkeys([key for key in LOSSES if given.is_on(key)][1:], False),
            f"{PLACE}check_cross_entropy_conflicts"),
        StartCheck(WRAPPED[0], _wraps_other_layers,
            "the model has no layers of the class in transformer_layer_cls_to_wrap", _own_layers,
            "accelerate/utils/fsdp_utils.py: fsdp2_prepare_auto_wrap_policy"),
        StartCheck("optimizer", lambda given: given.text("optimizer") == "muon" and given.is_on("deepspeed"),
            "{optimizer} does not work with DeepSpeed", {"deepspeed": None}, f"{PLACE}check_muon_deepspeed_fsdp"),
        StartCheck("optimizer", lambda given: given.text("optimizer") == "muon" and _is_fsdp1(given),
            "{optimizer} needs fsdp_version: 2", {"fsdp_version": 2}, f"{PLACE}check_muon_deepspeed_fsdp"),
        StartCheck("optimizer",
            lambda given: given.text("optimizer").startswith("flash_") and given.is_on("deepspeed"),
            "{optimizer} does not work with DeepSpeed", {"deepspeed": None}, f"{PLACE}check_flashoptim_deepspeed_fsdp"),
        StartCheck("optimizer", lambda given: given.text("optimizer").startswith("flash_") and _is_fsdp1(given),
            "{optimizer} needs fsdp_version: 2", {"fsdp_version": 2}, f"{PLACE}check_flashoptim_deepspeed_fsdp"),
        StartCheck("optimizer",
            lambda given: given.text("optimizer") == "q_galore_adamw8bit" and given.is_on("adapter"),
            "{optimizer} does not work with {adapter}", {"optimizer": "adamw_torch_fused"}, f"{PLACE}check_qgalore"),
        StartCheck("optimizer",
            lambda given: "8bit" in given.text("optimizer") and _is_fsdp1(given) and given.is_on("fsdp_config")
            and _fsdp_option(given, "offload_params"),
            "{optimizer} does not work with offloaded parameters", {"optimizer": "adamw_torch_fused"},
            f"{PLACE}check_fsdp_offload_w_8bit_optimizer"),
        StartCheck("optimizer",
            lambda given: given.text("optimizer") in ("adamw_8bit", "adamw_bnb_8bit") and given.is_on("fsdp_config")
            and _fsdp_version(given) == "2",
            "{optimizer} does not work with FSDP2", {"optimizer": "adamw_torch_8bit"},
            f"{PLACE}check_fsdp2_w_8bit_optimizer"),
        StartCheck("optimizer",
            lambda given: given.text("optimizer") in ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit")
            and (given.number("tensor_parallel_size") or 1) > 1,
            "{optimizer} does not work with {tensor_parallel_size}", {"optimizer": "adamw_torch_fused"},
            f"{PLACE}check_tensor_parallel_optimizer"),
        StartCheck("rl",
            lambda given: _fsdp_version(given) == "2" and given.text("rl") in ("dpo", "kto", "orpo", "ipo")
            and given.any_on("load_in_8bit", "load_in_4bit"),
            "{rl} of a quantized model does not work with FSDP2", {"fsdp_version": 1},
            f"{PLACE}check_fsdp2_base_model_quant_rl"),
        StartCheck("deepcompile", without("deepcompile", "deepspeed"),
            "{deepcompile} needs DeepSpeed", {"deepcompile": False}, f"{PLACE}check_deepcompile"),
        _one_of("max_memory", "gpu_memory_limit", f"{PLACE}check_mem_mismatch"),
        StartCheck("fsdp", together("deepspeed", "fsdp"), "deepspeed and fsdp exclude each other", {"fsdp": None},
            f"{PLACE}check_fsdp_deepspeed"),
        StartCheck("model_quantization_config",
            lambda given: given.is_on("model_quantization_config") and given.any_on("load_in_8bit", "load_in_4bit"),
            "{model_quantization_config} does not work with load_in_8bit or load_in_4bit",
            {"load_in_8bit": False, "load_in_4bit": False}, f"{PLACE}check_model_quantization_config_vs_bnb"),
        StartCheck("fsdp_config.cpu_ram_efficient_loading",
            lambda given: given.text("model_quantization_config") == "mxfp4config"
            and _fsdp_option(given, "cpu_ram_efficient_loading"),
            "cpu_ram_efficient_loading does not work with {model_quantization_config}",
            {"fsdp_config.cpu_ram_efficient_loading": False}, f"{PLACE}check_gpt_oss_fsdp_loading"),
        StartCheck("chat_template",
            lambda given: given.text("chat_template") == "jinja" and not given.is_on("chat_template_jinja"),
            "{chat_template} needs chat_template_jinja", {"chat_template": "tokenizer_default"},
            f"{PLACE}check_chat_template_config"),
        *(StartCheck("max_steps", without(key, "max_steps"),
            f"{key} needs max_steps: its length is not known", {"max_steps": 1000},
            f"{PLACE}check_pretraining_w_max_steps, check_streaming_w_max_steps")
            for key in ("pretraining_dataset", "streaming")),
        *(StartCheck("val_set_size", together(key, "val_set_size"), f"{{val_set_size}} does not work with {key}",
            {"val_set_size": 0}, f"{PLACE}check_pretraining_w_val_set_size, check_streaming_w_val_set_size",
            since=since) for key, since in (("pretraining_dataset", "0.13"), ("streaming", ""))),
        StartCheck("streaming",
            lambda given: given.is_on("streaming", "sample_packing") and given.is_stated("datasets[1]"),
            "{streaming} packs samples of one dataset only", {"sample_packing": False},
            f"{PLACE}check_streaming_w_multiple_datasets"),
        StartCheck("neftune_noise_alpha",
            lambda given: given.is_stated("neftune_noise_alpha") and (given.number("neftune_noise_alpha") or 1) < 0,
            "{neftune_noise_alpha} must be above 0", {"neftune_noise_alpha": 5},
            f"{PLACE}validate_neftune_noise_alpha"),
        StartCheck("jagged_restart_steps",
            without("relora", "jagged_restart_steps"),
            "{relora} needs jagged_restart_steps", {"jagged_restart_steps": 150}, f"{PLACE}check_relora"),
        *(StartCheck(key, together("relora", key), f"{{relora}} does not work with {key}", {"relora": False},
            f"{PLACE}check_relora") for key in RELORA_REFUSES),
        StartCheck("torch_compile_options",
            without("torch_compile_options", "torch_compile"),
            "torch_compile_options needs torch_compile: true", {"torch_compile": True},
            f"{SCHEMA}check_torch_compile_options_requires_compile"),
        *(StartCheck("qat", together("qat", key), f"qat does not work with {{{key}}}", {key: None},
            f"{SCHEMA}check_qat_config") for key in ("adapter", "load_in_8bit", "load_in_4bit")),
    ),
)  # fmt: skip
