"""The training program of a script is found behind launchers and wrappers."""

from __future__ import annotations

import pytest

from meshwright.frameworks.shell import LaunchCommand, find_launches, read_script


def only(text: str) -> LaunchCommand:
    (found,) = find_launches(read_script(text, "run.sh"))
    return found


def size(run: LaunchCommand) -> tuple[object, object]:
    return (run.nodes.value if run.nodes else None, run.gpus_per_node.value if run.gpus_per_node else None)


@pytest.mark.parametrize(
    ("text", "launcher", "program", "is_module", "args"),
    [
        ("torchrun --nproc-per-node 8 train.py --a 1", "torchrun", "train.py", False, "--a 1"),
        (
            "torchrun --standalone --nproc_per_node=8 -m torchtitan.train --a",
            "torchrun",
            "torchtitan.train",
            True,
            "--a",
        ),
        ("python -m torch.distributed.run --nnodes 2 t.py", "torchrun", "t.py", False, ""),
        ("python3 -u -m torch.distributed.launch --use_env --nproc_per_node=8 t.py x", "torchrun", "t.py", False, "x"),
        ("/opt/conda/bin/python3.11 -W ignore train.py --a", "python", "train.py", False, "--a"),
        ("python -m kempnerforge.train configs/a.toml", "python", "kempnerforge.train", True, "configs/a.toml"),
        ("accelerate launch --config_file c.yaml --multi_gpu t.py --x", "accelerate", "t.py", False, "--x"),
        ("accelerate launch -m my.mod --x", "accelerate", "my.mod", True, "--x"),
        ("deepspeed --num_gpus 8 t.py --deepspeed ds.json", "deepspeed", "t.py", False, "--deepspeed ds.json"),
        ("automodel c.yaml --nproc-per-node 8 --a.b 1", "automodel", "automodel", False, "c.yaml --a.b 1"),
        ("am c.yaml", "automodel", "am", False, "c.yaml"),
        ("env -u B A=1 nohup time sudo -E torchrun t.py &", "torchrun", "t.py", False, ""),
        ("exec torchrun t.py", "torchrun", "t.py", False, ""),
        ("uv run --with torch train.py --a", "python", "train.py", False, "--a"),
        ("uv run -m pkg.train --a", "python", "pkg.train", True, "--a"),
        ("poetry run python train.py", "python", "train.py", False, ""),
        ("timeout -k 5 3600 numactl --membind 0 python t.py", "python", "t.py", False, ""),
        ("bash -lc 'cd x && torchrun t.py --a'", "torchrun", "t.py", False, "--a"),
        ("srun -N 2 -l bash -c 'torchrun t.py'", "torchrun", "t.py", False, ""),
        ("srun --mpi=pmix --container-mounts a:b torchrun t.py", "torchrun", "t.py", False, ""),
        ("srun --nodes 2 python t.py --a", "srun", "t.py", False, "--a"),
        ("srun $SRUN_ARGS python t.py", "srun", "t.py", False, ""),
        ("singularity exec --nv -B /d:/d img.sif torchrun t.py", "torchrun", "t.py", False, ""),
        ("srun apptainer exec --nv --bind /d img.sif python -m a.b", "srun", "a.b", True, ""),
        ("docker run --gpus all --rm -it -v /d:/d -e A=1 --ipc=host img torchrun t.py", "torchrun", "t.py", False, ""),
        ("docker run --rm $OPTS $IMAGE torchrun t.py", "torchrun", "t.py", False, ""),
        ("torchrun $DIST_ARGS t.py --a", "torchrun", "t.py", False, "--a"),
        ("torchrun $DIST_ARGS --nnodes 2 $SCRIPT --a", "torchrun", "$SCRIPT", False, "--a"),
        ("torchrun --no-python automodel c.yaml", "torchrun", "automodel", False, "c.yaml"),
        ("$PYTHON train.py --a", "", "train.py", False, "--a"),
        ("$LAUNCHER $LAUNCHER_ARGS train.py --a", "", "train.py", False, "--a"),
        ("$CONDA/bin/torchrun --nnodes 2 $DIR/t.py --a", "torchrun", "$DIR/t.py", False, "--a"),
        ('DIR=`pwd`\nCMD="deepspeed $DIR/t.py --a"\neval $CMD', "deepspeed", "`pwd`/t.py", False, "--a"),
        ("python $(which torchrun) --nnodes 2 t.py", "torchrun", "t.py", False, ""),
        ("$(which python) $DIR/t.py", "python", "$DIR/t.py", False, ""),
        ("./train.py --a", "", "./train.py", False, "--a"),
        ("CMD='deepspeed --num_nodes 1 t.py'\neval ${CMD}", "deepspeed", "t.py", False, ""),
    ],
)
def test_program_is_found(text: str, launcher: str, program: str, is_module: bool, args: str) -> None:
    run = only(text)
    found = (run.launcher, run.program.value, run.is_module, " ".join(word.value for word in run.args))
    assert found == (launcher, program, is_module, args)


@pytest.mark.parametrize(
    "text",
    [
        "echo torchrun t.py",
        "python -c 'x'",
        "pip install torch",
        "python -m pip install x",
        "python",
        "torchrun",
        "cat t.py",
    ],
)
def test_other_commands_are_not_training(text: str) -> None:
    assert find_launches(read_script(text, "run.sh")) == ()


JOB = "#!/bin/bash\n#SBATCH -N 4\n#SBATCH --gres=gpu:a100:4\n"


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "gpu"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 8 t.py", 2, 8, ""),
        ("torchrun --standalone --nproc_per_node=8 t.py", 1, 8, ""),
        ("torchrun --nnodes=2:2 --nproc-per-node=4 t.py", 2, 4, ""),
        ("torchrun t.py", None, None, ""),
        (JOB + "torchrun --nnodes=$N --nproc-per-node=gpu t.py", 4, 4, "a100"),
        (JOB + "torchrun --nnodes=2 t.py", 2, 4, "a100"),
        (JOB + "srun -N2 --gpus-per-node=8 torchrun t.py", 2, 8, "a100"),
        (JOB + "srun --ntasks-per-node 2 python t.py", 4, 2, "a100"),
        (JOB + "#SBATCH -n 16\nsrun python t.py", 4, 4, "a100"),
        ("#SBATCH -N 2\n#SBATCH -G h100:16\nsrun torchrun t.py", 2, 8, "h100"),
        ("#SBATCH -N 2\n#SBATCH -C h200&ib\n#SBATCH --gpus-per-node=8\nsrun torchrun t.py", 2, 8, "h200"),
        ("#SBATCH -N 2\n#SBATCH -C a100|h100\npython t.py", 2, None, ""),
        ("accelerate launch --num_processes 16 --num_machines 2 t.py", 2, 8, ""),
        ("accelerate launch --num_processes 8 t.py", None, 8, ""),
        ("deepspeed --num_nodes 2 --num_gpus=8 t.py", 2, 8, ""),
        ("deepspeed --include localhost:0,1,2,3 t.py", 1, 4, ""),
        ("deepspeed --include w-0:0,1@w-1:0,1 t.py", 2, 2, ""),
        ("automodel c.yaml --nproc-per-node=8", None, 8, ""),
    ],
)
def test_nodes_and_gpus(text: str, nodes: int | None, gpus: int | None, gpu: str) -> None:
    run = only(text)
    assert (*size(run), run.gpu) == (nodes, gpus, gpu)
    assert not (run.nodes and run.nodes.unresolved)


@pytest.mark.parametrize(
    ("text", "nodes", "gpus"),
    [
        ("torchrun --nnodes $NNODES --nproc-per-node=$N t.py", "$NNODES", "$N"),
        ("torchrun --nnodes 1:4 --nproc-per-node gpu t.py", "1:4", "gpu"),
        ("#SBATCH -N 2-4\ntorchrun --nproc-per-node auto t.py", "2-4", "auto"),
        ("accelerate launch --num_processes 9 --num_machines $M t.py", "$M", "9"),
    ],
)
def test_runtime_sizes_are_unresolved(text: str, nodes: str, gpus: str) -> None:
    run = only(text)
    assert size(run) == (nodes, gpus)
    assert run.nodes is not None
    assert run.gpus_per_node is not None
    assert run.nodes.unresolved
    assert run.gpus_per_node.unresolved


def test_uneven_processes_per_machine_are_unresolved() -> None:
    run = only("accelerate launch --num_processes 9 --num_machines 2 t.py")
    assert run.gpus_per_node is not None
    assert run.gpus_per_node.unresolved == "9 processes are not divisible by 2 machines"


def test_environment_merges_exports_env_and_wrappers() -> None:
    text = "export A=1\nB=2 srun --export=ALL,C=3 docker run -e D=4 -e E=5 img env F=6 torchrun t.py\n"
    env = {name: value.value for name, value in only(text).env.items()}
    assert env == {"A": "1", "B": "2", "C": "3", "D": "4", "E": "5", "F": "6"}


def test_all_programs_are_listed_in_order() -> None:
    text = (
        "python tools/preprocess.py\nfor s in 1 2; do torchrun a.py --seed $s; done\nwait\n./run.sh\ndeepspeed b.py\n"
    )
    assert [run.program.value for run in find_launches(read_script(text, "run.sh"))] == [
        "tools/preprocess.py",
        "a.py",
        "b.py",
    ]
