"""A notebook with Unsloth ran out of memory on Colab's T4, and its output is all that there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BANNER = r"""==((====))==  Unsloth 2025.6.2: Fast Llama patching. Transformers: 4.52.4.
   \\   /|    Tesla T4. Num GPUs = 1. Max memory: 14.741 GB. Platform: Linux.
O^O/ \_/ \    Torch: 2.7.0+cu126. CUDA: 7.5. CUDA Toolkit: 12.6. Triton: 3.3.0
"""
TRAINING = r"""==((====))==  Unsloth - 2x faster free finetuning | Num GPUs used = 1
   \\   /|    Num examples = 51,760 | Num Epochs = 1 | Total steps = 60
O^O/ \_/ \    Batch size per device = 8 | Gradient accumulation steps = 4
\        /    Data Parallel GPUs = 1 | Total batch size (8 x 4 x 1) = 32
 "-____-"     Trainable parameters = 41,943,040/8,000,000,000 (0.52% trained)
"""
ERROR = """Traceback (most recent call last):
  File "<ipython-input-12-1e5f5c3d>", line 1, in <cell line: 1>
    trainer_stats = trainer.train()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 14.74 GiB of \
which 1.21 GiB is free. Process 12893 has 13.52 GiB memory in use.
"""


@pytest.mark.parametrize(("printed", "accumulated"), [("", "<now × micro batch>"), (TRAINING, "32")])
def test_remedies_are_arguments_of_unsloth_for_the_card_in_its_banner(
    meshwright: Any, printed: str, accumulated: str
) -> None:
    Path("colab.log").write_text(BANNER + printed + ERROR)
    shown = meshwright("doctor", "colab.log").out
    assert f"1. per_device_train_batch_size=1 gradient_accumulation_steps={accumulated} " in shown
    assert '. use_gradient_checkpointing="unsloth" ' in shown
    assert ". load_in_4bit=True " in shown
    assert ". max_seq_length=<half of now> " in shown
    assert "H100" not in shown


def test_with_a_model_the_remedies_are_tried_on_adapters_on_the_card(meshwright: Any) -> None:
    Path("colab.log").write_text(BANNER + ERROR)
    shown = meshwright("doctor", "colab.log", "--model", "qwen2.5-1.5b", "--goal", "qlora")
    assert "on 1xT4" in shown.out
    tried = meshwright("doctor", "colab.log", "--model", "llama3-8b", "--json").json
    assert tried["gpus"] == "1xT4"
    assert all(one["there"] for one in tried["findings"][0]["remedies"] if one["what"] != "action")
