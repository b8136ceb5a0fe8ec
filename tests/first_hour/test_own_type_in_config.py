"""An own architecture: aliases in a config, a type that nothing knows, bf16 on a CPU."""

from __future__ import annotations

import json
import logging
import logging.handlers
import warnings
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.run import run
from meshwright.engine.model.build import transformers_config
from meshwright.engine.model.config import tiny
from meshwright.engine.warning_filters import no_needless_warnings

HYBRID = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 14, "hybrid_override_pattern": "M-M-M*-M-M*-M-",
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "attention_head_dim": 128,
    "ssm_state_size": 64, "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    "chunk_size": 128, "mlp_hidden_act": "relu2", "vocab_size": 50304, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
}  # fmt: skip


def test_a_size_under_two_names_is_shrunk_under_both() -> None:
    small = tiny(transformers_config(HYBRID), 6)
    assert small.head_dim == small.attention_head_dim == 8


def inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run(["inspect", str(folder)])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out + out.err


def test_a_new_type_is_refused_with_the_ways_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "zephyrus", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
              "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = inspect(tmp_path, capsys)
    assert code == 2
    assert "docs/models.md lists the known types" in text
    assert '"model_type": "llama"' in text
    assert "CONTRIBUTING.md, Add a model" in text
    config["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert inspect(tmp_path, capsys)[0] == 0


def test_torchs_stack_trace_about_bf16_is_not_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        no_needless_warnings()
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:\nframe #0", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(one.message) for one in shown] == ["another"]


def test_torchs_warning_about_compiled_recompute_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    no_needless_warnings()
    log, shown = logging.getLogger("torch._higher_order_ops.wrap"), logging.handlers.BufferingHandler(10)
    monkeypatch.setattr(log, "handlers", [shown])
    log.warning("\nDetected that context_fn is passed to torch.utils.checkpoint under torch.compile.\n")
    log.warning("another")
    assert [one.getMessage() for one in shown.buffer] == ["another"]


@pytest.mark.parametrize(("model", "expected"), [("qwen3_next_80b_a3b", True), ("qwen3_30b_a3b", False)])
def test_megatron_gets_norms_around_zero(model: str, expected: bool) -> None:
    found = meshwright.export(model, to="megatron-lm", gpus="16x8xH100", goal="pretrain")
    assert ("--apply-layernorm-1p" in "".join(found.written.files.values())) == expected
