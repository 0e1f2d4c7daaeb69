"""Two images and a question: the plain model and the same model with a compressed cache.

python examples/two_images.py
"""

import foveakv
from foveakv import SnapKV, build_inputs, sample_prompt

# "demo" is a small model that is assembled on this machine. A model id or a folder works as well.
model, processor = foveakv.load("demo")

# Two images that this model understands. For your own:
# inputs = build_inputs(processor, "What differs?", ["a.png", "b.png"], model=model)
sample = sample_prompt(2, ask=1)
inputs = build_inputs(processor, sample.text, sample.images, model=model)
length = inputs["input_ids"].shape[1]

plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
with foveakv.compress(model, SnapKV(budget=0.5, window=4, kernel=1)) as session:
    compressed = model.generate(**inputs, max_new_tokens=8, do_sample=False)

print("question:  ", sample.question)
print("expected:  ", sample.answer)
print("plain:     ", processor.decode(plain[0, length:], skip_special_tokens=True).strip())
print("compressed:", processor.decode(compressed[0, length:], skip_special_tokens=True).strip())
print(session.report)
