"""Which of Accelerate's keys exist beside those of the table, and which places refuse others."""

from __future__ import annotations

from typing import Any

TABLE = "accelerate"
SECTIONS = (
    "fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "fp8_config", "dynamo_config",
    "mpirun_config",
)  # fmt: skip
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""What is put in front of the keys of a section that lack it."""
SAGEMAKER = frozenset(
    (
        "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version",
        "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
    )
)  # fmt: skip
READS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
"""The section that each way to share the work reads."""


def known(key: str) -> bool:
    """Whether a key that the table leaves out exists."""
    plain = key.split(".")[0].split("[")[0]
    return key in SECTIONS or plain in SAGEMAKER or key.startswith("megatron_lm_config.megatron_lm_")


def closed(key: str) -> bool:
    """Unknown names at the top are refused; in a section they are set and never read."""
    return "." not in key


def spell(key: str, value: Any) -> str:
    """One setting as a line of YAML, below the name of its section."""
    section, dot, name = key.partition(".")
    if value is None:
        return f"without {key}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    quoted = f"'{text}'" if text.lower() in ("no", "off", "yes", "on") else text
    return f"{section}: {{{name}: {quoted}}}" if dot else f"{key}: {quoted}"
