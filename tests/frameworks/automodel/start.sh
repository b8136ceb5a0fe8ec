#!/bin/bash
#SBATCH --nodes=1
GPUS=8
SEED=3

automodel sft.yaml --nproc-per-node "$GPUS" \
  --seed $SEED \
  --distributed.tp_size 2 \
  --step_scheduler.local_batch_size=2
