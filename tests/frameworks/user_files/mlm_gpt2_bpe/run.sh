#!/bin/bash
# an own 1.3B model with the BPE files of GPT-2
CHECKPOINT_PATH=./ckpt
VOCAB_FILE=./tok/gpt2-vocab.json
MERGE_FILE=./tok/gpt2-merges.txt
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 \
  --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear \
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 256 \
  --train-iters 20000 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --clip-grad 1.0 --bf16 \
  --use-distributed-optimizer --tokenizer-type GPT2BPETokenizer --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE \
  --data-path data/train_text_document --split 969,30,1 --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --save-interval 1000 \
  --eval-interval 500 --eval-iters 10 --log-interval 50
