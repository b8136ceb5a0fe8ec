"""Jobs that are requeued, containers, counts of nodes, and fixes that hold."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import FakeSlurm, fakes

NANO = 'name = "nano"\nmodel = "qwen3-0.6b"\ngoal = "pretrain"\ncluster = "1xH100"\n'
SLURM = ("--scheduler", "slurm", "-t", "10:00")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe; another folder next to it has one too, and data."""
    (tmp_path / "here").mkdir()
    (tmp_path / "team" / "tok").mkdir(parents=True)
    (tmp_path / "team" / "tok" / "pages.txt").write_text("Some text of the team.\n")
    for folder in ("here", "team"):
        (tmp_path / folder / "nano.toml").write_text(NANO)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    (tmp_path / "slurm").mkdir()
    return fakes(tmp_path / "slurm")


def train_words(slurm: FakeSlurm) -> list[str]:
    """Return the train command that srun started last."""
    words = slurm.recorded("srun")
    return words[words.index("train") :]


def test_a_requeued_job_gets_the_folder_it_had(meshwright: Any, here: Path, slurm: FakeSlurm) -> None:
    words = ("launch", "nano.toml", *SLURM, "--cpu", "--gpus", "1", "--write", "jobs")
    answer = meshwright(*words)
    assert "run folder: runs/nano (a restarted job resumes" in answer.err
    script = (here / "jobs" / "nano.sbatch").read_text()
    assert slurm.run(script, SRUN_CODE="75").returncode == 75
    first = train_words(slurm)
    assert slurm.requeues() == ["requeue 30007"]
    assert slurm.run(script, SLURM_RESTART_COUNT="1").returncode == 0
    assert train_words(slurm) == first == ["train", f"{here}/nano.toml", "--out", "runs/nano"]
    for more in (("--out", "/ckpt/a"), ("checkpoint.folder=/ckpt/a",)):
        assert "runs/nano" not in meshwright("launch", "nano.toml", *SLURM, *more).out
    assert "--out " not in meshwright("launch", "nano.toml", *SLURM, "--no-requeue").out
    assert "--out runs/j1" in meshwright("launch", "nano.toml", *SLURM, "--name", "j1").out


def test_every_scheduler_restarts_in_one_folder_or_refuses(meshwright: Any, here: Path) -> None:
    image, again = ("--image", "x"), ("--max-restarts", "3")
    for scheduler, more, folder in (
        ("torchrun", again, "runs/nano"),
        ("hosts", ("--hosts", "a", *again), "runs/nano"),
        ("kubernetes", (*image, *again, "--mount", "disk:/disk"), "/disk/runs/nano"),
        ("kubernetes", (*image, *again, "--mount", "disk:/disk:ro"), "runs/nano"),
        ("skypilot", (*again, "--mount", "s3://b:/disk"), "/disk/runs/nano"),
        ("torchrun", (), None),
    ):
        answer = meshwright("launch", "nano.toml", "--scheduler", scheduler, "--gpus", "1xH100", *more, "--json").json
        text = " ".join([*answer["files"].values(), *answer["commands"]]).split()
        found = text[text.index("--out") + (2 if scheduler == "kubernetes" else 1)] if "--out" in text else None
        assert found == folder, (scheduler, more)
    for scheduler, more in (("slurm", ()), ("torchrun", again)):
        words = ("launch", "nano.toml", "--scheduler", scheduler, "--gpus", "1xH100", *more, "checkpoint.resume=false")
        error = meshwright(*words, "--json").json["error"]
        assert "does not resume" in error["message"]
        assert error["fix"][0] == "checkpoint.resume=true"
        typed = error["fix"][1].removeprefix("remove ")
        kept = [word for word in words if word not in (typed, "3" if typed == again[0] else "")]
        assert meshwright(*kept, *((typed,) if typed == "--no-requeue" else ())).code == 0


def container_of(answer: Any) -> tuple[list[str], list[str]]:
    """Return the options of the container and the train command of a job."""
    line = next(one for one in answer.out.splitlines() if one.startswith("srun "))
    words = shlex.split(line)
    return words[4 : words.index("python")], words[words.index("train") : -1]


def test_a_container_has_the_folders_that_the_job_needs(meshwright: Any, here: Path) -> None:
    team = here.parent / "team"
    image = (*SLURM, "--image", "nvcr.io/nvidia/pytorch:26.08-py3")
    for kind in ("pyxis", "apptainer"):
        words = ("launch", "../team/nano.toml", *image, "--container-kind", kind)
        answer = meshwright(*words, "--mount", "/lustre:/lustre", "--dataset", "/lustre/tok", "--out", "/lustre/x")
        options, train = container_of(answer)
        mounts = [f"/lustre:/lustre,{team}:{team}"] if kind == "pyxis" else ["/lustre:/lustre", f"{team}:{team}"]
        assert [one for one in options if ":/" in one and "docker" not in one] == [
            f"--container-mounts={one}" if kind == "pyxis" else one for one in mounts
        ]
        assert train == ["train", f"{team}/nano.toml", "--dataset", "/lustre/tok", "--out", "/lustre/x"]
        assert "mkdir" not in answer.out
        answer = meshwright(*words, "--dataset", "../team/tok", "--out", "/lustre/x")
        options, train = container_of(answer)
        assert "/lustre/x:/lustre/x" in " ".join(options)
        assert "mkdir -p /lustre/x || exit 2" in answer.out
        assert f"mounted into the container: {team} (the recipe), /lustre/x (checkpoints)" in answer.err
        assert train[2:4] == ["--dataset", f"{team}/tok"]
        assert "lost with" not in answer.err
    answer = meshwright(*words, "--no-requeue")
    assert container_of(answer)[1][-1] == f"{here}/runs/nano"
    assert f"--bind {here}/runs/nano:{here}/runs/nano" in answer.out


def test_images_are_named_as_their_tool_reads_them(meshwright: Any, here: Path) -> None:
    for image, pyxis, apptainer in (
        ("nvcr.io/nvidia/pytorch:26.08-py3", "nvcr.io#nvidia/pytorch:26.08-py3", "docker://{}"),
        ("nvcr.io#nvidia/pytorch:26.08-py3", "{}", "docker://nvcr.io/nvidia/pytorch:26.08-py3"),
        ("localhost:5000/a:1", "localhost:5000#a:1", "docker://{}"),
        ("nvidia/cuda:13", "{}", "docker://{}"),
        ("docker://nvcr.io/a/b:1", "docker://nvcr.io#a/b:1", "{}"),
        ("X.sqsh", f"{here}/X.sqsh", f"{here}/X.sqsh"),
        ("/images/a.sqsh", "{}", "{}"),
    ):
        for kind, expected in (("pyxis", pyxis), ("apptainer", apptainer)):
            words = ("launch", "nano.toml", *SLURM, "--image", image, "--container-kind", kind)
            options = container_of(meshwright(*words))[0]
            found = next((one for one in options if one.startswith("--container-image=")), options[-1])
            assert found.removeprefix("--container-image=") == expected.format(image), (kind, image)
    words = ("launch", "nano.toml", *SLURM, "--image", "/images/a.sif")
    assert container_of(meshwright(*words))[0][-1] == "/images/a.sif"
    assert " apptainer exec " in meshwright(*words).out
    error = meshwright(*words, "--container-kind", "pyxis", "--json").json["error"]
    assert error["fix"] == ["--container-kind apptainer", "--image /images/a.sqsh"]
    words = ("launch", "nano.toml", "--scheduler", "kubernetes", "--image", "nvcr.io/nvidia/pytorch:26.08-py3")
    assert "image: nvcr.io/nvidia/pytorch:26.08-py3" in meshwright(*words).out


def test_fewer_nodes_are_named_with_their_days_and_cost(meshwright: Any) -> None:
    for model, more, gpus, expected in (
        ("qwen3-32b", ("--seq", "16k"), "23x8xH100", "16x8xH100"),
        ("qwen3-32b", ("--seq", "16k"), "17x8xH100", "16x8xH100"),
        ("llama3.2-3b", (), "24x8xH100", "16x8xH100"),
        ("qwen3-30b-a3b", (), "20x8xH100", "16x8xH100"),
    ):
        words = ("recommend", model, "--goal", "pretrain", *more, "--tokens", "60B", "--price", "2.10EUR")
        answer = meshwright(*words, "--gpus", gpus, "--json").json
        why = next(one["why"] for one in answer["suggestions"] if one["title"].startswith("fewer nodes are "))
        assert why.startswith(f"--gpus {expected}: ")
        fewer = meshwright(*words, "--gpus", expected, "--json").json["budget"]
        assert fewer["cost"] < 0.9 * answer["budget"]["cost"]
        assert f"; {fewer['days']:.2f} days and {fewer['cost']:,.0f} EUR in place of " in why
    ranked = meshwright("plan", "qwen3-32b", "--goal", "pretrain", "--seq", "16k", "--gpus", "23x8xH100").out
    assert "fewer nodes are faster:  --gpus 16x8xH100: estimated " in ranked
    (here / "runs.csv").write_text("model,gpus,seq_length,global_batch_size,step_seconds\nllama3-8b,8xH100,4096,64,1\n")
    assert "did you mean step_time_s?" in meshwright("calibrate", "runs.csv").err
    (here / "runs.csv").write_text("recipe,gpus,step_seconds\nllama3_8b_pretrain_config,8xH100,1\n")
    refused = meshwright("calibrate", "runs.csv").err
    assert "unknown column step_seconds" in refused
    assert "rename step_seconds to step_time_s" in refused
    (here / "c.toml").write_text('gpu = "H100"\nnodes = 2\ngpus_per_node = 8\nreserved_gib = 6\n')
    refused = meshwright("estimate", "llama3_8b_pretrain_config", "--gpus", "c.toml")
    assert "did you mean memory_gib (of a GPU, less what is reserved)?" in refused.out + refused.err
    (here / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, '
        '"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 1000}}}'
    )
    checked = meshwright("check", "ds.json", "--model", "llama3-8b", "--gpus", "8xH100", "--json").json["findings"]
    assert {text for one in checked for text in one["fix"] if "warmup_num_steps" in text} == {
        '"scheduler": {"params": {"warmup_num_steps": 10}}'
    }


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_fixes_and_deadlines_of_a_cluster(meshwright: Any) -> None:
    """Fixes are typed as printed; a deadline has its own count, and the cheapest is another."""
    on = ("qwen3_32b_pretrain_config", "--gpus", "23x8xH100", "data.seq_length=16384")
    (note,) = (one for one in meshwright("check", *on, "--json").json["notes"] if "fewer nodes" in one)
    assert "--gpus 16x8xH100" in note
    assert note.endswith(f"; meshwright recommend {' '.join((on[0], on[3]))} --gpus 16x8xH100 plans the layout there")
    assert note.partition("; ")[0] in meshwright("launch", *on, "--scheduler", "slurm").err


def test_what_is_worth_considering_brings_no_finding_on_the_training(meshwright: Any) -> None:
    from meshwright import recommend

    asked = [
        ("qwen3-32b", "24x8xH100", "cpt", 16384),
        ("qwen3-32b", "23x8xH100", "pretrain", 16384),
        ("llama3.2-3b", "16x8xB200", "pretrain", None),
        ("qwen3-0.6b", "4x8xH100", "cpt", None),
        ("qwen3-0.6b", "16x8xB200", "peft", 16384),
        ("llama3.1-8b", "16x8xB200", "sft", 16384),
    ]
    typed = 0
    for model, gpus, goal, seq in asked:
        plan = recommend(model, gpus, goal, seq=seq)
        before = {one.rule for one in plan.findings}
        for one in plan.suggestions:
            if one.overrides:
                after = recommend(model, gpus, goal, seq=seq, overrides=list(one.overrides))
                new = {found.rule for found in after.findings if found.severity != "advice"} - before
                new |= {found.rule for found in after.findings if found.field.startswith("optimizer.")} - before
                assert (after.ok, new) == (True, set()), (model, gpus, goal, one)
                typed += 1
    assert typed >= 6
    on = ("recommend", "qwen3-32b", "--gpus", "24x8xH100", "--goal", "cpt", "--seq", "16k", "--json")
    answer = meshwright(*on).json
    (scaled,) = [one for one in answer["suggestions"] if one["title"] == "scale the batch"]
    assert "optimizer.lr=3e-05" in scaled["overrides"]
    assert "the advised 3e-05 at batch 32 with sqrt scaling, is too high" in scaled["why"]
    after = meshwright(*on, *scaled["overrides"]).json["findings"]
    assert not [one for one in after if one["field"] == "optimizer.lr"]


def test_every_framework_gets_the_same_advice_on_the_training(meshwright: Any, here: Path) -> None:
    words = ("launch", "qwen3-32b", "--gpus", "16x8xH100", "--goal", "cpt", "--scheduler", "slurm")
    for more in ((), ("--to", "automodel"), ("--to", "megatron-lm")):
        answer = meshwright(*words, *more, "--write", "-".join(("job", *more)))
        assert "advice: lr=0.0003 is high for pretraining that continues from Qwen/Qwen3-32B" in answer.err, more


def test_small_stumbles_of_a_cluster(meshwright: Any, here: Path) -> None:
    """Fixes are typed as printed; deadlines, columns and keys of a cluster file get the answer that was meant."""
    on = ("qwen3_32b_pretrain_config", "--gpus", "23x8xH100", "data.seq_length=16384")
    refused = meshwright("launch", *on, "--scheduler", "slurm")
    assert "'layout.stage_layers=[2,2," in refused.err
    fix = next(line for line in refused.err.splitlines() if line.startswith("fix:"))
    assert meshwright("launch", *on, "--scheduler", "slurm", *shlex.split(fix.removeprefix("fix:"))).code == 0
    words = ("size", "qwen3-32b", "--gpu", "H100", "--goal", "pretrain", "--seq", "16k", "--tokens", "60B")
    words = (*words, "--price", "2.1EUR", "--days", "5", "--max-gpus", "128")
    answer, shown = meshwright(*words, "--json").json, meshwright(*words).out
    in_time = [one for one in answer["sizes"] if one["fits"] and one["days"] <= 5]
    cheapest = min(in_time, key=lambda one: one["gpu_hours"])
    assert cheapest["gpus"] > answer["in_time"]["gpus"]
    assert f"in 5 days {answer['in_time']['gpus']} GPUs: " in shown
    assert f"cheapest: {cheapest['gpus']} GPUs: " in shown
    compared = meshwright("compare", "qwen3-32b", "--gpus", "16x8xH100", "--goal", "pretrain").out.splitlines()
    assert " · compiled " in next(line for line in compared if " torchtitan " in line)  # recommend's is not
