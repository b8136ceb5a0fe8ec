accelerate launch --config_file fsdp.yaml --machine_rank $SLURM_NODEID run_clm.py \
  --model_name_or_path meta-llama/Meta-Llama-3-70B --dataset_name squad --per_device_train_batch_size 2 \
  --gradient_accumulation_steps 4 --block_size 8192 --learning_rate 1e-5 --num_train_epochs 1 --bf16 True \
  --gradient_checkpointing True --warmup_ratio 0.03 --lr_scheduler_type cosine --save_steps 200 --output_dir out
