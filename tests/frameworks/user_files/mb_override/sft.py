import torch
from megatron.bridge.recipes.llama import llama3_8b_sft_config
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

cfg = llama3_8b_sft_config()
cfg.model.tensor_model_parallel_size = 2
cfg.model.sequence_parallel = True
cfg.train.global_batch_size = 64
cfg.train.micro_batch_size = 1
cfg.train.train_iters = 500
cfg.optimizer.lr = 5e-6
cfg.optimizer.min_lr = 5e-7
cfg.scheduler.lr_warmup_iters = 20
cfg.checkpoint.pretrained_checkpoint = "/ckpt/llama3_8b_bridge"
cfg.checkpoint.save = "/ckpt/out"
cfg.checkpoint.save_interval = 100
cfg.dataset.dataset_root = "data/sft"
cfg.dataset.seq_length = 4096
finetune(cfg, forward_step)
