"""A model on its first day: files of new types, of types with other names, and files that cannot be right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.json_text import decode_float
from meshwright.models import inspection, spec_from_config

MODELS = Path(__file__).parents[1] / "models"
WRAPPED = json.loads((MODELS / "wrapped.json").read_text("utf-8"))
DECODERS = json.loads((MODELS / "decoders.json").read_text("utf-8"))


@pytest.fixture
def described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inspecting program's answers, without a process that imports transformers for each."""
    pytest.importorskip("transformers")
    from meshwright.engine.architecture import describe

    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))


@pytest.fixture
def inspected(tmp_path: Path, meshwright: Any) -> Callable[[dict[str, Any]], tuple[int, str, str]]:
    """What `meshwright inspect config.json` prints for a config."""

    def run(config: dict[str, Any]) -> tuple[int, str, str]:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        found = meshwright("inspect", str(file))
        return found.code, found.out, found.err

    return run


def test_minimax_m3_as_published_has_block_sparse_layers(inspected: Any) -> None:
    code, out, _ = inspected(DECODERS["minimax_m3"]["config"])
    assert code == 0
    assert "3 × [block-sparse attention, experts]" in out
    assert "top 2,048 keys (indexer of 4 heads)" in out
    assert f"{DECODERS['minimax_m3']['params'][0]:,} parameters" in out


@pytest.mark.parametrize(
    ("key", "value"), [("moe_layer_freq", [0, 2, 1, 1, 1, 1]), ("moe_layer_freq", [0]), ("moe_intermediate_size", 64)]
)
def test_a_contradiction_in_minimax_m3_is_one_error(key: str, value: Any, inspected: Any) -> None:
    code, _, err = inspected({**DECODERS["minimax_m3"]["config"], key: value})
    assert (code, key in err, err.count("\n")) == (2, True, 1)


def test_llama4_without_vision_config_has_the_encoder_of_the_class_that_it_names() -> None:
    config = {key: value for key, value in WRAPPED["llama4"]["config"].items() if key != "vision_config"}
    alone = spec_from_config({**config, "architectures": ["Llama4ForCausalLM"]}, "scout")
    whole = spec_from_config({**config, "architectures": ["Llama4ForConditionalGeneration"]}, "scout")
    assert alone.vision is None
    assert whole.vision is not None
    assert whole.params.total - whole.params.vision == alone.params.total


def test_llama4_is_tied_if_its_decoder_is() -> None:
    config = WRAPPED["llama4"]["config"]
    assert not spec_from_config({**config, "tie_word_embeddings": True}, "scout").tied
    text = {**config["text_config"], "tie_word_embeddings": True}
    assert spec_from_config({**config, "text_config": text}, "scout").tied


@pytest.mark.usefixtures("described_here")
def test_a_language_model_with_sound_is_inspected() -> None:
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 200}  # fmt: skip
    sound = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    config = {"model_type": "qwen2_audio", "text_config": text, "audio_config": sound}
    spec = spec_from_config(config, "mine")
    decoder = spec_from_config({**text, "tie_word_embeddings": False}, "decoder").params.total
    assert spec.num_layers == 3
    assert 0 < spec.params.total - decoder < 500_000


@pytest.mark.usefixtures("described_here")
def test_a_renamed_dbrx_is_counted_with_its_experts() -> None:
    case = DECODERS["dbrx"]
    config = {**case["config"], "model_type": "mine", "architectures": ["DbrxForCausalLM"]}
    common = {"_name_or_path": "", "output_attentions": False}  # what transformers writes into every section
    config["attn_config"] = {**config["attn_config"], **common}
    params = spec_from_config(config, "mine").params
    assert [params.total, params.routed] == case["params"]


@pytest.mark.usefixtures("described_here")
def test_a_bias_that_the_reader_does_not_know_is_inspected_where_the_class_has_it() -> None:
    config = DECODERS["falcon_h1"]["config"]
    plain, biased = (spec_from_config({**config, "mamba_proj_bias": on}, "mine") for on in (False, True))
    assert plain.inspected_by == ""
    assert "FalconH1ForCausalLM" in biased.inspected_by
    assert biased.params.total > plain.params.total


UNUSED = """
frameworks.shell frameworks.check_file frameworks.detection frameworks.load frameworks.cluster_task
frameworks.trainer_program frameworks.trainer_args frameworks.megatron_lm.parse frameworks.megatron_bridge.parse
frameworks.torchtitan.parse recipes.key_maps.automodel recipes.key_maps.kempnerforge recipes.key_maps.megatron_lm
recipes.key_maps.torchtitan recipes.key_maps.accelerate recipes.key_maps.deepspeed recipes.benchmarks recipes.files
recipes.dataset_file config_io planner.sizing planner.ranking engine.rank_env api.own_jobs
"""


@pytest.mark.parametrize(
    ("model", "goal", "gpus"), [("llama3-8b", "pretrain", "8xH100"), ("qwen3-30b-a3b", "sft", "8xH100")]
)
def test_recommend_loads_only_what_a_plan_needs(model: str, goal: str, gpus: str) -> None:
    """An answer takes 0.35 s of CPU, most of it imports; time cannot be tested on a busy machine, modules can."""
    program = f"""
import sys
from meshwright.cli.run import run
try:
    run(["recommend", {model!r}, "--gpus", {gpus!r}, "--goal", {goal!r}])
except SystemExit:
    pass
unused = [*(f"meshwright.{{one}}" for one in {UNUSED.split()!r}), "html", "csv", "dataclasses", "torch"]
print(*(name for name in unused if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_an_unknown_type_says_how_a_class_of_transformers_is_named(inspected: Any) -> None:
    pytest.importorskip("transformers")
    config = {**DECODERS["dbrx"]["config"], "model_type": "mine", "architectures": ["MineForCausalLM"]}
    code, _, err = inspected(config)
    assert code == 2
    assert 'that class in "architectures"' in err


def test_a_negative_width_of_heads_has_no_negative_fix(inspected: Any) -> None:
    code, _, err = inspected({**DECODERS["gpt_neox"]["config"], "model_type": "llama", "head_dim": -7})
    assert code == 2
    assert "between 1 and" in err
    assert "-6" not in err


def test_generated_tokens_without_visible_text_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meshwright: Any
) -> None:
    pytest.importorskip("torch")
    from meshwright.engine.post_training import generate as module

    blank = module.GenerateResult(" \n", 2, 5, 0.1, False, "cpu")
    monkeypatch.setattr(module, "generate", lambda *given: blank)
    found = meshwright("generate", str(tmp_path), "Hello")
    assert found.code == 0
    assert "5 tokens without visible text" in found.err
