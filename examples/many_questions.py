"""Many questions about the same images: read the images once, answer every question on a copy of the cache.

python examples/many_questions.py
"""

import copy

import torch

import foveakv
from foveakv import HybridKV, build_inputs, sample_prompt

model, processor = foveakv.load("demo")
sample = sample_prompt(8)  # eight cards, each with a name
images = sample.text.removesuffix(sample.question)  # everything before the question

# The images are read once. HybridKV moves most of the cache to a host store, from which each question can retrieve
# other parts. A method that evicts keeps what the end of this prompt attends to; later questions may need other tokens.
prompt = build_inputs(processor, images, sample.images, model=model)
cache = foveakv.cache_for(model, HybridKV(budget=0.3))
with torch.no_grad():
    model(**prompt, past_key_values=cache)

for caption in sample.captions:
    name, expected = caption.split(": ")
    question = processor.tokenizer(f"{name}: ", return_tensors="pt", add_special_tokens=False)["input_ids"]
    # `generate` gets the whole conversation and skips the tokens that the cache has seen; the images are in the cache.
    ids = torch.cat([prompt["input_ids"], question], dim=1)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=copy.deepcopy(cache),  # the copy shares the host store
        max_new_tokens=4,
        do_sample=False,
    )
    reply = processor.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip().split("\n")[0]
    print(f"{name}: {reply} (expected {expected})")

print(foveakv.Report.of(cache))
