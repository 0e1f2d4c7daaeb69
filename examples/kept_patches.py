"""Budgets, reports, and an image of the patches that a method keeps.

python examples/kept_patches.py  # writes kept.png; needs matplotlib: pip install "foveakv[demo]"
"""

import foveakv
from foveakv import SnapKV, build_inputs, sample_prompt
from foveakv.analysis.shown import shown
from foveakv.analysis.viz_shown import draw_rows

model, processor = foveakv.load("demo")
sample = sample_prompt(8, ask=2)
inputs = build_inputs(processor, sample.text, sample.images, model=model)

# A budget is a share of the prompt, a number of tokens per KV head, or bytes for the whole cache.
for budget in (0.1, 200, "8MiB"):
    with foveakv.compress(model, SnapKV(budget=budget, window=4, kernel=1)) as session:
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    report = session.report
    reply = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    print(
        f"budget {budget!s:>5}: {reply} (expected {sample.answer}); {report.stored_bytes / 1e6:.1f} of "
        f"{report.full_bytes / 1e6:.1f} MB, {report.evicted:,} of {report.full_slots:,} slots evicted"
    )

# `foveakv show` does the same on the command line.
result = shown(model, inputs, SnapKV(budget=0.25, window=4, kernel=1), layers=[0, 15, 29], each=True)
draw_rows("kept.png", sample.images, result, captions=sample.captions, title=sample.question)
print("written: kept.png")
