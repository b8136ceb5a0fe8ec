"""What our engine trains: one table, which train, bench, dryrun and the plans' commands use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.test_decoders import CASES

from meshwright import api, models
from meshwright.errors import InputError
from meshwright.recipes.engine_models import LACKS, TRAINED, lacking


@pytest.fixture
def jamba(tmp_path: Path) -> str:
    path = tmp_path / "jamba.json"
    path.write_text(json.dumps({**CASES["jamba"]["config"], "model_type": "jamba"}))
    return str(path)


def test_every_shipped_model_is_trained() -> None:
    assert not {spec.model_type for spec in models.all_specs() if lacking(spec)}


def test_every_type_of_the_reader_is_in_one_part_of_the_table() -> None:
    diffusers = {name for name in models.known_architectures() if name.endswith("Model")}
    assert not TRAINED & set(LACKS)
    assert set(models.known_architectures()) - diffusers == TRAINED | set(LACKS)


@pytest.mark.parametrize(("verb", "more"), [("train", {"tiny": True}), ("bench", {}), ("dryrun", {})])
def test_a_model_that_the_engine_does_not_train_is_refused_before_it_is_built(
    jamba: str, verb: str, more: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="does not train jamba models") as caught:
        getattr(api, verb)(jamba, **more)
    assert caught.value.field == "model"
    assert any("export" in fix for fix in caught.value.fix)


def test_a_plan_has_no_train_command_for_it(jamba: str) -> None:
    from meshwright.api.plan_responses import plan_response

    found = plan_response(api.recommend(jamba, gpus="8xH100", goal="pretrain"))
    assert "meshwright" not in found.commands
    assert "does not train jamba" in found.no_command["meshwright"]
    assert "engine.model-not-trained" in [one.rule for one in found.findings]
