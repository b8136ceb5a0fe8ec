#!/bin/bash
# Train a tiny model of Llama 3's structure on two CPU processes, resume it, and generate from it.
set -euo pipefail
run=$(mktemp -d)/run
train() {
  meshwright train llama3_8b_pretrain_config --tiny --nproc 2 --dataset mock --out "$run" \
    data.tokenizer=bytes train.global_batch_size=8 checkpoint.save_every=4 "$@"
}
train train.steps=4
train train.steps=8 --accept-changes   # resumes at step 4; a longer run is another contract, so it must be accepted
meshwright generate "$run" "one two" --raw --max-tokens 8
