"""The functions that foveakv_cards.yaml names."""

from PIL import Image

from foveakv.models.embedded.samples import FOLDER


def doc_to_visual(doc):
    return [Image.open(FOLDER / name).convert("RGB") for name in doc["files"]]


def doc_to_text(doc):
    return f"{doc['names'][doc['ask']]}'s card: "


def doc_to_messages(doc, lmms_eval_specific_kwargs=None):
    content = []
    for name, picture in zip(doc["names"], doc_to_visual(doc), strict=True):
        content.append({"type": "text", "text": f"{name}'s card: "})
        content.append({"type": "image", "url": picture})
        content.append({"type": "text", "text": "\n"})
    content.append({"type": "text", "text": doc_to_text(doc)})
    return [{"role": "user", "content": content}]


def process_results(doc, results):
    words = results[0].split()
    return {"exact_match": float(bool(words) and words[0] == doc["answer"])}
