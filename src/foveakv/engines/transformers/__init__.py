"""Compressed caches inside Hugging Face transformers models."""
