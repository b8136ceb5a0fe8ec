"""Megatron-LM's scripts and logs, and torchtitan's: units of fixes, cut logs, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GPUS = ("--gpus", "2x8xH100")
MEGATRON = (
    "#!/bin/bash\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--swiglu --max-position-embeddings 4096 {positions} --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --vocab-size 128256 --micro-batch-size 1 --global-batch-size {batch} --lr 3e-4 "
    "--min-lr 3e-5 --lr-decay-style {style} --bf16 --mock-data --tokenizer-type NullTokenizer "
    "{lengths}\n"
)
ROPE = "--position-embedding-type rope --rotary-base 500000"
ARGUMENTS = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "swiglu": True, "vocab_size": 128256,
    "max_position_embeddings": 4096, "position_embedding_type": "rope", "rotary_base": 500000, "bf16": True,
    "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 1,
    "use_distributed_optimizer": True, "micro_batch_size": 1, "global_batch_size": 256, "lr": 0.0003, "min_lr": 3e-05,
    "lr_decay_style": "cosine", "lr_warmup_iters": 0, "world_size": 16, "mock_data": True,
}  # fmt: skip
SAMPLES = {"train_samples": 2560000, "train_iters": None, "lr_warmup_samples": 2560, "lr_decay_samples": 2560000}
ITERATIONS = {"train_samples": None, "train_iters": 10000, "lr_warmup_iters": 10}
FRACTION = {"train_iters": 10000, "lr_warmup_fraction": 0.001}


def _script(folder: Path, lengths: str, batch: int = 256, positions: str = ROPE, style: str = "cosine") -> str:
    path = folder / "run.sh"
    path.write_text(MEGATRON.format(lengths=lengths, batch=batch, positions=positions, style=style))
    return str(path)


def _log(folder: Path, arguments: dict[str, Any], prefix: str = "", without: tuple[str, ...] = ()) -> str:
    """Write the log of a run whose loss diverges, with its arguments as Megatron-LM prints them."""
    kept = {name: value for name, value in arguments.items() if name not in without}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(kept.items())]
    lines += ["[before the start of training step] datetime: 2026-01-01 00:00:00", "NVIDIA H100 80GB HBM3"]
    for step in range(1, 101):
        loss = 11.5 - 0.05 * step if step < 60 else 12 + 0.3 * (step - 60)
        lines.append(
            f" [2026-01-01 00:00:00] iteration {step:8d}/   10000 | consumed samples: {step * 256:12d} | "
            f"elapsed time per iteration (ms): 7300.{step % 10} | learning rate: {3e-4 * min(1, step / 10):.6E} | "
            f"global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.5 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    path = folder / "slurm.out"
    path.write_text("".join(f"{prefix}{line}\n" for line in lines))
    return str(path)


def _there(answer: dict[str, Any]) -> list[str]:
    return [text for one in answer["findings"] for remedy in one["remedies"] for text in remedy["there"]]


def _rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


LENGTHS = {
    "--train-samples 25600 --lr-warmup-samples 20000": "--lr-warmup-samples",
    "--train-samples 25600 --lr-warmup-samples 20000 --lr-decay-samples 25600": "--lr-warmup-samples",
    "--train-samples 25600 --lr-warmup-fraction 0.7": "--lr-warmup-fraction",
    "--train-iters 100 --lr-warmup-fraction 0.7": "--lr-warmup-fraction",
    "--train-iters 100 --lr-warmup-iters 70": "--lr-warmup-iters",
    "--train-samples 25600 --lr-warmup-samples 25600": "--lr-warmup-samples",
    "--train-samples 25600 --lr-warmup-iters 10": "--lr-warmup-samples",
    "--train-iters 100 --lr-warmup-samples 2560": "--lr-warmup-iters",
    "--train-samples 2560000 --lr-warmup-samples 25600": "--lr-wsd-decay-samples",
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_fix_of_a_length_has_the_unit_of_the_script(meshwright: Any, tmp_path: Path, lengths: str) -> None:
    style = "WSD" if "wsd" in LENGTHS[lengths] else "cosine"
    path = _script(tmp_path, lengths, style=style)
    answer = meshwright("check", path, *GPUS, "--json").json
    found = [one for one in answer["findings"] if one["severity"] != "advice"]
    assert found
    assert {one["line"] for one in found} == {3}
    fixes = [text for text in found[0]["fix"] if not text.startswith("without")]
    assert [text.split()[0] for text in fixes] == [LENGTHS[lengths]]
    gone = [text.split()[1] for text in found[0]["fix"] if text.startswith("without")]
    words = MEGATRON.format(lengths=lengths, batch=256, positions=ROPE, style=style)
    for flag in (*gone, fixes[0].split()[0]):
        before, _, after = words.partition(f" {flag} ")
        words = f"{before} {after.split(' ', 1)[1] if ' ' in after else chr(10)}" if after else words
    Path(path).write_text(f"{words.rstrip()} {fixes[0]}\n")
    assert meshwright("check", path, *GPUS, "--json").json["findings"] == []


@pytest.mark.parametrize(
    ("prefix", "lengths", "flag"),
    [
        ("", SAMPLES, "--lr-warmup-samples 25600"),
        ("0: ", ITERATIONS, "--lr-warmup-iters 100"),
        ("[2026-01-01 00:00:00,123] ", FRACTION, "--lr-warmup-fraction 0.01"),
        ("2026-01-01T00:00:00Z ", SAMPLES, "--lr-warmup-samples 25600"),
    ],
)
def test_doctor_writes_fixes_in_the_unit_of_the_arguments(
    meshwright: Any, tmp_path: Path, prefix: str, lengths: dict[str, Any], flag: str
) -> None:
    answer = meshwright("doctor", _log(tmp_path, ARGUMENTS | lengths, prefix), *GPUS, "--json").json
    warmups = [text for text in _there(answer) if "warmup" in text]
    assert len(warmups) == 1
    assert warmups[0].startswith(flag)
    assert answer["model"] == "llama3_8b"
    assert all("the log ends at step" in note for note in answer["notes"])  # a short log


def test_doctor_writes_fixes_in_the_unit_of_the_script_that_is_named(meshwright: Any, tmp_path: Path) -> None:
    script = _script(tmp_path, "--train-samples 2560000 --lr-warmup-samples 2560")
    log = _log(tmp_path, {})
    answer = meshwright("doctor", log, "--recipe", script, *GPUS, "--json").json
    assert [text for text in _there(answer) if "warmup" in text] == ["--lr-warmup-samples 25600"]


def test_doctor_keeps_the_warmup_inside_the_training(meshwright: Any, tmp_path: Path) -> None:
    script = _script(tmp_path, "--train-samples 25600 --lr-warmup-fraction 0.4")
    answer = meshwright("doctor", _log(tmp_path, {}), "--recipe", script, *GPUS, "--json").json
    assert [text for text in _there(answer) if "warmup" in text] == ["--lr-warmup-fraction 0.5"]


def test_doctor_uses_the_part_of_the_arguments_that_is_there(meshwright: Any, tmp_path: Path) -> None:
    missing = ("hidden_size", "micro_batch_size", "pipeline_model_parallel_size")
    log = _log(tmp_path, ARGUMENTS | SAMPLES, without=missing)
    answer = meshwright("doctor", log, *GPUS, "--json").json
    assert any("lack hidden_size" in note for note in answer["notes"])
    named = meshwright("doctor", log, "--model", "llama3-8b", *GPUS, "--json").json
    assert any(all(name in note for name in missing) for note in named["notes"])
    assert [text for text in _there(named) if "warmup" in text] == ["--lr-warmup-samples 25600"]
    small = _log(tmp_path, ARGUMENTS | SAMPLES, without=("ffn_hidden_size",))
    answer = meshwright("doctor", small, *GPUS, "--json").json
    assert any("lack ffn_hidden_size" in note and "defaults" in note for note in answer["notes"])


def test_lengths_in_samples_are_converted_and_not_listed_as_dropped(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--train-samples 25600 --lr-warmup-samples 2560 --lr-decay-samples 20480")
    answer = meshwright("import", path, *GPUS, "--json").json
    assert not [one for one in answer["not_imported"] if "samples" in one["key"]]
    for line in ("steps = 100", "warmup_steps = 10", "decay_steps = 80"):
        assert line in answer["text"]


@pytest.mark.parametrize(
    "positions",
    [
        "--position-embedding-type yarn --rotary-base 500000",
        "--position-embedding-type none",
        "--no-position-embedding",
    ],
)
def test_positions_without_a_field_are_refused(meshwright: Any, tmp_path: Path, positions: str) -> None:
    path = _script(tmp_path, "--train-iters 1000", positions=positions)
    answer = meshwright("export", path, "--to", "torchtitan", *GPUS, "--json")
    assert answer.code == 2
    assert answer.json["error"]["field"] == positions.split()[0]
    kept = meshwright("export", path, "--to", "megatron-lm", *GPUS, "--json").json
    if positions == "--no-position-embedding":  # Megatron-LM refuses it alone
        assert kept["error"]["fix"][0].startswith("remove --no-position-embedding")
        return
    assert positions.split()[0] in next(iter(kept["files"].values())).split()


@pytest.mark.parametrize(
    "positions",
    [
        "--use-rotary-position-embeddings --rotary-base 500000",
        f"{ROPE} --no-position-embedding --rotary-percent 1.0 --apply-layernorm-1p",  # as in NVIDIA's examples
    ],
)
def test_rotary_positions_are_exported(meshwright: Any, tmp_path: Path, positions: str) -> None:
    path = _script(tmp_path, "--train-iters 1000", positions=positions)
    answer = meshwright("export", path, "--to", "megatron-lm", *GPUS, "--json")
    assert answer.code == 0
    text = next(iter(answer.json["files"].values()))
    assert all(word in text.split() for word in positions.split())


def test_a_file_gets_the_warnings_of_its_recipe(meshwright: Any, tmp_path: Path) -> None:
    for batch, warned in ((32, True), (256, False)):
        path = _script(tmp_path, "--train-iters 1000", batch=batch)
        Path(path).write_text(Path(path).read_text().replace("--seq-length 4096", "--seq-length 256"))
        found = _rules(meshwright("check", path, *GPUS, "--json").json)
        asked = ("recommend", "llama3-8b", "--goal", "pretrain", *GPUS, "--engine", "megatron", "--seq", "256")
        layout = ("layout.tp=2", "layout.pp=1", "layout.micro_batch_size=1", f"train.global_batch_size={batch}")
        answer = meshwright(*asked, *layout, "--json").json
        assert ("batch.too-few-tokens" in found) == ("batch.too-few-tokens" in _rules(answer)) == warned


LAUNCH = ("launch", "llama3_8b_pretrain_config", "--to", "megatron-lm", *GPUS, "--framework-dir", "/opt/Megatron-LM")
IMAGE = ("--image", "nvcr.io/nvidia/pytorch:25.06-py3", "data.dataset=/data/c4/text")


@pytest.mark.parametrize(
    ("words", "present", "absent"),
    [
        ((), ("container: /data/c4 (data)", "--mount /opt/Megatron-LM:/opt/Megatron-LM", "lost with it"), ()),
        (("--mount", "/data:/data"), ("/opt/Megatron-LM", "lost with it"), ("/data/c4:",)),
        (("checkpoint.folder=/ckpt/a",), ("/ckpt/a (checkpoints)",), ("--write", "lost")),
        (("checkpoint.folder=/c/a", "--mount", "/c:/c", "--mount", "/opt:/opt", "--mount", "/data:/data:ro"), (),
         ("lost", "needs")),
    ],
)  # fmt: skip
def test_a_job_in_a_container_says_what_to_mount(
    meshwright: Any, words: tuple[str, ...], present: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    answer = meshwright(*LAUNCH, "--scheduler", "slurm", *IMAGE, *words, "--json").json
    notes = " ".join(one for one in answer["notes"] if "container" in one)
    assert all(text in notes for text in present)
    assert not any(text in notes for text in absent)


def test_a_job_in_a_container_runs_in_its_folder(meshwright: Any, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    answer = meshwright(*LAUNCH, "--scheduler", "slurm", *IMAGE, "--write", str(folder), "--json").json
    assert not any("lost" in note for note in answer["notes"])
    script = next(folder.glob("*.sbatch")).read_text()
    assert f"--container-mounts=/data/c4:/data/c4,{folder}:{folder} --container-workdir={folder}" in script


def test_a_flag_for_positions_that_megatron_refuses_is_an_error(meshwright: Any, tmp_path: Path) -> None:
    for positions, refused in (("--no-position-embedding", True), (f"{ROPE} --no-position-embedding", False)):
        path = _script(tmp_path, "--train-iters 1000", positions=positions)
        found = _rules(meshwright("check", path, *GPUS, "--json").json)
        assert ("megatron-lm.no-position-embedding" in found) == refused


def test_a_model_outside_the_catalogue_is_named(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "falcon.yaml"
    path.write_text(
        "step_scheduler:\n  global_batch_size: 64\n  local_batch_size: 8\n  max_steps: 100\n"
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: tiiuae/Falcon3-7B-Instruct\n"
        "distributed:\n  strategy: fsdp2\n"
    )
    answer = meshwright("estimate", str(path), "--gpus", "8xH100", "--json")
    assert answer.code == 2
    assert "tiiuae/Falcon3-7B-Instruct" in answer.json["error"]["message"]


def test_the_fix_of_a_list_is_a_list(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "llama.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["float8"]\n'
        "[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 1000\n[parallelism]\ntensor_parallel_degree = 2\n"
    )
    answer = meshwright("check", str(path), "--gpus", "8xH100", "--json").json
    (invalid,) = [one for one in answer["findings"] if one["rule"] == "value.invalid"]
    assert invalid["fix"] == ['model.converters = ["quantize.linear.float8"]']


def test_a_run_script_of_torchtitan_says_what_to_adapt(meshwright: Any) -> None:
    answer = meshwright("export", "llama3_8b_pretrain_config", "--to", "torchtitan", "--gpus", "8xH100", "--json").json
    for name in ("run.sh", "run_0.3.0.sh"):
        head = answer["files"][name].partition("torchrun")[0]
        assert all(word in head for word in ("checkout", "download_hf_assets.py", "hf_datasets", "./outputs"))


@pytest.mark.parametrize(
    ("lengths", "message", "fix"),
    [
        ("--train-samples 2560000 --lr-warmup-samples 512", "512 is a warm-up of 2 steps of 10,000", "131072"),
        ("--train-samples 2560000 --lr-warmup-samples 500", "500 is a warm-up of 1 step of 10,000", "128000"),
        ("--train-samples 2560000 --lr-warmup-samples 2000", "2000 is a warm-up of 7 steps of 10,000", "512000"),
        ("--train-iters 10000 --lr-warmup-fraction 0.0002", "0.0002 is a warm-up of 2 of 10,000 steps", "0.01"),
        ("--train-samples 2560000 --lr-warmup-samples 25600", "", ""),
        ("--train-iters 10000 --lr-warmup-iters 2", "", ""),
        ("--train-samples 25600 --lr-warmup-samples 512", "", ""),  # a trial
    ],
)
def test_a_warmup_in_another_unit_than_its_flag_is_reported(
    meshwright: Any, tmp_path: Path, lengths: str, message: str, fix: str
) -> None:
    findings = meshwright("check", _script(tmp_path, lengths), *GPUS, "--json").json["findings"]
    found = [one for one in findings if one["rule"] == "megatron-lm.warm-up-too-short"]
    flag = next(word for word in lengths.split() if "warmup" in word)
    assert [one["fix"] for one in found] == ([[f"{flag} {fix}"]] if fix else [])
    assert all(f"{flag} {message}" in one["message"] for one in found)
