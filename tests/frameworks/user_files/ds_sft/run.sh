#!/bin/bash
deepspeed --num_gpus 8 train.py --deepspeed ds_z3.json \
  --model_name_or_path mistralai/Mistral-7B-Instruct-v0.3 --train_file data/sharegpt.jsonl --max_seq_length 4096 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-5 --num_train_epochs 3 --lr_scheduler_type cosine \
  --warmup_ratio 0.03 --weight_decay 0.0 --bf16 True --gradient_checkpointing True --logging_steps 5 --save_steps 200 --save_total_limit 3 \
  --output_dir ./output/mistral
