#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GBS=512
TRAIN_SAMPLES=$(( 1000 * 1000 * 1000 * 100 / 4096 ))
MODEL_ARGS=(
    --num-layers 28 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash
)
TRAINING_ARGS=(
    --micro-batch-size 2 --global-batch-size $GBS
    --train-samples $TRAIN_SAMPLES --lr-decay-samples $TRAIN_SAMPLES --lr-warmup-samples $(( 2000 * GBS ))
    --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.008
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
DATA_ARGS=(
    --data-path 0.7 /project/data/fineweb_text_document 0.3 /project/data/stack_text_document
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.2-3B --split 99,1,0
)
LOG_ARGS=(--log-interval 10 --save-interval 500 --eval-interval 2000 --eval-iters 20
    --save /project/ckpt --load /project/ckpt --ckpt-format torch_dist)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}"
