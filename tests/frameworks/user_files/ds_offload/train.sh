#!/bin/bash
accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 8 --num_machines 1 --mixed_precision bf16 sft.py \
  --model_name_or_path Qwen/Qwen2.5-32B-Instruct --dataset_name data/messages.jsonl --max_length 8192 --packing \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 5e-6 --max_steps 500 --warmup_steps 20 \
  --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 5e-7}' --gradient_checkpointing --save_strategy no --output_dir out --logging_steps 1 --assistant_only_loss
