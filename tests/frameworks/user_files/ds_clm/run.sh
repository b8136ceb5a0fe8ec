#!/bin/bash
torchrun --nproc_per_node 8 examples/pytorch/language-modeling/run_clm.py --deepspeed ds_z2.json \
  --config_name ./mymodel/config.json --tokenizer_name ./tok --train_file data/corpus.txt --validation_file data/val.txt --block_size 2048 \
  --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --learning_rate 6e-4 --max_steps 20000 --lr_scheduler_type cosine \
  --warmup_steps 500 --weight_decay 0.1 --adam_beta2 0.95 --bf16 --do_train --do_eval --eval_strategy steps --eval_steps 500 \
  --save_steps 1000 --save_total_limit 5 --output_dir out/clm --logging_steps 10 --seed 7
