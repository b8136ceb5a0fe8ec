"""Types that no reader knows: built by transformers in another process, counted exactly, bounded."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.json_text import decode_float
from meshwright.models import MLA, Attention, Dense, LinearMixer, MoE, find, inspection, spec_from_config

LLAMA = {
    "model_type": "renamed_llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
    "tie_word_embeddings": False,
}
ATTENTION: dict[str, Any] = {"path": "attn", "heads": 8, "head_dim": 8, "v_dim": None, "window": None}
LATENT = {"kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": None, "qk_rope_head_dim": None}
PROJECTIONS = [["attn.q_proj.weight", 64, 64], ["attn.k_proj.weight", 16, 64], ["attn.v_proj.weight", 16, 64],
               ["attn.o_proj.weight", 64, 64]]  # fmt: skip
MLP = [["mlp.gate.weight", 160, 64], ["mlp.up.weight", 160, 64], ["mlp.down.weight", 64, 160]]


@pytest.fixture
def described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inspecting program's answers, without a process that imports transformers for each."""
    pytest.importorskip("transformers")
    from meshwright.engine.architecture import describe

    monkeypatch.setattr(inspection, "_described", lambda text: describe(json.loads(text, object_hook=decode_float)))


def row(matrices: list[list[Any]], **changes: Any) -> dict[str, Any]:
    base = {
        "type": "",
        "matrices": matrices,
        "vectors": 128,
        "scan": False,
        "conv": False,
        "experts": None,
        "topk": None,
    }
    return {**base, "attention": {**ATTENTION, **LATENT, "index_topk": None}, **changes}


def layer(matrices: list[list[Any]], **changes: Any) -> Any:
    return inspection._layer(row(matrices, **changes), 64, set())


def test_parts_are_recognised_by_their_shapes() -> None:
    plain = layer([*PROJECTIONS, *MLP])
    assert (plain.mixer, plain.ffn, plain.extra_matmul) == (Attention(8, 2, 8), Dense(160), 0)
    more = layer([*PROJECTIONS, *MLP, ["gate.weight", 10, 64]])
    assert more.params(64) == plain.params(64) + 640


def test_experts_scans_and_latent_attention_keep_every_parameter() -> None:
    experts = {"count": 4, "matmul": 4 * 3 * 64 * 32, "other": 0, "down": [64, 32]}
    mixture = layer([*PROJECTIONS, ["mlp.router.weight", 4, 64]], experts=experts, topk=2)
    assert mixture.ffn == MoE(4, 2, 32)
    assert mixture.params(64) == 128 + 64 * 160 + 256 + experts["matmul"]
    scan = layer([["mixer.in_proj.weight", 300, 64], ["mixer.out_proj.weight", 64, 128]], scan=True, attention=None)
    assert isinstance(scan.mixer, LinearMixer)
    assert scan.params(64) == 128 + 300 * 64 + 64 * 128
    ranks = {**ATTENTION, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    latent = {**ranks, "v_dim": 8, "head_dim": 12, "index_topk": None}
    shapes = [["attn.q_proj.weight", 96, 64], ["attn.kv_a.weight", 20, 64], ["attn.kv_b.weight", 128, 16],
              ["attn.o_proj.weight", 64, 64]]  # fmt: skip
    assert layer([*shapes, *MLP], attention=latent).mixer == MLA(8, 16, 8, 4, 8)


def test_an_unknown_type_is_inspected_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_from_config(LLAMA, "mine")
    known = spec_from_config({**LLAMA, "model_type": "llama"}, "mine")
    assert spec.params == known.params
    assert [g.layer.mixer for g in spec.groups] == [g.layer.mixer for g in known.groups]
    assert "transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 10**9), ("hidden_size", 10**15), ("layer_types", ["full"] * 100_000)]
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(
    key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_described", lambda config: pytest.fail("was built"))
    with pytest.raises(InputError) as caught:
        spec_from_config({**LLAMA, key: value}, "mine")
    assert caught.value.field == key


def test_a_model_of_other_sizes_than_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"hidden": 4096, "layers": [{}] * 3, "class": "LlavaForConditionalGeneration"}
    monkeypatch.setattr(inspection, "_described", lambda config: built)
    with pytest.raises(InputError, match="another architecture"):
        spec_from_config(LLAMA, "mine")


def test_an_encoder_without_a_class_is_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from meshwright.engine.architecture import NotADecoderError, describe

    bert = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 2}
    with pytest.raises(NotADecoderError, match="bert") as built:
        describe(bert)
    printed = json.dumps({"error": str(built.value), "kind": type(built.value).__name__})
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess((), 0, printed, ""))
    with pytest.raises(InputError, match="model_type=bert: no decoder"):
        spec_from_config(bert, "mine")


def test_without_transformers_the_error_says_how_to_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["Renamed"]}))
    with pytest.raises(InputError, match="unknown architecture") as caught:
        find(str(tmp_path))
    assert "transformers" in caught.value.fix[0]


@pytest.mark.usefixtures("described_here")
@pytest.mark.parametrize(("key", "value"), [("num_experts", 8), ("kv_lora_rank", 16), ("use_qk_norm", True)])
def test_a_shape_key_that_the_class_ignores_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InputError, match="another architecture") as caught:
        spec_from_config({**LLAMA, key: value}, "mine")
    assert caught.value.field == key


@pytest.mark.usefixtures("described_here")
def test_sizes_outside_the_section_of_the_decoder_are_refused() -> None:
    flat = {**LLAMA, "model_type": "renamed_gemma", "architectures": ["Gemma3ForConditionalGeneration"]}
    with pytest.raises(InputError, match="another architecture") as caught:
        spec_from_config(flat, "mine")
    assert caught.value.field == "hidden_size"


@pytest.mark.usefixtures("described_here")
def test_a_renamed_wrapper_is_counted_with_its_encoder() -> None:
    case = json.loads(Path(__file__).with_name("wrapped.json").read_text("utf-8"))["llama4"]
    config = {**case["config"], "model_type": "renamed", "architectures": ["Llama4ForConditionalGeneration"]}
    assert spec_from_config(config, "mine").params.total == case["params"][0]
