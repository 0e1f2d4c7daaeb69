"""The vLLM plugin: methods of per-token granularity evict prompt tokens inside vLLM and free their blocks.

vLLM finds `private.register` by its entry point (`vllm.general_plugins`). Importing this package imports nothing.
"""
