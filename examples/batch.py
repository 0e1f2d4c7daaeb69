"""A batch of prompts with different numbers of images, padded on the left.

python examples/batch.py
"""

import foveakv
from foveakv import HAE, sample_prompt

model, processor = foveakv.load("demo")
samples = [sample_prompt(2, ask=0), sample_prompt(6, ask=3), sample_prompt(4, ask=2)]

# Decoder-only models are padded on the left. Padding is never stored, and a budget that is a share counts per sequence.
inputs = processor(
    text=[sample.text for sample in samples],
    images=[sample.images for sample in samples],
    padding=True,
    padding_side="left",
    return_tensors="pt",
).to(model.device)

with foveakv.compress(model, HAE(budget=0.5)) as session:
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)

for i, sample in enumerate(samples):
    reply = processor.decode(output[i, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    stored = (session.kept(0)[i, 0] >= 0).sum().item()
    tokens = inputs["attention_mask"][i].sum().item()
    print(f"{sample.question}{reply.strip()} (expected {sample.answer})")
    print(f"    layer 0 stores {stored} slots per head for a prompt of {tokens} tokens")
print(session.report)
