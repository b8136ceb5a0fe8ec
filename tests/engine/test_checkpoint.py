"""Checkpoints on the disk: complete or not used, kept as configured, written by one run at a time."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import signal
import sys
import time
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.children import children
from tests.engine.ranks import run
from tests.engine.test_checkpoint_layouts import built

from meshwright.engine.checkpoint import files
from meshwright.engine.checkpoint.contract import changed_fields, check_contract, contract_of
from meshwright.engine.checkpoint.files import DamagedError, Manifest, verify, write, write_checksummed
from meshwright.engine.checkpoint.folder import LOCK, MANIFEST, Folder, Lock
from meshwright.engine.checkpoint.load import find_latest_valid, find_problems
from meshwright.engine.checkpoint.metadata import (
    ShardMeta,
    assign_writers,
    build_index,
    read_index,
    read_manifest,
    read_state,
)
from meshwright.engine.checkpoint.save import SaveError
from meshwright.engine.faults import RunError
from meshwright.engine.stop_request import StopRequest, StopSignal
from meshwright.errors import InputError
from meshwright.recipes.index import load as load_recipe
from meshwright.recipes.types import Layout, Optimizer

_path = Path(__file__).parents[2] / "benchmarks" / "faults.py"
_spec = importlib.util.spec_from_file_location("faults_soak", _path)
assert _spec is not None
assert _spec.loader is not None
faults_soak = importlib.util.module_from_spec(_spec)
sys.modules["faults_soak"] = faults_soak
_spec.loader.exec_module(faults_soak)


# Files


def test_a_file_that_differs_from_what_was_written_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = random.Random(0).randbytes(3 * files.BLOCK + 17)
    record = write(path, [content[:5], b"", content[5:]])
    assert path.read_bytes() == content
    assert record.size == len(content)
    verify(path, record, from_disk=True)
    with path.open("r+b") as file:
        file.seek(2 * files.BLOCK)
        file.write(bytes([content[2 * files.BLOCK] ^ 1]))
    with pytest.raises(DamagedError, match="checksum mismatch in the block"):
        verify(path, record)
    os.truncate(path, len(content) - 1)
    with pytest.raises(DamagedError, match="were written"):
        verify(path, record)
    path.unlink()
    with pytest.raises(DamagedError, match="missing"):
        verify(path, record)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "file", [b"one"])
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", [b"two"])


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.json", ".json", "x.pkl"])
def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    record = write(tmp_path / "state.json", [b"{}"])
    manifest = Manifest(1, {"state.json": record, "index.json": record, name: record})
    write_checksummed(tmp_path / MANIFEST, msgspec.json.encode(manifest))
    with pytest.raises(DamagedError, match="invalid file name"):
        read_manifest(tmp_path)


# Which rank writes which shard


def shard(name: str, offset: int, rows: int, full: int = 4) -> ShardMeta:
    return ShardMeta(name, "F32", (full,), (offset,), (rows,), 4 * rows)


def test_every_chunk_is_written_once_and_the_work_is_shared() -> None:
    ranks = [
        [shard("sharded", 0, 2), shard("replicated", 0, 4), shard("other", 0, 4)],
        [shard("sharded", 2, 2), shard("replicated", 0, 4), shard("other", 0, 4)],
    ]
    written = assign_writers(ranks)
    assert sorted(len(numbers) for numbers in written) == [2, 2]
    index = build_index(ranks, written)
    assert {name: sum(chunk.shape[0] for chunk in tensor.pieces) for name, tensor in index.tensors.items()} == {
        "sharded": 4,
        "replicated": 4,
        "other": 4,
    }


@pytest.mark.parametrize("shards", [[shard("hole", 0, 3)], [shard("double", 0, 4), shard("double", 0, 2)]])
def test_shards_that_do_not_cover_their_tensor_are_refused(shards: list[ShardMeta]) -> None:
    with pytest.raises(RuntimeError, match="do not cover"):
        build_index([shards], assign_writers([shards]))


# The folder


def published(folder: Folder, *steps: int, keep: int = 2, milestone_every: int = 0) -> list[int]:
    for step in steps:
        folder.staging_path(step).mkdir(parents=True)
        folder.publish(step)
        folder.prune(keep, milestone_every)
    return folder.steps()


def test_the_newest_checkpoints_and_the_milestones_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert published(folder, 10, 20, 30, 40, 50, 60, keep=2, milestone_every=20) == [20, 40, 50, 60]
    assert folder.latest() == 60
    assert published(Folder(tmp_path / "other"), 1, 2, 3, keep=1) == [3]


def test_what_interrupted_saves_left_is_cleaned_up(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    published(folder, 1)
    folder.staging_path(2).mkdir()
    (folder.path / ".removing-step-00000000").mkdir()
    folder.clean()
    assert sorted(one.name for one in folder.path.iterdir()) == ["latest", "step-00000001"]


def test_a_checkpoint_that_is_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    published(folder, 1)
    folder.staging_path(1).mkdir()
    (folder.staging_path(1) / "new").touch()
    folder.publish(1)
    assert [one.name for one in folder.step_path(1).iterdir()] == ["new"]


def _locks(folder: Path) -> str:
    try:
        lock = Lock(folder)
    except InputError as error:
        return str(error)
    lock.release()
    return ""


def _dies_with_the_lock(folder: Path) -> None:
    Lock(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = Lock(tmp_path)
    (refused,) = children(tmp_path, lambda: _locks(tmp_path))
    assert f"process {os.getpid()} on" in refused.result
    lock.release()
    (allowed,) = children(tmp_path, lambda: _locks(tmp_path))
    assert allowed.result == ""
    children(tmp_path, lambda: _dies_with_the_lock(tmp_path))
    assert (tmp_path / LOCK).read_text()
    Lock(tmp_path).release()
    assert "did not shut down cleanly" in capfd.readouterr().err


# The contract


def test_a_changed_contract_is_refused_by_its_fields_and_a_changed_layout_is_not() -> None:
    recipe = load_recipe("llama3_8b_pretrain_config")
    saved = contract_of(recipe, {"hidden_size": 64, "transformers_version": "1"})
    resized = msgspec.structs.replace(recipe, layout=Layout(tp=8), cluster="8xH100")
    assert changed_fields(saved, contract_of(resized, {"hidden_size": 64, "transformers_version": "2"})) == {}
    other = contract_of(msgspec.structs.replace(recipe, optimizer=Optimizer(lr=1e-2)), {"hidden_size": 32})
    changed = changed_fields(saved, other)
    assert changed["config.hidden_size"] == (64, 32)
    assert changed["optimizer.lr"] == (recipe.optimizer.lr, 1e-2)
    with pytest.raises(InputError, match=r"optimizer.lr was .* and is 0.01"):
        check_contract(saved, other, accepted=False)
    slower = contract_of(msgspec.structs.replace(recipe, optimizer=Optimizer(lr=1e-2)), {"hidden_size": 64})
    check_contract(saved, slower, accepted=True)
    with pytest.raises(InputError, match=r"config.hidden_size was 64 and is 32"):  # another model is never the same run
        check_contract(saved, other, accepted=True)


@pytest.mark.parametrize(
    ("steps", "samples", "epochs"), [(170, 339, "2.0"), (43, 339, "0.5"), (57, 339, "0.67"), (1, 339, "0.01")]
)
def test_a_changed_number_of_epochs_is_restored_as_epochs(steps: int, samples: int, epochs: str) -> None:
    saved = {"train.steps": steps, "train.global_batch_size": 4}
    with pytest.raises(InputError) as refused:
        check_contract(saved, saved | {"train.steps": 85}, accepted=False, epoch_samples=samples)
    assert refused.value.fix[1] == f"train.epochs={epochs}"
    assert ceil(round(float(epochs) * samples) / 4) == steps
    with pytest.raises(InputError) as by_steps:
        check_contract(saved, saved | {"train.steps": 85}, accepted=False)
    assert by_steps.value.fix[1] == f"train.steps={steps}"


# Complete checkpoints


def _save_and_damage(rank: int, world: int, folder: str) -> dict[str, Any]:
    _, checkpoints = built(rank, world, "llama", {}, {}, folder)
    checkpoints.save(1, wait=True)
    checkpoints.save(2, wait=True)
    return faults_soak.damage(Path(folder), 12, 0)  # type: ignore[no-any-return]


def test_any_damage_to_any_file_is_detected(tmp_path: Path) -> None:
    (found,) = run(1, _save_and_damage, str(tmp_path))
    assert set(found["tried"]) == {"manifest.json", "state.json", "index.json", "rank-00000.safetensors", "latest"}
    assert found["missed"] == []


def _survives(rank: int, world: int, folder: str) -> list[Any]:
    trainer, checkpoints = built(rank, world, "llama", {}, {}, folder)
    for step in (1, 2, 3):
        trainer.step(step - 1)
        checkpoints.save(step, wait=True)
    expected = read_manifest(checkpoints.folder.step_path(2))
    torch.distributed.barrier()
    if rank == 0:
        os.truncate(checkpoints.folder.step_path(3) / "rank-00001.safetensors", 100)
    torch.distributed.barrier()
    _, again = built(rank, world, "llama", {}, {}, folder)
    state = again.resume()
    assert state is not None
    again.trainer.step(2)
    again.save(3, wait=True)  # at the path of the damaged one
    same = read_manifest(again.folder.step_path(2)) == expected
    for step in (1, 2, 3):
        if rank == 0:
            (again.folder.step_path(step) / "index.json").unlink()
    torch.distributed.barrier()
    try:
        find_latest_valid(again.folder, again.saver.group)
    except RunError as error:
        return [state.step, same, str(error)]
    return []


def test_the_last_valid_checkpoint_is_used_and_none_valid_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step, same, error in run(2, _survives, str(tmp_path)):
        assert (step, same) == (2, True)
        assert "none of the 3 checkpoints" in error
    warnings = capfd.readouterr().err
    assert "rank-00001.safetensors has 100 bytes" in warnings
    assert "damaged-00000003" in warnings


def _full_disk(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A disk that fills up on one rank while it writes in the background, is empty again later, and full at the end."""
    trainer, checkpoints = built(rank, world, "llama", {}, {}, folder)
    saver, inner = checkpoints.saver, files._write_all
    checkpoints.save(1, wait=True)

    def full(file: int, data: memoryview) -> None:
        if rank == world - 1:
            os.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(file, data)

    files._write_all = full
    checkpoints.save(2)
    saver.settle()  # training continues
    after = (saver.last, checkpoints.folder.steps(), sorted(one.name for one in checkpoints.folder.path.iterdir()))
    trainer.step(0)
    try:
        checkpoints.save(3, wait=True)
        error = ""
    except SaveError as failed:
        error = str(failed)
    files._write_all = inner
    checkpoints.save(4)
    saver.settle()
    return {"after": after, "error": error, "steps": checkpoints.folder.steps(), "figures": saver.take_figures()}


def test_a_full_disk_loses_a_checkpoint_and_not_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for found in run(2, _full_disk, str(tmp_path)):
        assert found["after"] == (1, [1], ["latest", "step-00000001"])
        assert "No space left on device" in found["error"]
        assert found["steps"] == [1, 4]
        assert 0 < found["figures"]["save_blocked_s"] <= found["figures"]["save_s"]
    assert "training continues, and the next save tries again" in capfd.readouterr().err


def _trains_while_written(rank: int, world: int, folder: str) -> Any:
    """The state changes while it is written; the disk gets the state of the step."""
    trainer, checkpoints = built(rank, world, "llama", {}, {}, folder)
    trainer.step(0)
    saver, inner = checkpoints.saver, checkpoints.saver._write_rank_file

    def slowly(*args: Any) -> Any:
        time.sleep(0.3)
        return inner(*args)

    saver._write_rank_file = slowly  # type: ignore[method-assign]
    checkpoints.save(1)
    busy = saver.busy
    trainer.step(1)
    saver.finish()
    saver._write_rank_file = inner  # type: ignore[method-assign]
    checkpoints.save(2, wait=True)
    _, again = built(rank, world, "llama", {}, {}, folder)
    (again.folder.step_path(2) / MANIFEST).unlink() if rank == 0 else None
    torch.distributed.barrier()
    again.resume()
    again.trainer.step(1)
    again.save(3, wait=True)
    firsts = [read_index(again.folder.step_path(3), read_manifest(again.folder.step_path(3))), saver.last, busy]
    return [firsts[1:], _same_weights(trainer, again.trainer)]


def _same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.stages[0].parameters(), other.stages[0].parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert run(2, _trains_while_written, str(tmp_path)) == [[[2, True], True]] * 2


def _random_numbers(rank: int, world: int, folder: str) -> bool:
    _, checkpoints = built(rank, world, "llama", {}, {}, folder)
    torch.manual_seed(5 + rank)
    torch.rand(3)
    checkpoints.save(1, wait=True)
    expected = torch.rand(4)
    torch.manual_seed(0)
    checkpoints.resume()
    return torch.equal(torch.rand(4), expected)


def test_random_generators_are_restored(tmp_path: Path) -> None:
    assert run(2, _random_numbers, str(tmp_path)) == [True, True]


def _save_adapters(rank: int, world: int, folder: str) -> Any:
    from meshwright.recipes import types

    sections = {"goal": "peft", "peft": types.Peft(rank=4)}
    _, checkpoints = built(rank, world, "llama", {}, sections, folder)
    checkpoints.save(1, wait=True)
    path = checkpoints.folder.step_path(1)
    names = list(read_index(path, read_manifest(path)).tensors)
    return names, read_state(path).base


def test_a_checkpoint_save_adapters_omits_the_base_and_records_its_origin(tmp_path: Path) -> None:
    ((names, base),) = run(1, _save_adapters, str(tmp_path))
    assert all(".lora_" in name or name.startswith("random/") for name in names)
    assert base == {"pretrained": "", "model": "llama3_8b", "seed": 1234}


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    run(1, _save_adapters, str(tmp_path))
    for path in Folder(tmp_path).step_path(1).iterdir():
        assert path.suffix in (".json", ".safetensors")
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


# Signals


def _requested(*numbers: signal.Signals, grace_s: float = 30.0, pause_s: float = 0.0) -> str:
    late: list[str] = []
    with StopRequest(grace_s, late.append) as request:
        request.phase = "training"
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s or 0.05)
    return ",".join([request.name, *late])


def _early(alone: bool) -> str:
    """Return how a stop before training ends: by an exception if nobody waits for this rank."""
    late: list[str] = []
    try:
        with StopRequest(0.2, late.append, alone=alone):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
    except StopSignal as stop:
        return f"raised {stop.name}"
    return ",".join(late)


def test_a_stop_request_survives_more_signals_and_only_the_third_ctrl_c_quits(tmp_path: Path) -> None:
    term, user, ctrl_c = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    quiet, both, again, mixed, late, patient, quits, alone, waited_for = children(
        tmp_path,
        lambda: _requested(),
        lambda: _requested(user, term, pause_s=1.1),
        lambda: _requested(*[term] * 4, pause_s=0.6),
        lambda: _requested(term, ctrl_c, ctrl_c, pause_s=0.6),
        lambda: _requested(user, grace_s=0.05, pause_s=0.3),
        lambda: _requested(ctrl_c, grace_s=0.05, pause_s=0.3),  # nobody kills a run after Ctrl-C
        lambda: _requested(*[ctrl_c] * 3, pause_s=0.6),
        lambda: _early(alone=True),
        lambda: _early(alone=False),
    )
    assert [quiet.result, both.result, again.result] == ["", "SIGUSR1", "SIGTERM"]
    assert [mixed.result, late.result, patient.result] == ["SIGTERM", "SIGUSR1,SIGUSR1", "SIGINT"]
    assert quits.code == 128 + signal.SIGINT
    assert [alone.result, waited_for.result] == ["raised SIGTERM", "SIGTERM"]
    assert find_problems(tmp_path)  # an empty folder is not a checkpoint
