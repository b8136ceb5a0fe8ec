"""Calibration profiles and error bands are validated data, and a case may carry its own."""

from __future__ import annotations

import copy

import msgspec
import pytest

from meshwright import costs
from meshwright.clusters import gpus
from meshwright.costs.calibration import PROFILES, from_tables, read_tables, shipped
from meshwright.costs.uncertainty import error_bands, error_class, step_band
from meshwright.errors import InputError
from meshwright.recipes.types import ENGINES

from .helpers import case, diffusion, hybrid, llama, mixtral


def test_every_engine_and_gpu_has_a_profile():
    own = shipped()
    assert set(ENGINES) <= set(own.engines)
    assert {gpu.arch for gpu in gpus()} <= set(own.gpus)
    names = {gpu.name for gpu in gpus()}
    assert all(set(profile.clock) <= names for profile in own.gpus.values())


def test_shares_are_shares():
    for profile in shipped().gpus.values():
        for share in (
            *profile.matmul.values(),
            *profile.attention.values(),
            profile.hbm,
            profile.link,
            profile.network,
        ):
            assert 0 < share <= 1


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("shared", "latency_s", "soon"), ("gpu_hopper", "hbm", -1.0), ("engine_megatron", "lunch_s", 0.1)],
)
def test_invalid_values_are_rejected(table, key, value):
    tables = copy.deepcopy(read_tables(PROFILES))
    tables[table][key] = value
    with pytest.raises(InputError):
        from_tables(tables)


def test_a_broken_file_is_rejected(tmp_path):
    (tmp_path / "shared.toml").write_text("latency_s = = 1")
    with pytest.raises(InputError, match="not a profile"):
        read_tables(tmp_path)


def test_a_case_may_carry_its_own_calibration():
    own = shipped()
    slow = msgspec.structs.replace(own.gpus["hopper"], matmul={**own.gpus["hopper"].matmul, "bf16": 0.1})
    changed = msgspec.structs.replace(own, gpus={**own.gpus, "hopper": slow})
    one = case(llama())
    assert costs.step_time(one.replace(calibration=changed)).compute > 2 * costs.step_time(one).compute


def test_bands_widen_beyond_the_measured_range():
    known = step_band(case(llama(), "64xH100", engine="megatron"))
    assert known == error_bands().step_pct["dense"]
    assert step_band(case(llama(), "64xMI300X", engine="megatron")) > known
    assert step_band(case(llama(), "64xH100", engine="deepspeed")) > known
    assert step_band(case(llama(), "64xH100", engine="megatron", matmul="fp8_block")) > known
    assert step_band(case(llama(), "100000xH100", engine="megatron")) > known
    assert step_band(case(llama(), "64xH100", engine="megatron", seq_length=2**20)) > known
    assert step_band(case(diffusion(), "64xH100", engine="megatron")) > known


def test_error_classes():
    assert error_class(case(llama())) == "dense"
    assert error_class(case(mixtral(), force_balance=True)) == "moe"
    assert error_class(case(mixtral(), speed_profile="megatron_untuned")) == "functional"
    assert error_class(case(hybrid())) == "hybrid"
    assert error_class(case(mixtral(), goal="peft")) == "peft"
