#!/bin/bash
DATA=${DATA:-/data/corpus_text_document}
torchrun --nproc_per_node 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \
  --swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 50000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style WSD \
  --lr-wsd-decay-iters 5000 --lr-warmup-iters 1000 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --bf16 \
  --use-distributed-optimizer --use-flash-attn --tokenizer-type Llama2Tokenizer --tokenizer-model ./tok/tokenizer.model \
  --data-path $DATA --split 990,10,0 --save ckpt --load ckpt --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 20
