trl sft --model_name_or_path Qwen/Qwen3-4B --dataset_name data/messages.jsonl --learning_rate 2e-5 --num_train_epochs 1 \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_length 2048 --assistant_only_loss --output_dir qwen-sft --save_steps 50
