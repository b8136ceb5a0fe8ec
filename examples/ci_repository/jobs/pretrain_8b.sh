#!/bin/bash
# Megatron-LM: a throughput run of Llama 3 8B
# meshwright: ignore-file[megatron-lm.max-connections] the image of our cluster sets it
torchrun --nproc-per-node 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm \
  --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 \
  --tokenizer-type NullTokenizer --mock-data --seq-length 8192 --max-position-embeddings 8192 \
  --micro-batch-size 1 --global-batch-size 128 --lr 3e-4 --bf16 --tensor-model-parallel-size 2 \
  --use-distributed-optimizer --recompute-activations --train-iters 200
