"""Configs that nobody has tried: contradictions, wrong kinds of values, and files of other libraries."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright import file_access, models
from meshwright.cli.run import run
from meshwright.errors import InputError, MeshwrightError
from meshwright.models import inspection
from meshwright.notes import no_notes

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
INTERNLM = {**LLAMA, "model_type": "internlm2", "bias": False}
WRONG = [None, -1, 0, 2.5, "12", [], [1], {}, {"a": 1}, True, float("nan"), float("inf"), 10**12, 10_000, "", [None]]
ADDED = (
    "layer_types", "rope_scaling", "rope_parameters", "quantization_config", "text_config", "vision_config",
    "architectures", "block_configs", "num_nextn_predict_layers", "auto_map", "sliding_window", "_class_name",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], config: Any, *words: str) -> tuple[int, str]:
    """Return the exit code of a command on a config.json, and all that it prints."""
    Path("config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        run([*words])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def test_every_value_of_a_config_may_be_wrong() -> None:
    for name in ("llama3_8b", "deepseek_v3", "gemma3_vl_4b", "nemotron_3_nano", "wan_1_3b"):
        published = models.config_of(name)
        for key in (*published, *ADDED):
            for value in WRONG:
                changed = copy.deepcopy(published) | {key: value}
                with no_notes(), suppress(MeshwrightError):
                    assert models.spec_from_config(changed, "x").params.total > 0


@pytest.mark.parametrize("section", [2.5, [1], 1, "12", True])
def test_a_section_that_is_not_an_object_is_one_error(section: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA, "text_config": section}
    for words in (("inspect",), ("recommend", "--gpus", "64xH100", "--goal", "pretrain")):
        code, text = call(capsys, config, words[0], "./config.json", *words[1:])
        assert code == 2
        assert text.startswith("error: text_config=")
        assert "must be an object" in text


def test_a_decoder_inside_a_decoder_is_refused() -> None:
    with pytest.raises(InputError, match="llama models have no text_config"):
        models.spec_from_config({**LLAMA, "text_config": {"hidden_size": 4096}}, "x")
    gemma = models.config_of("gemma3_vl_4b")
    with pytest.raises(InputError, match="text_config"):
        models.spec_from_config({**gemma, "text_config": {"text_config": gemma["text_config"]}}, "x")


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{", '{"model_type": "llama", "hidden_size": 1e400}', "[" * 100_000, "{}" * 10]
)
def test_files_that_are_no_config_are_one_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = call(capsys, text, "inspect", "./config.json")
    assert code == 2
    assert printed.startswith("error: ")
    assert "Traceback" not in printed


def test_a_huge_file_is_refused_before_it_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys, {**LLAMA, "id2label": "x" * 6_000_000}, "inspect", "./config.json")
    assert code == 2
    assert "more than the limit" in text


def test_both_widths_of_deepseek_v4_must_agree() -> None:
    config = models.config_of("deepseek_v4_flash")
    with pytest.raises(InputError, match="contradicts moe_intermediate_size"):
        models.spec_from_config({**config, "intermediate_size": config["moe_intermediate_size"] + 1}, "x")


def test_a_pattern_of_nemotron_may_be_a_list() -> None:
    config = models.config_of("nemotronh_4b")
    pattern = config["hybrid_override_pattern"]
    listed = models.spec_from_config({**config, "hybrid_override_pattern": list(pattern)}, "x")
    assert listed.params == models.find("nemotronh_4b").params


def test_a_type_with_its_own_code_is_planned_and_says_that_it_is_not_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = call(capsys, INTERNLM, "recommend", "./config.json", "--gpus", "64xH100", "--goal", "pretrain")
    assert code == 0
    assert "not meshwright: it does not train internlm2 models" in text
    code, text = call(capsys, INTERNLM, "train", "./config.json", "--goal", "pretrain", "--tiny", "--dataset", "mock")
    assert code == 2
    assert "a model's own code is never run" in text
    assert f"meshwright recommend {Path('config.json').resolve()}" in text


def test_a_catalogue_model_that_is_not_trained_is_named_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys, {}, "train", "mimo-7b", "--goal", "pretrain", "--tiny", "--dataset", "mock")
    assert code == 2
    assert "meshwright recommend XiaomiMiMo/MiMo-7B-Base" in text


LAGUNA = {
    "model_type": "laguna", "gating": "per-head", "head_dim": 32, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 64, "vocab_size": 512,
}  # fmt: skip


def test_values_that_no_row_has_are_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = pytest.importorskip("meshwright.engine.architecture")
    with file_access.only({}), pytest.raises(InputError, match="only supported with true"):
        models.spec_from_config(LAGUNA, "x")  # over HTTP no process is started
    monkeypatch.setattr(inspection, "_described", lambda text: architecture.describe(json.loads(text)))
    found = models.spec_from_config(LAGUNA, "x")
    assert "LagunaForCausalLM" in found.inspected_by
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LAGUNA))
    assert found.params.total == sum(one.numel() for one in built.parameters())


def test_a_decoder_s_file_may_say_is_decoder_false() -> None:
    architecture = pytest.importorskip("meshwright.engine.architecture")
    config = {**LLAMA, "is_decoder": False, "num_hidden_layers": 2, "vocab_size": 320, "hidden_size": 64,
              "intermediate_size": 128}  # fmt: skip
    assert architecture.describe(config)["class"] == "LlamaForCausalLM"
