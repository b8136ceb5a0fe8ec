#!/bin/bash
torchrun --nproc-per-node=8 --nnodes=2 scripts/training/run_recipe.py --recipe qwen3_8b_pretrain_config --dataset mock \
  model.tensor_model_parallel_size=2 train.global_batch_size=256 train.train_iters=2000 optimizer.lr=3e-4 scheduler.lr_warmup_iters=100 \
  checkpoint.save=/ckpt/q checkpoint.save_interval=500 dataset.seq_length=4096
