from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/messages.jsonl", split="train")
split = dataset.train_test_split(test_size=0.05)
args = SFTConfig(
    output_dir="out", max_length=2048, per_device_train_batch_size=4, gradient_accumulation_steps=4, learning_rate=1e-4,
    num_train_epochs=2, lr_scheduler_type="cosine", warmup_ratio=0.03, bf16=True, logging_steps=10, eval_strategy="steps", eval_steps=50,
    save_steps=100, save_total_limit=2, packing=False, assistant_only_loss=True, weight_decay=0.01,
)
peft_config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(model="Qwen/Qwen3-8B", args=args, train_dataset=split["train"], eval_dataset=split["test"], peft_config=peft_config)
trainer.train()
