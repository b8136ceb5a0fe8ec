trl sft --model_name_or_path mistralai/Mistral-7B-Instruct-v0.3 --dataset_name ./data/alpaca.jsonl --max_length 2048 --num_train_epochs 3 \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --learning_rate 2e-4 --lr_scheduler_type cosine --warmup_ratio 0.05 \
  --use_peft --load_in_4bit --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear --gradient_checkpointing --bf16 --output_dir q --num_processes 2
