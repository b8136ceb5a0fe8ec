"""Scripts as teams share them: an optional argument, a container's paths, and programs that share some flag names."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.errors import InputError

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000"
)


def test_a_script_is_read_as_it_runs_without_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'train="pretrain_gpt.py ' + FLAGS + '"\nconvert="tools/convert.py --load a"\n'
        'if [ "$1" = "convert" ]; then\n  task="$convert"\nelif [ "$1" = "back" ]; then\n  task="$convert --back"\n'
        'else\n  task="$train"\nfi\ncmd="torchrun --nproc_per_node 8 $task"\neval "$cmd"\n'
    )
    result = meshwright.check(str(script))
    assert result.framework == "megatron-lm"
    assert result.model is not None
    assert not [one for one in result.findings if one.severity == "error"]


def test_a_config_under_the_path_of_a_container_is_the_one_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    )
    script = tmp_path / "train.sbatch"
    script.write_text(
        "#!/bin/bash\naccelerate launch --config_file /workspace/zero3.yaml train.py "
        "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1\n"
    )
    assert meshwright.check(str(script)).framework == "accelerate"


def test_a_program_with_many_flags_of_its_own_is_not_megatron_lm(tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(
        "#!/bin/bash\nsrun python3 train_esm2.py --train-cluster-path a --train-database-path b --valid-cluster-path c "
        "--valid-database-path d --precision bf16-mixed --num-gpus 8 --num-nodes 2 --max-seq-length 1024 "
        "--num-layers 33 --hidden-size 1280 --num-attention-head 20 --micro-batch-size 2 --seq-length 1024\n"
    )
    with pytest.raises(InputError, match="matches no supported framework"):
        meshwright.check(str(script))
