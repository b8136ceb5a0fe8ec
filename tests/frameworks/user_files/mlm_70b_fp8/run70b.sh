#!/bin/bash
set -euo pipefail
NNODES=${SLURM_NNODES:-8}
TP=4; PP=4; VP=5
ARGS="--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8"
ARGS+=" --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --swiglu --disable-bias-linear"
ARGS+=" --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --vocab-size 128256 --tokenizer-type NullTokenizer --mock-data"
ARGS+=" --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage $VP --sequence-parallel"
ARGS+=" --micro-batch-size 1 --global-batch-size 512 --train-iters 100 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 10"
ARGS+=" --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ARGS+=" --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --eval-iters 0 --log-interval 1 --split 100,0,0"
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py $ARGS
