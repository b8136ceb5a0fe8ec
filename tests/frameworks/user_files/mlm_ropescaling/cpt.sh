#!/bin/bash
# continued pretraining of Llama 3.1 8B at 32k, from converted weights
GPUS_PER_NODE=8
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 32768 --max-position-embeddings 131072 \
  --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 --swiglu --disable-bias-linear \
  --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 --context-parallel-size 2 \
  --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64 --train-iters 2000 --lr 1e-5 --min-lr 1e-6 \
  --lr-decay-style linear --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --bf16 \
  --recompute-activations --attention-backend flash --tokenizer-type HuggingFaceTokenizer --tokenizer-model ./tok \
  --train-data-path data/train_text_document --valid-data-path data/valid_text_document \
  --pretrained-checkpoint /ckpt/llama31_8b_mcore --save out --load out --save-interval 200 --eval-interval 100 --eval-iters 5 --log-interval 1 --seed 1234
