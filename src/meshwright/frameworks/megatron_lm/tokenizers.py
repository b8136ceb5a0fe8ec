"""Tokenizer types that Megatron's programs choose by the tokenizer's file."""

SENTENCEPIECE, SENTENCEPIECE_TOKENIZER = ".model", "Llama2Tokenizer"
"""Suffix of SentencePiece files, and the tokenizer that reads Llama's."""
