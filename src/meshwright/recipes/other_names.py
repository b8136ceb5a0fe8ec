"""Names that Lightning, torchtune, Keras and scripts use for settings of ours, for did-you-mean only.

The Trainer's own arguments are accepted as keys (key_maps/hugging_face.py) or explained (hugging_face_removed.py).
"""

from __future__ import annotations

from meshwright.models.numerics import EPSILONS

INTERVALS = {
    "train.eval_every": (
        *("eval", "evaluate", "evaluation", "val", "valid", "validate", "validation", "test", "run_val", "run_eval"),
    ),
    "checkpoint.save_every": ("save", "saving", "checkpoint", "checkpoints", "checkpointing", "ckpt"),
    "train.log_every": ("log", "logging", "print", "report"),
}
UNITS = (
    *("every", "every_steps", "every_n_steps", "every_n_train_steps", "every_n_iters", "steps", "interval"),
    *("freq", "frequency", "period", "step_interval", "iters"),
)
"""A word for what is done, and one for how often: validate_every, save_freq, print_interval."""
NAMES = {
    "train.epochs": ("max_epochs", "max_num_epochs", "n_epochs", "nb_epochs", "epoch", "total_epochs", "train_epochs"),
    "train.steps": (
        *("max_train_steps", "num_train_steps", "num_training_steps", "training_steps", "total_steps", "num_steps"),
        *("iterations", "num_iterations", "max_iterations", "max_iters", "total_iterations", "updates", "max_updates"),
    ),
    "train.eval_every": ("val_check_interval",),
    "train.eval_steps": (
        *("limit_val_batches", "limit_eval_batches", "val_batches", "eval_batches", "num_eval_batches"),
        *("eval_iters", "val_iters", "test_iters", "max_validation_steps"),
    ),
    "train.early_stop_delta": ("min_delta", "early_stop_threshold", "early_stopping_delta", "early_stopping_min_delta"),
    "train.early_stop_patience": ("patience", "early_stopping", "early_stopping_rounds", "early_stopping_steps"),
    "optimizer.clip_grad": (
        *("gradient_clip_val", "gradient_clipping", "gradient_clip", "grad_clip", "clip_grad_norm", "grad_norm_clip"),
        *("clip_norm", "max_norm", "clip_gradients"),
    ),
    "checkpoint.save_every": ("every_n_train_steps",),
    "checkpoint.keep": ("save_top_k", "keep_last_n", "keep_checkpoints", "max_checkpoints"),
    "data.workers": ("num_workers", "dataloader_workers"),
    # arguments of the Trainer that are explained
    "gradient_accumulation_steps": (
        *("accumulate_grad_batches", "grad_accumulation", "grad_accum", "grad_accumulation_steps"),
        *("gradient_accumulation", "accumulation_steps", "grad_acc_steps"),
    ),
    "trainer.num_nodes": ("num_nodes", "nodes", "nnodes"),
    "trainer.devices": ("devices", "num_gpus", "gpus", "n_gpus"),
    "max_steps_per_epoch": ("steps_per_epoch", "limit_train_batches"),
    "dtype": ("precision", "mixed_precision"),
    "resume_from": ("resume", "ckpt_path", "resume_from_ckpt"),
    "output_dir": ("out", "out_dir", "save_dir", "default_root_dir", "checkpoint_dir", "run_dir"),
    "report_to": ("logger",),
    "tf32": ("allow_tf32",),
}
"""Our field, or a key that is explained → its other names."""

ARCHITECTURE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok",),
    "norm_eps": EPSILONS,
}
"""Our field of the section architecture → its names in a config.json."""

DEGREES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
DEGREE_NAMES = {
    name: f"layout.{short}"
    for word, short in DEGREES.items()
    for name in (
        *(f"{word}_parallel", f"{word}_parallelism", f"{word}_parallel_size", f"{word}_parallel_degree"),
        *(f"{word}_model_parallel_size", f"{word}_size", f"{short}_size", f"{short}_degree", f"num_{short}"),
    )
}
"""Name of a degree of model parallelism in Megatron, vLLM, torchtitan and AutoModel → our field."""

OTHER_NAMES = {
    **DEGREE_NAMES,
    **{name: f"architecture.{field}" for field, names in ARCHITECTURE_NAMES.items() for name in names},
    **{f"{what}_{unit}": field for field, words in INTERVALS.items() for what in words for unit in UNITS},
    **{name: field for field, names in NAMES.items() for name in names},
}
"""Another trainer's name → our field, or the key that says what it is here."""
