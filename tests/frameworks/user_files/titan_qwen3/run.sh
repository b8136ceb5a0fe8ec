#!/bin/bash
NGPU=${NGPU:-8}
CONFIG_FILE=./train_configs/qwen3_8b.toml
torchrun --nproc_per_node=$NGPU -m torchtitan.train --job.config_file $CONFIG_FILE --training.steps 3000 --parallelism.tensor_parallel_degree 4
