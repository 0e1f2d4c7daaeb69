"""Helpers that know nothing of caches or methods: files, texts, timing."""
