"""Commands printed for a file keep the weights that the file names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PROGRAM = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", max_length=4096, per_device_train_batch_size=4, gradient_accumulation_steps=4,
                 learning_rate=1e-5, num_train_epochs=2, bf16=True, packing=True)
trainer = SFTTrainer(model="Qwen/Qwen2.5-7B-Instruct", args=args,
                     train_dataset=load_dataset("tatsu-lab/alpaca", split="train"))
trainer.train()
"""


def test_options_for_a_file_name_its_weights(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    found = meshwright("recommend", str(tmp_path / "train.py"), "--gpus", "1xA100-40")
    printed = " ".join(found.out.split())
    named = re.findall(r"meshwright recommend (\S+)", printed)
    assert named, printed
    assert set(named) == {"Qwen/Qwen2.5-7B-Instruct"}
