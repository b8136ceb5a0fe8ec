"""torchtitan's commands of its main branch, initial weights by id, and pipelines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

MAIN = (
    "torchrun --nproc-per-node=8 --nnodes=32 -m torchtitan.train --module llama3 --config llama3_70b "
    "--training.max_context_length 32768 --training.num_tokens_per_microbatch_per_dp_rank 32768 "
    "--training.num_tokens_per_train_step 8388608 --parallelism.tensor_parallel_degree 8 "
    "--parallelism.context_parallel_degree 4 --checkpoint.initial_load_path /ckpt/llama33 --training.steps 2384 "
    "--checkpoint.enable\n"
)
RELEASED = (
    "MODULE=llama3 CONFIG=llama3_8b NGPU=8 ./run_train.sh --training.local_batch_size 2 --training.seq_len 8192 "
    "--parallelism.tensor_parallel_degree 2 --training.steps 1000 --optimizer.lr 3e-4\n"
)


def fixed(command: str, findings: list[dict[str, Any]]) -> str:
    """Return a command with the printed fixes: a setting that it names is replaced."""
    words = shlex.split(command)
    for finding in findings:
        name = f"--{finding['field']}"
        if name in words:
            place = words.index(name)
            del words[place : place + 2]
        words += finding["fix"]
    return shlex.join(words)


def test_the_fixes_of_a_command_hold_in_the_next_check(meshwright: Any, tmp_path: Path) -> None:
    script, command = tmp_path / "titan.sh", RELEASED.replace("./run_train.sh", "./run_train.sh ")
    environment, program = command.split("./run_train.sh")
    for _ in range(2):
        script.write_text(f"{environment}./run_train.sh {program}")
        found = meshwright("check", str(script), "--gpus", "8xH200", "--json").json["findings"]
        assert not any("0.2 line computes" in one["message"] for one in found)
        program = fixed(program, found)
    assert not found


def test_a_job_runs_the_version_of_its_file(meshwright: Any, tmp_path: Path) -> None:
    for name, text, gpus, there in (
        ("main.sh", MAIN, "32x8xH100", "--training.num_tokens_per_train_step=8388608"),
        ("released.sh", RELEASED.replace(" --optimizer.lr 3e-4", ""), "8xH200", "--training.local_batch_size=2"),
    ):
        (tmp_path / name).write_text(text)
        words = (str(tmp_path / name), "--gpus", gpus)
        folder = tmp_path / name.removesuffix(".sh")
        done = meshwright("launch", *words, "--scheduler", "slurm", "--write", str(folder))
        assert done.code == 0, done.err
        job = next(folder.glob("*.sbatch")).read_text()
        assert "job.config_file" not in job
        assert "-m torchtitan.train --module llama3 --config llama3_" in job
        assert there in job
        assert [one.name for one in folder.iterdir()] == [f"{folder.name}.sbatch"]
        assert "kernels.loss" not in done.err
        assert "no field in our recipes" not in done.err
        assert not any(word in done.err for word in ("combined with fsdp2", "cp_comm=allgather")), "check reports none"


def test_a_version_without_the_model_is_refused(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "mine.sh"
    script.write_text(MAIN.replace("--module llama3 --config llama3_70b", "--module team.models --config small"))
    words = ("launch", str(script), "--model", "llama2_13b", "--gpus", "32x8xH100", "--scheduler", "slurm")
    refused = meshwright(*words, "--write", str(tmp_path / "job"), "layout.cp=1")
    assert refused.code == 2, refused.err
    assert "is for torchtitan main, which has no preset of llama2_13b" in refused.err
    assert f"meshwright export {script} " in refused.err
    assert " --to torchtitan --gpus 32x8xH100 --out torchtitan_job" in refused.err


def test_weights_by_id_have_one_verdict_and_a_fix(meshwright: Any, tmp_path: Path) -> None:
    words = ("export", "llama3_8b_pretrain_config", "--to", "torchtitan", "--gpus", "8xH100", "--out")
    weights = "checkpoint.pretrained=meta-llama/Meta-Llama-3-8B"
    written = meshwright(*words, str(tmp_path / "a"), weights)
    assert written.code == 0
    assert "download meta-llama/Meta-Llama-3-8B" in written.out
    for name in ("config.toml", "run.sh", "run_0.3.0.sh"):
        file = tmp_path / "a" / name
        assert meshwright("check", str(file), "--gpus", "8xH100").code == 0
        file.write_text(file.read_text().replace("/path/to", "meta-llama"))
        done = meshwright("check", str(file), "--gpus", "8xH100", "--json")
        assert done.code == 1
        [error] = [one for one in done.json["findings"] if one["severity"] == "error"]
        assert "/path/to/Meta-Llama-3-8B" in error["fix"][0]


def test_plans_have_dispatchers_that_the_export_writes(meshwright: Any) -> None:
    words = ("recommend", "--model", "deepseek_v3", "--goal", "pretrain", "--gpus", "32x8xH100", "--engine")
    done = meshwright(*words, "torchtitan", "--json").json
    [changed] = [one for one in done["changes"] if one["field"] == "moe.dispatcher"]
    assert changed["to"] in ("alltoall", "deepep")


PIPELINE = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = {local}
global_batch_size = 64
seq_len = 8192
[parallelism]
pipeline_parallel_degree = 2
"""


def test_a_local_batch_is_one_pass_through_the_pipeline(meshwright: Any, tmp_path: Path) -> None:
    """Gradient accumulation repeats the schedule: each local batch fills and drains the stages."""
    file = tmp_path / "tp.toml"
    found: dict[int, Any] = {}
    for local in (1, 2, 8, 16):
        file.write_text(PIPELINE.format(local=local))
        found[local] = meshwright("estimate", str(file), "--gpus", "8xH100", "--json").json["estimate"]
    steps, logits = (
        [found[local]["step_s"] for local in (16, 8, 2, 1)],
        [found[local]["memory_gib"]["logits"] for local in (1, 2, 8, 16)],
    )
    assert steps == sorted(steps)
    assert steps[-1] > 1.7 * steps[0]
    assert logits == sorted(logits)
    assert logits[-1] > 3 * logits[0]
    shares = {local: one["step_parts_s"]["pp_bubble"] / one["step_parts_s"]["compute"] for local, one in found.items()}
    assert shares[16] < 0.07 < shares[8] < 0.15
    assert shares[1] > 0.8, "one micro batch runs in one of two stages at a time"
    file.write_text(PIPELINE.format(local=8))
    assert (
        meshwright("export", str(file), "--to", "torchtitan", "--gpus", "8xH100", "--out", str(tmp_path / "out")).code
        == 0
    )
    assert "local_batch_size = 8" in (tmp_path / "out" / "config.toml").read_text()
    assert "--training.local_batch_size=8" in (tmp_path / "out" / "run_0.3.0.sh").read_text()
    assert "--parallelism.num_pp_microbatches=8" in (tmp_path / "out" / "run.sh").read_text()


OWN_FLAVOR = """\
[model]
name = "llama3"
flavor = "FLAVOR"
[training]
dataset = "fineweb"
dataset_path = "/data/fineweb"
local_batch_size = 1
seq_len = 8192
"""


@pytest.mark.parametrize(("flavor", "severity"), [("13B", "warning"), ("8B", "error"), ("8B_flex", "error")])
def test_code_with_a_flavor_of_its_own_may_have_datasets_too(
    meshwright: Any, tmp_path: Path, flavor: str, severity: str
) -> None:
    (tmp_path / "own.toml").write_text(OWN_FLAVOR.replace("FLAVOR", flavor))
    model = ("--model", "llama3-8b") if flavor == "13B" else ()
    found = meshwright("check", str(tmp_path / "own.toml"), "--gpus", "8xH100", *model, "--json")
    [finding] = [one for one in found.json["findings"] if one["rule"] == "torchtitan.dataset-name"]
    assert finding["severity"] == severity
    assert found.code == (0 if severity == "warning" else 1)


def test_the_fix_of_a_job_is_the_repair_of_check(meshwright: Any, tmp_path: Path) -> None:
    """A repair with a pipeline changes the local batch, which sets the micro batches of a pass."""
    file = tmp_path / "cpt.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "70B"\n[optimizer]\nname = "AdamW"\nlr = 2e-5\n'
        '[training]\nlocal_batch_size = 1\nglobal_batch_size = 500\nseq_len = 8192\nsteps = 9537\ndataset = "c4"\n'
        "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 16\n"
        'enable_async_tensor_parallel = true\n[activation_checkpoint]\nmode = "full"\n[compile]\nenable = false\n'
    )
    repaired = meshwright("check", str(file), "--gpus", "16x8xH100", "--json").json["repair"]
    assert "training.local_batch_size = 125" in repaired["overrides"]
    words = ("launch", str(file), "--scheduler", "slurm", "--gpus", "16x8xH100", "--write", str(tmp_path / "job"))
    refused = meshwright(*words, "--json")
    assert meshwright(*words, *shlex.split(refused.json["error"]["fix"][0])).code == 0
    assert "local_batch_size = 125" in (tmp_path / "job" / "config.toml").read_text()


FLAVOR = """from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

from {sizes}

llama3_args["lab"] = TransformerModelArgs(
    dim=2048, n_layers=16, n_heads=16, n_kv_heads=8, vocab_size=128256, multiple_of=8192, rope_theta=500000.0
)
"""
LAB = """[model]
name = "llama3"
flavor = "lab"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 4096
steps = 20000
dataset = "c4"
[optimizer]
name = "AdamW"
lr = 3e-4
[activation_checkpoint]
mode = "full"
[checkpoint]
enable = true
[experimental]
custom_import = "MODULE"
"""
ON = ("--gpus", "2x8xH100")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two configs: of a module that imports another one, and of a package's module."""
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "mine"
    (here / "lab").mkdir(parents=True)
    (here / "module.toml").write_text(LAB.replace("MODULE", "lab_flavor"))
    (here / "lab_flavor.py").write_text(FLAVOR.format(sizes="lab_sizes import WIDTH"))
    (here / "lab_sizes.py").write_text("WIDTH = 8192\n")
    (here / "unread.py").write_text("raise SystemExit\n")
    (here / "package.toml").write_text(LAB.replace("MODULE", "lab.flavors"))
    (here / "lab" / "__init__.py").write_text("")
    (here / "lab" / "flavors.py").write_text(FLAVOR.format(sizes=".sizes import WIDTH"))
    (here / "lab" / "sizes.py").write_text("WIDTH = 8192\n")
    return here


def modules_in(folder: Path) -> list[str]:
    return sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*.py"))


def test_a_job_has_the_modules_that_its_toml_imports(meshwright: Any, lab: Path, tmp_path: Path) -> None:
    module, package = ["lab_flavor.py", "lab_sizes.py"], ["lab/__init__.py", "lab/flavors.py", "lab/sizes.py"]
    done = meshwright("launch", "mine/module.toml", *ON, "--scheduler", "slurm", "--write", "job")
    assert done.code == 0, done.err
    assert modules_in(tmp_path / "job") == module
    assert (tmp_path / "job" / "lab_flavor.py").read_text() == (lab / "lab_flavor.py").read_text()
    assert "is not beside" not in done.err
    done = meshwright("launch", "mine/package.toml", *ON, "--scheduler", "slurm", "--write", "job2")
    assert (done.code, modules_in(tmp_path / "job2")) == (0, package), done.err
    done = meshwright("export", "mine/package.toml", "--to", "torchtitan", *ON, "--out", "written")
    assert (done.code, modules_in(tmp_path / "written")) == (0, package), done.err


def test_other_schedulers_have_the_modules_too(meshwright: Any, lab: Path, tmp_path: Path) -> None:
    done = meshwright("launch", "mine/module.toml", *ON, "--scheduler", "torchrun", "--head", "n1", "--write", "job")
    assert f"PYTHONPATH={tmp_path}/job" in done.out, done.err
    pods = ("--scheduler", "kubernetes", "--image", "lab/titan:1")
    done = meshwright("launch", "mine/package.toml", *ON, *pods, "--write", "pods")
    assert done.code == 0, done.err
    manifest = next((tmp_path / "pods").glob("*.y*ml")).read_text()
    assert "lab/flavors.py" in manifest
    assert "subPath: lab.flavors.py" in manifest


def test_a_module_that_is_not_beside_the_toml_is_noted(meshwright: Any, lab: Path) -> None:
    for name, noted in (("their_models", True), ("torchtitan.experiments.lab", False)):
        text = LAB.replace("MODULE", name).replace('"lab"', '"8B"')
        (lab / "away.toml").write_text(text)
        done = meshwright("launch", "mine/away.toml", *ON, "--scheduler", "slurm", "--write", f"job_{noted}")
        assert done.code == 0, done.err
        assert (f"custom_import={name} is not beside" in done.err) == noted
