"""Arguments of other trainers typed with a section of ours, and short forms of several fields."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.recipes import overrides
from meshwright.recipes.index import load
from meshwright.recipes.other_names import INTERVALS, OTHER_NAMES
from meshwright.recipes.types import recipe_fields


def refused(typed: str) -> InputError:
    with pytest.raises(InputError) as error:
        overrides.apply(load("llama3_8b_sft_config"), [typed])
    return error.value


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("train.early_stop=2", ["train.early_stop_patience=2", "train.early_stop_delta=2"]),
        ("train.early_stop=0.01", ["train.early_stop_delta=0.01"]),
        ("train.early_stop=1e-3", ["train.early_stop_delta=1e-3"]),
        ("train.early_stop=true", ["train.early_stop_patience=3"]),
        ("early_stop=2", ["early_stop_patience=2", "early_stop_delta=2"]),
    ],
)
def test_a_short_form_of_several_fields_names_them_best_by_the_value(typed: str, fix: list[str]) -> None:
    error = refused(typed)
    assert list(error.fix) == fix
    if not typed.endswith("true"):
        assert "early_stop_patience (validations without a lower loss after which training stops" in error.reason
        assert "early_stop_delta (decrease of the validation loss that counts as lower)" in error.reason


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        # Trainer
        ("warmup_ratio=0.03", "schedule.warmup_steps=30"),
        ("gradient_accumulation_steps=4", "train.global_batch_size=4"),
        ("per_device_train_batch_size=2", "layout.micro_batch_size=2"),
        ("per_device_eval_batch_size=2", "layout.micro_batch_size=2"),
        ("eval_strategy=epoch", "train.eval_every=100 data.validation_part=0.1"),
        ("save_strategy=epoch", "checkpoint.save_every=100"),
        ("save_steps=50", "checkpoint.save_every=50"),
        ("save_total_limit=2", "checkpoint.keep=2"),
        ("logging_steps=5", "train.log_every=5"),
        ("num_train_epochs=3", "train.epochs=3"),
        ("learning_rate=1e-5", "optimizer.lr=1e-5"),
        ("max_grad_norm=1.0", "optimizer.clip_grad=1.0"),
        ("bf16=true", "precision.compute=bf16"),
        ("early_stopping_patience=3", "train.early_stop_patience=3"),
        ("early_stopping_threshold=0.1", "train.early_stop_delta=0.1"),
        # Lightning
        ("max_epochs=3", "train.epochs=3"),
        ("val_check_interval=50", "train.eval_every=50"),
        ("check_val_every_n_epoch=1", "train.eval_every=100 data.validation_part=0.1"),
        ("accumulate_grad_batches=4", "train.global_batch_size=4"),
        ("gradient_clip_val=0.5", "optimizer.clip_grad=0.5"),
        ("limit_val_batches=10", "train.eval_steps=10"),
        ("log_every_n_steps=5", "train.log_every=5"),
        ("precision=bf16-mixed", "precision.compute=bf16"),
        ("min_delta=0.01", "train.early_stop_delta=0.01"),
        ("every_n_train_steps=100", "checkpoint.save_every=100"),
        # torchtune, and scripts
        ("run_val_every_n_steps=100", "train.eval_every=100"),
        ("save_every_n_steps=100", "checkpoint.save_every=100"),
        ("dtype=bf16", "precision.compute=bf16"),
        ("validate_every=100", "train.eval_every=100"),
        ("test_every=100", "train.eval_every=100"),
        ("eval_freq=100", "train.eval_every=100"),
        ("save_interval=100", "checkpoint.save_every=100"),
        ("log_interval=5", "train.log_every=5"),
        ("max_train_steps=500", "train.steps=500"),
    ],
)
def test_an_argument_of_another_trainer_in_the_section_train_names_the_field(typed: str, fix: str) -> None:
    error = refused(f"train.{typed}")
    assert error.fix[0] == fix
    assert error.field == f"train.{typed.partition('=')[0]}"


def test_a_name_with_a_field_of_its_own_section_means_that_field() -> None:
    assert list(refused("optimizer.beta=0.9").fix) == ["optimizer.beta1=0.9", "optimizer.beta2=0.9"]
    assert list(refused("validate_every=7").fix) == ["train.eval_every=7"]


def test_other_names_mean_a_field_or_a_key_that_is_explained() -> None:
    from meshwright.recipes.key_maps import REMOVED_KEYS

    assert {*OTHER_NAMES.values(), *INTERVALS} <= {*recipe_fields(), *REMOVED_KEYS}
