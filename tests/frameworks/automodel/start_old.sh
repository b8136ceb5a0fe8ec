#!/bin/bash
automodel finetune llm -c lora.yaml --nproc-per-node=8
