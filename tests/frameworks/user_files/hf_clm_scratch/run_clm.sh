torchrun --nproc_per_node=4 run_clm.py --model_name_or_path gpt2 --train_file ./data/corpus.txt --validation_file ./data/val.txt \
  --block_size 1024 --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --learning_rate 5e-5 --num_train_epochs 3 \
  --do_train --do_eval --eval_strategy steps --eval_steps 200 --save_steps 500 --output_dir ./out --bf16
