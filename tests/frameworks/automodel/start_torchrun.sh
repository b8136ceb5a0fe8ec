#!/bin/bash
torchrun --nnodes 2 --nproc-per-node 8 \
  nemo_automodel/recipes/llm/train_ft.py --config sft.yaml \
  --distributed.dp_size 8 \
  --checkpoint.enabled
