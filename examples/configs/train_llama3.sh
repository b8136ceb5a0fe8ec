#!/bin/bash
# Megatron-LM, with three mistakes: tp does not divide the heads, one removed flag, one overlap that needs tp.
MODEL_ARGS=(
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
  --position-embedding-type rope --untie-embeddings-and-output-weights
  --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128256
)
torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" \
  --tensor-model-parallel-size 3 --micro-batch-size 1 --global-batch-size 64 \
  --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --bf16 --use-distributed-optimizer \
  --use-flash-attn --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0
