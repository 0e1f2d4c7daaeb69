"""Helpers without any knowledge of caches or methods: files, tables, texts, timing, option values."""
