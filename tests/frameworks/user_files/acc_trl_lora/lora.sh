accelerate launch --config_file fsdp.yaml trl/scripts/sft.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct \
  --dataset_name trl-lib/Capybara --dataset_train_split train --max_length 2048 --packing \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --learning_rate 2e-4 --max_steps 1000 --warmup_steps 50 \
  --use_peft --lora_r 32 --lora_alpha 16 --lora_dropout 0.05 --lora_target_modules q_proj k_proj v_proj o_proj \
  --eval_strategy steps --eval_steps 100 --logging_steps 5 --output_dir out
