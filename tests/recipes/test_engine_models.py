"""What our engine trains: one table, which train, bench, dryrun and the plans' commands use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_decoders import CASES

from meshwright import api, models
from meshwright.errors import InputError
from meshwright.recipes.engine_models import LACKS, TRAINED, is_whole, lacking
from meshwright.rules import RefusedError


@pytest.fixture
def mimo(tmp_path: Path) -> str:
    """A type that our reader reads and transformers has no class for."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32}
    more = {"num_key_value_heads": 8, "vocab_size": 151680, "head_dim": 128, "max_position_embeddings": 32768}
    path = tmp_path / "mimo.json"
    path.write_text(json.dumps({"model_type": "mimo", "num_nextn_predict_layers": 1, **sizes, **more}))
    return str(path)


def test_every_shipped_model_is_trained_but_those_of_remote_code() -> None:
    assert {spec.model_type for spec in models.all_specs() if lacking(spec)} == {"kimi_k25", "mimo", "nemotron-nas"}


def test_no_type_is_trained_and_refused() -> None:
    assert not TRAINED & set(LACKS)


@pytest.mark.parametrize(("verb", "more"), [("train", {"tiny": True}), ("bench", {}), ("dryrun", {})])
def test_a_model_that_the_engine_does_not_train_is_refused_before_it_is_built(
    mimo: str, verb: str, more: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="does not train mimo models") as caught:
        getattr(api, verb)(mimo, **more)
    assert caught.value.field == "model"
    assert any("export" in fix for fix in caught.value.fix)


def test_a_plan_has_no_train_command_for_it(mimo: str) -> None:
    from meshwright.api.plan_responses import plan_response

    found = plan_response(api.recommend(mimo, gpus="8xH100", goal="pretrain"))
    assert "meshwright" not in found.commands
    assert "does not train mimo" in found.no_command["meshwright"]
    assert "engine.model-not-trained" in [one.rule for one in found.findings]


def test_a_type_that_transformers_runs_gets_a_plan_that_trains(tmp_path: Path) -> None:
    """Data parallelism only, whatever the engine would choose for a model with layers of its own."""
    from meshwright.api.plan_responses import plan_response

    path = tmp_path / "jamba.json"
    path.write_text(json.dumps({**CASES["jamba"]["config"], "model_type": "jamba"}))
    jamba = str(path)
    found = plan_response(api.recommend(jamba, gpus="2x8xH100", goal="pretrain"))
    assert "meshwright" in found.commands
    assert not [one for one in found.findings if one.rule.startswith("engine.")]
    spec = models.find(jamba)
    assert is_whole(spec)
    assert not lacking(spec)
    with pytest.raises(RefusedError, match="no tensor parallelism for jamba models"):
        api.train(jamba, tiny=True, nproc=2, overrides=["layout.tp=2"])
