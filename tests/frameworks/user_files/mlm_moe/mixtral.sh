#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --job-name=mixtral
export CUDA_DEVICE_MAX_CONNECTIONS=1
srun torchrun --nproc_per_node 8 --nnodes 4 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:6000 /opt/megatron-lm/pretrain_gpt.py \
  --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 32768 \
  --position-embedding-type rope --rotary-base 1000000 --swiglu --disable-bias-linear --normalization RMSNorm \
  --untie-embeddings-and-output-weights --no-masked-softmax-fusion --attention-dropout 0 --hidden-dropout 0 \
  --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce \
  --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
  --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --min-lr 1e-5 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine \
  --lr-warmup-iters 500 --weight-decay 0.1 --clip-grad 1.0 --bf16 --init-method-std 0.02 \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mixtral-8x7B-v0.1 \
  --data-path /data/mix_text_document --split 99990,8,2 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --log-interval 1 \
  --save /ckpt/mixtral --load /ckpt/mixtral
