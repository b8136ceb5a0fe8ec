from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from datasets import load_dataset

MODEL = "meta-llama/Llama-3.2-1B"
model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
data = load_dataset("text", data_files={"train": "data/corpus.txt", "validation": "data/val.txt"})
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=4, learning_rate=2e-5, max_steps=1000,
                         warmup_steps=50, bf16=True, fsdp="full_shard auto_wrap", eval_strategy="steps", eval_steps=100, save_steps=200)
Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["validation"]).train()
