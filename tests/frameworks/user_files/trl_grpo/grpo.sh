accelerate launch --config_file zero3.yaml trl/scripts/grpo.py --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/tldr --output_dir grpo
