accelerate launch --config_file fsdp.yaml trl/scripts/sft.py \
  --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name ./data/sharegpt.jsonl --max_length 4096 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-5 --num_train_epochs 2 \
  --lr_scheduler_type cosine --warmup_ratio 0.03 --bf16 --gradient_checkpointing --eval_strategy steps --eval_steps 50 \
  --save_steps 100 --save_total_limit 2 --output_dir out/qwen --assistant_only_loss
