"""Titles and introductions of the sections of docs/performance.md."""

from __future__ import annotations

TITLES = {
    "decode_attention": "Attention and cache update, per layer and token",
    "generate": "Whole models",
    "story": "HAE's story setting",
    "prefill": "Prefill",
    "short": "Short prompts",
    "serving": "Many requests at once",
    "memory": "Memory",
    "append": "Appending",
    "kvpress": "Comparison with kvpress",
    "scale": "Growth with context and batch size",
    "vllm": "vLLM under load",
    "vllm_accuracy": "Accuracy in vLLM",
}
INTROS = {
    "decode_attention": (
        "One layer with random keys and values in the geometry of a real model; no model around it. `x packed` is "
        "the speed-up over SDPA on a preallocated full cache with the query group packed as rows, the fastest full "
        "cache in plain PyTorch; `x default` is the speed-up over DynamicCache and transformers' sdpa. `of read` is "
        "the time of a parallel sum over the bytes that the step reads, as a share of the step's time: at 100% a "
        "step would take as long as reading its bytes once. Medians leave out HAE's evictions (one in 64 steps); "
        "`by means` includes them."
    ),
    "generate": (
        "All sides hold the same prompt and take turns. A prompt is `read` by the model, which gives the time to "
        "the first token, or `filled` with random keys and values through the same cache code where reading would "
        "take minutes. `x best full` is the speed-up over the fastest of transformers' default, StaticCache and "
        "FoveaKV's `full`, by medians. Slices of Qwen2.5-VL have random weights. At batch size 1 most of a token's "
        "time is spent reading weights, which no cache method changes."
    ),
    "story": "A complete `generate`: 1,024 tokens of KV, recycle bin of 128, 512 new tokens, 5 beams.",
    "prefill": (
        "Slices of a text decoder with random weights. `own work` is the library's time after each layer's "
        "attention as a share of a plain prefill, the less noisy figure; `whole` compares whole prefills; `drift` "
        "is the range of the plain prefills of that run."
    ),
    "short": (
        "The embedded model with a prompt of cards. Each cell is a time and, in brackets, its ratio to the plain "
        "model's."
    ),
    "serving": (
        "All clients send one request with the same image prompt at the same moment, to the engine of `foveakv serve`, "
        "without HTTP. The KV memory is fixed: it holds `pool` requests that are stored whole. `one at a time` stores "
        "them whole too, and runs one after the other; `full` runs as many as fit, in one batch, and the methods "
        "likewise. `side by side` is the most answers that were decoded together. `x alone` compares tokens per second "
        "over the whole run, prompts included, with one at a time. Times are from the moment of sending; the time per "
        "token includes the pauses in which prompts of others are read."
    ),
    "memory": (
        "Storage bytes of one prompt; unused room, positions, side tensors and digests count as stored. If the "
        "device is the CPU, the host store is in the same memory."
    ),
    "append": (
        "Appending tokens to a long cache, without attention. DynamicCache copies the cache for each token; FoveaKV "
        "writes into room allocated in advance, and the slowest append is the one that grows it."
    ),
    "kvpress": (
        "A text Llama with random weights, the same in both environments and processes. kvpress' AdaKV masks what "
        "it evicts and frees no memory; ObservedAttention needs eager attention and is left out for long prompts."
    ),
    "scale": (
        "One layer as above, with a budget that is a share of the context or a fixed number of tokens per head. The "
        "exponent is the slope on log-log axes: 1 means proportional growth, 0 no growth."
    ),
    "vllm": (
        "The embedded model in two vLLM engines (CPU backend, float32), one without the plugin, which take turns with "
        "the same requests in a pool of the same size. All requests are sent at once, each with four images. `over the "
        "same request without` compares the time from sending to the last token, request by request, with its range. "
        "`scoring` is, for prompts of 16 images, the time in which the method decides and its query rows are kept, "
        "`moving slots` that of writing the kept tokens to the first slots. The machine was shared with other work."
    ),
    "vllm_accuracy": (
        "The same items in vLLM and in the transformers engine, both in float32 with transformers' code of the model. "
        "`same tokens kept` and `same answers` are shares of items for which the lists of stored tokens, and of "
        "answered tokens, are equal. `stored` is the share of the prompt's tokens in vLLM. Scores of few items per "
        "task compare engines, not methods; for those see [accuracy](evidence.md)."
    ),
}
