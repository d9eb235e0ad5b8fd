"""Bytes on disk to Python values and back: GGUF files, block types, tokenizers, chat templates."""
