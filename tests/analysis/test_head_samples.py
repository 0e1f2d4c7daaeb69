"""Samples for head scores: the suite's cards, a folder, and the command that makes the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_folder
from typer.testing import CliRunner

from foveakv.analysis.head_samples import card_samples, read_samples
from foveakv.analysis.head_scores import load_head_scores
from foveakv.cli import app
from foveakv.errors import InputError


def test_cards_name_the_picture_that_is_asked_for() -> None:
    for sample in card_samples(5):
        (target,) = sample.targets
        names = [line.split("'")[0] for line in sample.text.split("\n")[:-1]]
        assert sample.text.endswith(f"Tell of {names[target.image]}: ")
        assert len(sample.images) == len(names) == 4
        assert target.text.isdigit()
    assert card_samples(2, seed=1)[0].text != card_samples(2)[0].text


def test_a_folder_of_samples(tmp_path: Path) -> None:
    tiny_folder.pictures(tmp_path, 1)
    entry = {"prompt": "<image> reads?", "images": ["picture0.png"], "targets": [{"text": "EXIT", "box": [0, 0, 1, 1]}]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(entry) + "\n\n")
    (sample,) = read_samples(tmp_path)
    assert sample.images == [tmp_path / "picture0.png"]
    assert sample.targets[0].box == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"prompt": "x"}',
        '{"prompt": 5, "images": ["a.png"]}',
        '{"prompt": "x", "images": "a.png"}',
        '{"prompt": "x", "images": ["a.png"], "target": []}',
        '{"prompt": "x", "images": ["a.png"], "targets": [{"text": "a", "box": [0, 1, 1]}]}',
        '{"prompt": "x", "images": [], "targets": [{}]}',
        '{"prompt": "x", "images": ["gone.png"]}',
        "",
    ],
)
def test_damaged_samples(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"line 1|has no line"):
        read_samples(tmp_path)
    with pytest.raises(InputError, match=r"is missing"):
        read_samples(tmp_path / "none")


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    tiny_folder.pictures(tmp_path, 1)
    entry = {"prompt": "one\u2028two", "images": ["picture0.png"]}
    text = json.dumps(entry, ensure_ascii=False) + "\r\n"
    (tmp_path / "samples.jsonl").write_bytes(text.encode("utf-8-sig"))
    assert [sample.text for sample in read_samples(tmp_path)] == ["one\u2028two"]
    (tmp_path / "samples.jsonl").write_bytes(text.encode("utf-16"))
    with pytest.raises(InputError, match="line 1: not UTF-8"):
        read_samples(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    model = tiny_folder.save(tmp_path / "model")
    tiny_folder.pictures(tmp_path, 1)
    (tmp_path / "samples.jsonl").write_text('{"prompt": "<image> reads?", "images": ["picture0.png"]}')
    out = tmp_path / "scores.json"
    command = f"analyze visual-heads --model {model} --data {tmp_path} --out {out} -n 4"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert load_head_scores(out).shape == (4, 2)
    result = CliRunner().invoke(app, f"analyze visual-heads --out {tmp_path / 'scores.txt'}".split())
    assert result.exit_code == 2
    assert "is named .json or .safetensors" in result.output
