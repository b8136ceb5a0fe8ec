"""Accelerate's keys outside the key map, and which sections reject unknown keys."""

from __future__ import annotations

from typing import Any

TABLE = "accelerate"
SECTIONS = (
    "fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "fp8_config", "dynamo_config",
    "mpirun_config",
)  # fmt: skip
PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
"""Prefix that Accelerate adds to the keys of a section."""
SAGEMAKER = frozenset(
    (
        "ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version",
        "transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args",
    )
)  # fmt: skip
SECTION_OF_TYPE = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
"""Section that each distributed_type uses."""


def known(key: str) -> bool:
    """Return whether a key outside the key map exists."""
    plain = key.split(".")[0].split("[")[0]
    return key in SECTIONS or plain in SAGEMAKER or key.startswith("megatron_lm_config.megatron_lm_")


def closed(key: str) -> bool:
    """Return whether an unknown key is an error: a key or section at the top level; a key of a section is ignored."""
    return key.partition(".")[0] not in SECTIONS


def format_setting(key: str, value: Any) -> str:
    """Return a setting as a line of YAML, inside its section."""
    section, dot, name = key.partition(".")
    if value is None:
        return f"without {key}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    quoted = f"'{text}'" if text.lower() in ("no", "off", "yes", "on") else text
    return f"{section}: {{{name}: {quoted}}}" if dot else f"{key}: {quoted}"
