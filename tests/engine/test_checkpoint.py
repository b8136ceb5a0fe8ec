"""Checkpoints on the disk: whole or not used, kept as asked, written by one run at a time, and never half."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.children import children
from tests.engine.ranks import run
from tests.engine.test_checkpoint_layouts import built

from meshwright.engine.checkpoint import files
from meshwright.engine.checkpoint.contents import ShardMeta, divide, index_of, read_index, read_manifest, read_state
from meshwright.engine.checkpoint.contract import changed_fields, check_contract, contract_of
from meshwright.engine.checkpoint.files import DamagedError, Manifest, verify, write, write_sealed
from meshwright.engine.checkpoint.folder import LOCK, MANIFEST, Folder, Lock
from meshwright.engine.checkpoint.load import newest_good, problems_of
from meshwright.engine.checkpoint.save import SaveError
from meshwright.engine.checkpoint.stopping import StopRequest
from meshwright.engine.faults import RunError
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


def test_a_file_is_what_was_written_or_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = random.Random(0).randbytes(3 * files.BLOCK + 17)
    record = write(path, [content[:5], b"", content[5:]])
    assert path.read_bytes() == content
    assert record.size == len(content)
    verify(path, record, from_disk=True)
    with path.open("r+b") as file:
        file.seek(2 * files.BLOCK)
        file.write(bytes([content[2 * files.BLOCK] ^ 1]))
    with pytest.raises(DamagedError, match="checksum in the block"):
        verify(path, record)
    os.truncate(path, len(content) - 1)
    with pytest.raises(DamagedError, match="bytes long"):
        verify(path, record)
    path.unlink()
    with pytest.raises(DamagedError, match="missing"):
        verify(path, record)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "file", [b"one"])
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", [b"two"])


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.json", ".json", "x.pkl"])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    record = write(tmp_path / "state.json", [b"{}"])
    told = Manifest(1, {"state.json": record, "index.json": record, name: record})
    write_sealed(tmp_path / MANIFEST, msgspec.json.encode(told))
    with pytest.raises(DamagedError, match="no checkpoint has"):
        read_manifest(tmp_path)


# Who writes what


def held(name: str, offset: int, rows: int, whole: int = 4) -> ShardMeta:
    return ShardMeta(name, "F32", (whole,), (offset,), (rows,), 4 * rows)


def test_every_box_is_written_once_and_the_work_is_shared() -> None:
    ranks = [
        [held("cut", 0, 2), held("copied", 0, 4), held("other", 0, 4)],
        [held("cut", 2, 2), held("copied", 0, 4), held("other", 0, 4)],
    ]
    written = divide(ranks)
    assert sorted(len(numbers) for numbers in written) == [2, 2]
    index = index_of(ranks, written)
    assert {name: sum(piece.shape[0] for piece in whole.pieces) for name, whole in index.tensors.items()} == {
        "cut": 4,
        "copied": 4,
        "other": 4,
    }


@pytest.mark.parametrize("parts", [[held("hole", 0, 3)], [held("double", 0, 4), held("double", 0, 2)]])
def test_parts_that_do_not_make_up_a_tensor_are_no_checkpoint(parts: list[ShardMeta]) -> None:
    with pytest.raises(RuntimeError, match="do not make up"):
        index_of([parts], divide([parts]))


# The folder


def published(folder: Folder, *steps: int, keep: int = 2, milestone_every: int = 0) -> list[int]:
    for step in steps:
        folder.unfinished(step).mkdir(parents=True)
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
    folder.unfinished(2).mkdir()
    (folder.path / ".removing-step-00000000").mkdir()
    folder.clean()
    assert sorted(one.name for one in folder.path.iterdir()) == ["latest", "step-00000001"]


def test_a_checkpoint_that_is_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    published(folder, 1)
    folder.unfinished(1).mkdir()
    (folder.unfinished(1) / "new").touch()
    folder.publish(1)
    assert [one.name for one in folder.of(1).iterdir()] == ["new"]


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
    assert "did not end by itself" in capfd.readouterr().err


# The contract


def test_a_changed_training_is_refused_by_its_fields_and_a_changed_layout_is_not() -> None:
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
    check_contract(saved, other, accepted=True)


# Whole checkpoints


def _save_and_damage(rank: int, world: int, folder: str) -> dict[str, Any]:
    _, checkpoints = built(rank, world, "llama", {}, {}, folder)
    checkpoints.save(1, wait=True)
    checkpoints.save(2, wait=True)
    return faults_soak.damage(Path(folder), 12, 0)  # type: ignore[no-any-return]


def test_every_damage_to_every_kind_of_file_is_noticed(tmp_path: Path) -> None:
    (found,) = run(1, _save_and_damage, str(tmp_path))
    assert set(found["tried"]) == {"manifest.json", "state.json", "index.json", "rank-00000.safetensors", "latest"}
    assert found["missed"] == []


def _survives(rank: int, world: int, folder: str) -> list[Any]:
    trainer, checkpoints = built(rank, world, "llama", {}, {}, folder)
    for step in (1, 2, 3):
        trainer.step(step - 1)
        checkpoints.save(step, wait=True)
    expected = read_manifest(checkpoints.folder.of(2))
    torch.distributed.barrier()
    if rank == 0:
        os.truncate(checkpoints.folder.of(3) / "rank-00001.safetensors", 100)
    torch.distributed.barrier()
    _, again = built(rank, world, "llama", {}, {}, folder)
    state = again.resume()
    assert state is not None
    again.trainer.step(2)
    again.save(3, wait=True)  # the place of the damaged one
    same = read_manifest(again.folder.of(2)) == expected
    for step in (1, 2, 3):
        if rank == 0:
            (again.folder.of(step) / "index.json").unlink()
    torch.distributed.barrier()
    try:
        newest_good(again.folder, again.saver.group)
    except RunError as error:
        return [state.step, same, str(error)]
    return []


def test_the_last_good_checkpoint_is_used_and_none_good_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step, same, error in run(2, _survives, str(tmp_path)):
        assert (step, same) == (2, True)
        assert "none of the 3 checkpoints" in error
    told = capfd.readouterr().err
    assert "rank-00001.safetensors is 100 bytes long" in told
    assert "damaged-00000003" in told


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
    saver.settle()  # training goes on
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


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for found in run(2, _full_disk, str(tmp_path)):
        assert found["after"] == (1, [1], ["latest", "step-00000001"])
        assert "No space left on device" in found["error"]
        assert found["steps"] == [1, 4]
        assert 0 < found["figures"]["save_blocked_s"] <= found["figures"]["save_s"]
    assert "training goes on, and the next save tries again" in capfd.readouterr().err


def _goes_on_while_written(rank: int, world: int, folder: str) -> Any:
    """The state changes while it is written: what is on the disk is that of the step."""
    trainer, checkpoints = built(rank, world, "llama", {}, {}, folder)
    trainer.step(0)
    saver, inner = checkpoints.saver, checkpoints.saver._own_file

    def slowly(*args: Any) -> Any:
        time.sleep(0.3)
        return inner(*args)

    saver._own_file = slowly  # type: ignore[method-assign]
    checkpoints.save(1)
    busy = saver.busy
    trainer.step(1)
    saver.finish()
    saver._own_file = inner  # type: ignore[method-assign]
    checkpoints.save(2, wait=True)
    _, again = built(rank, world, "llama", {}, {}, folder)
    (again.folder.of(2) / MANIFEST).unlink() if rank == 0 else None
    torch.distributed.barrier()
    again.resume()
    again.trainer.step(1)
    again.save(3, wait=True)
    firsts = [read_index(again.folder.of(3), read_manifest(again.folder.of(3))), saver.last, busy]
    return [firsts[1:], _same_weights(trainer, again.trainer)]


def _same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.stages[0].parameters(), other.stages[0].parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert run(2, _goes_on_while_written, str(tmp_path)) == [[[2, True], True]] * 2


def _random_numbers(rank: int, world: int, folder: str) -> bool:
    _, checkpoints = built(rank, world, "llama", {}, {}, folder)
    torch.manual_seed(5 + rank)
    torch.rand(3)
    checkpoints.save(1, wait=True)
    expected = torch.rand(4)
    torch.manual_seed(0)
    checkpoints.resume()
    return torch.equal(torch.rand(4), expected)


def test_random_generators_go_on(tmp_path: Path) -> None:
    assert run(2, _random_numbers, str(tmp_path)) == [True, True]


def _of_adapters(rank: int, world: int, folder: str) -> Any:
    from meshwright.recipes import types

    sections = {"goal": "peft", "peft": types.Peft(rank=4)}
    _, checkpoints = built(rank, world, "llama", {}, sections, folder)
    checkpoints.save(1, wait=True)
    path = checkpoints.folder.of(1)
    names = list(read_index(path, read_manifest(path)).tensors)
    return names, read_state(path).base


def test_a_checkpoint_of_adapters_leaves_the_base_out_and_says_where_it_came_from(tmp_path: Path) -> None:
    ((names, base),) = run(1, _of_adapters, str(tmp_path))
    assert all(".lora_" in name or name.startswith("random/") for name in names)
    assert base == {"pretrained": "", "model": "llama3_8b", "seed": 1234}


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    run(1, _of_adapters, str(tmp_path))
    for path in Folder(tmp_path).of(1).iterdir():
        assert path.suffix in (".json", ".safetensors")
        assert not path.read_bytes().startswith((b"\x80", b"PK"))


# Signals


def _asked(*numbers: signal.Signals, grace_s: float = 30.0, pause_s: float = 0.0) -> str:
    late: list[str] = []
    with StopRequest(grace_s, late.append) as request:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s or 0.05)
    return ",".join([request.name, *late])


def test_a_request_is_heard_and_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    term, user = signal.SIGTERM, signal.SIGUSR1
    quiet, twice, both, again, late = children(
        tmp_path,
        lambda: _asked(),
        lambda: _asked(term, term),  # one request, told by two
        lambda: _asked(user, term, pause_s=1.1),
        lambda: _asked(term, term, pause_s=1.1),
        lambda: _asked(user, grace_s=0.05, pause_s=0.3),
    )
    assert [quiet.result, twice.result, both.result, late.result] == ["", "SIGTERM", "SIGUSR1", "SIGUSR1,SIGUSR1"]
    assert again.code == 128 + signal.SIGTERM
    assert problems_of(tmp_path)  # an empty folder is no checkpoint
