"""Words of the field that newcomers type to `meshwright explain`: what each is, and what it means here."""

from __future__ import annotations

_MERGED = "meshwright convert RUN OUT --merge"
_GGUF = f"{_MERGED} writes the model, and llama.cpp's convert_hf_to_gguf.py OUT makes a GGUF file of it"
_SERVES = f"serves Hugging Face folders: {_MERGED} writes one with the adapters merged"
_CHECKED = "meshwright check FILE reads its files"

ROWS: tuple[tuple[tuple[str, ...], str], ...] = (
    # goals
    (("sft", "supervised_fine_tuning", "instruction_tuning"), "supervised fine-tuning: next-token training on "
        "conversations, with the answers in the loss. --goal sft trains all weights, --goal lora or qlora adapters"),
    (("fine_tuning", "finetuning", "fine_tune", "finetune"), "training a pretrained model further on your data: --goal "
        "sft trains all weights; lora and qlora train adapters, in much less memory"),
    (("pretraining",), "next-token training of all weights on plain text: --goal pretrain"),
    # adapters and quantization
    (("nf4", "4bit", "4_bit", "int4"), "4-bit format for frozen weights (NF4, NormalFloat of bitsandbytes): QLoRA "
        "stores the base model in it and computes in bf16. peft.method=qlora"),
    (("int8", "8bit", "8_bit", "llm.int8"), "8-bit integers for weights. Frozen weights of LoRA (LLM.int8): "
        "peft.method=lora8bit on Accelerate, DeepSpeed and AutoModel; moments of AdamW: optimizer.name=adamw8bit"),
    (("bitsandbytes", "bnb"), "library with 4-bit and 8-bit weights and 8-bit optimizers. Here: peft.method=qlora, "
        "peft.method=lora8bit, optimizer.name=adamw8bit"),
    (("8bit_adam", "8_bit_adam", "adam_8bit"), "AdamW whose moments "
        "are stored in 8 bits, a quarter of fp32's memory: optimizer.name=adamw8bit. Adapters gain little: their "
        "optimizer state is small"),
    (("lora_rank",), "inner size of the LoRA matrices: adapter memory and capacity grow with it; 8 to 64 is "
        "usual. peft.rank"),
    (("lora_alpha",), "LoRA's scale: the adapters' output is multiplied by alpha / rank (rslora: alpha / sqrt(rank)); "
        "1 to 2 times the rank is usual. peft.alpha"),
    (("merge_lora", "merge_adapter", "merge_adapters", "merge"), f"adding trained adapters to the base weights, which "
        f"gives a model that needs no peft: {_MERGED}"),
    (("awq", "gptq"), "4-bit formats for inference, made of a trained model with calibration data. Train on the "
        f"unquantized model (QLoRA quantizes it to NF4 itself), then {_MERGED} and quantize OUT, such as with "
        "llm-compressor"),
    # after training
    (("gguf", "llama.cpp", "llama_cpp", "llamacpp"), f"llama.cpp runs models on CPUs and small GPUs, from files in "
        f"its format GGUF. {_GGUF}"),
    (("ollama", "lm_studio"), f"runs models from GGUF files. {_GGUF}; Ollama's Modelfile names it: FROM FILE.gguf"),
    (("vllm", "sglang", "tgi", "text_generation_inference"), f"inference server; it {_SERVES}. vLLM and SGLang also "
        "load adapters beside the base model"),
    (("kv_cache",), "keys and values of earlier tokens, which generation keeps so that it computes each token once. "
        "Training has none; memory estimates here are of training"),
    (("safetensors",), "file format of weights that runs no code when it is loaded; runs, convert and export write it"),
    (("perplexity", "ppl"), "exp of the mean loss per token, lower is better; comparable only with the same tokenizer "
        "and data. meshwright evaluate RUN prints it"),
    (("lm_eval", "lm_evaluation_harness", "benchmarks"), "benchmarks such as MMLU, by EleutherAI's "
        f"lm-evaluation-harness: {_MERGED}, then lm_eval --model hf --model_args pretrained=OUT. meshwright evaluate "
        "measures the loss on held-out data"),
    # data
    (("chat_template",), "Jinja text of a tokenizer that writes messages as one string with role marks. Training and "
        "inference must use the same; data.chat_template names another. meshwright samples RECIPE --dataset FILE shows "
        "the result"),
    (("system_prompt", "system_message", "system_turn", "system_role"), "message that instructs the model before the "
        "first question. Some chat templates refuse it (Mistral 7B, Gemma): data.merge_system=true puts it in front of "
        "the user's text"),
    (("eos", "eos_token", "end_token"), "token that ends a text: a model that does not learn it never stops. It ends "
        "each answer by the chat template and each document of a pretraining; it should not be the padding token"),
    (("prompt_masking",), "leaving the prompts out of the "
        "loss: data.train_on=answers (the default for conversations), last_answer or all. meshwright samples RECIPE "
        "--dataset FILE shows which tokens count"),
    (("sharegpt",), "rows with conversations: a list of {from: human or gpt, value: text}. Read as it is"),
    (("alpaca",), "rows with instruction, input and output. Read as it is"),
    (("sample_packing",), "several documents in one sample, masked from each other, so that no tokens are padding: "
        "data.packing=true"),
    (("flash_attention", "flash_attn", "flash_attention_2", "fa2", "fa3"), "attention kernel that never stores the "
        "scores: memory grows linearly with the sequence. kernels.attention=auto takes it, or another kernel that "
        "stores none, where it runs"),
    (("rope_scaling", "yarn"), "rescaled rotary position embeddings, by which a model reads more positions than it was "
        "trained on (linear, YaRN, Llama 3's). Taken from the model's config.json; meshwright explain "
        "long_context_extension trains longer"),
    # training
    (("grad_accumulation", "grad_accum"), "micro batches whose gradients are summed "
        "before an update: global batch / (micro batch × dp). It follows from train.global_batch_size and "
        "layout.micro_batch_size"),
    (("validation", "held_out", "hold_out", "holdout_set", "validation_set", "eval_dataset", "eval_set", "test_set"),
        "loss on samples that are not trained on: data.validation_part=0.05 holds 5 % of the training data out, "
        "data.validation=FILE (or a split of the dataset) names others; train.eval_every=N validates every N steps"),
    (("early_stopping",), "ending a run whose validation loss stops falling: train.eval_every=N with "
        "train.early_stop_patience=N validations. The best checkpoint is kept: convert RUN OUT --checkpoint best"),
    (("neftune",), "noise on the input embeddings while fine-tuning. Not in our engine; TRL and LLaMA-Factory have "
        "neftune_noise_alpha, AutoModel has neftune"),
    (("ema",), "exponential moving average of the weights, for evaluation. Not in our engine; "
        "optimizer.name=schedule_free_adamw averages weights too"),
    (("galore", "apollo"), "optimizer that keeps its state in a low-rank projection of the gradients. Not in our "
        "engine; the Trainer has optim=galore_adamw. optimizer.name=adamw8bit and LoRA save memory here"),
    (("cpu_offload", "offloading"), "keeping optimizer state, weights or activations in host memory: less GPU memory, "
        "slower steps. layout.offload=optimizer, params or activations"),
    (("vram", "gpu_memory"), "memory of the GPU. meshwright recommend MODEL --gpus GPUS shows what a training needs of "
        "it by part, and what fits"),
    # programs
    (("liger", "liger_kernel"), "Triton kernels for training on the Trainer, TRL and Axolotl (use_liger_kernel): fused "
        "loss, norms and activations. Our engine's own: kernels.loss=fused_linear"),
    (("unsloth",), "library for fast fine-tuning on one GPU, with TRL's trainers. meshwright check FILE.py reads "
        "programs that use it"),
    (("deepspeed",), "Microsoft's library with ZeRO sharding and offload: meshwright export RECIPE --to deepspeed "
        "writes its config, check and import read it"),
    (("accelerate",), "Hugging Face's launcher and wrapper for FSDP and DeepSpeed, on which Trainer and TRL run: "
        "meshwright export RECIPE --to accelerate writes its config and a program, check and import read it"),
    (("trl",), "Hugging Face's library for fine-tuning (SFTTrainer), preferences (DPO) and RL (GRPO): meshwright "
        "export RECIPE --to trl writes a program, check reads yours"),
    (("axolotl", "llama_factory", "llamafactory", "ms_swift"), f"trainer for fine-tuning from one YAML file. {_CHECKED}"
        " with --gpus; meshwright doctor LOG reads its logs"),
    (("transformers", "huggingface", "hugging_face", "hf"), "Hugging Face's library of models, whose folders "
        "(config.json, safetensors, tokenizer) are read and written here; its Trainer: export --to accelerate"),
    (("torchrun",), "PyTorch's launcher: one process per GPU, with RANK, WORLD_SIZE and MASTER_ADDR set. meshwright "
        "launch RECIPE --scheduler torchrun writes the command of each node"),
    (("slurm", "sbatch"), "scheduler of clusters: meshwright launch RECIPE --scheduler slurm writes the sbatch script"),
    # processes and network
    (("node_rank",), "number of a node in a job, from 0: torchrun --node-rank, a different one on every node; "
        "meshwright launch writes it"),
    (("local_rank",), "number of a process on its node, from 0, and of the GPU it uses: the launcher sets LOCAL_RANK"),
    (("world_size",), "processes of a job, one per GPU: nodes × GPUs per node = dp × tp × pp × cp"),
    (("master_addr", "master_port", "rendezvous"), "address and port of the first node, at which all processes meet; "
        "the launcher sets them"),
    (("nccl",), "NVIDIA's library of collectives between GPUs. NCCL_DEBUG=INFO prints the network it uses; meshwright "
        "doctor LOG reads its lines"),
    (("all_reduce", "allreduce"), "collective that gives every rank the sum over all ranks: of gradients in data "
        "parallelism, of activations in tensor parallelism"),
    (("infiniband", "roce", "rdma"), "network between nodes by which GPUs exchange data without their CPUs: 25 to 100 "
        "GB/s per GPU, TCP has a tenth. network_gb_s in a cluster file sets its rate"),
    (("pcie",), "bus between GPUs, CPU and network cards: 16 to 64 GB/s each way, a tenth of NVLink. Without NVLink "
        "prefer data or pipeline parallelism to tensor parallelism"),
    (("slingshot", "cassini", "cxi"), "HPE's network of Cray systems, 200 or 400 Gb/s per adapter. NCCL and RCCL "
        "use it through libfabric's plugin (aws-ofi-nccl) with FI_PROVIDER=cxi, else they communicate over TCP: "
        "meshwright explain FI_CXI_DEFAULT_CQ_SIZE, FI_CXI_RX_MATCH_MODE, FI_MR_CACHE_MONITOR"),
    (("libfabric", "ofi", "aws_ofi_nccl"), "library of network providers; NCCL uses it on EFA and Slingshot through "
        "the plugin aws-ofi-nccl. FI_PROVIDER names the provider (efa, cxi); a log of NCCL_DEBUG=INFO must have "
        "NET/OFI"),
    (("efa",), "AWS's network between nodes, which NCCL uses through libfabric's plugin aws-ofi-nccl: a log of "
        "NCCL_DEBUG=INFO must have NET/OFI and efa, else nodes communicate over TCP"),
    (("energy", "electricity", "kwh", "carbon", "co2", "emissions"), "not estimated. GPU-hours × the power of a GPU "
        "(nvidia-smi --query-gpu=power.draw --format=csv), and a third to a half more for host, network and cooling: "
        "10,000 GPU-hours at 0.7 kW are 7,000 kWh. meshwright size MODEL --gpu GPU --goal GOAL --tokens N has the "
        "GPU-hours"),
    (("power", "power_limit", "power_cap", "tdp"), "what a GPU may draw (nvidia-smi -q -d POWER): at its limit clocks "
        "and speed fall. Estimates assume the card's usual limit; a log that is slower than its estimate may have a "
        "lower one. Energy is not estimated: meshwright explain energy"),
)  # fmt: skip
"""The names of each word, as keys of terms (lower case, underscores), and its meaning."""

COMMON_WORDS = {name: meaning for names, meaning in ROWS for name in names}
"""Word → meaning."""
FIELDS = {
    "lora_rank": "peft.rank",
    "lora_alpha": "peft.alpha",
    "nf4": "peft.method",
    "chat_template": "data.chat_template",
    "system_prompt": "data.merge_system",
    "prompt_masking": "data.train_on",
    "sample_packing": "data.packing",
    "flash_attention": "kernels.attention",
    "early_stopping": "train.early_stop_patience",
    "validation": "data.validation",
    "cpu_offload": "layout.offload",
    "liger": "kernels.loss",
    "checkpoint_interval": "checkpoint.save_every",
}
"""Word → the recipe field that is shown with it."""
