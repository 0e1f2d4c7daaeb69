"""The lmms-eval adapter: arguments, prompts and figures everywhere; whole runs where lmms-eval is installed."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_folder
import torch

import foveakv
from foveakv.analysis.head_scores import save_head_scores
from foveakv.errors import BudgetError, InputError, MethodError, NoVisualTokensError, UnsupportedModeError
from foveakv.evaluation.lmms_eval import arguments, fill
from foveakv.evaluation.lmms_eval.prompts import batch_inputs, read_video, render
from foveakv.evaluation.lmms_eval.records import Records

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "data" / "lmms_cards"
NAMED = ["pretrained", "method", "budget", "batch_size"]
needs_lmms = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed: pip install -e '.[lmms]'"
)


# ---- arguments


def test_arguments_become_a_method_and_options() -> None:
    settings = {"method.theta": 0.85, "method.window": 8, "kv_dtype": "int8", "processor.do_normalize": False}
    found = arguments.parse("hybridkv", "10%", settings, NAMED)
    assert found.method == foveakv.HybridKV(budget="10%", theta=0.85, window=8)
    assert found.compress == {"kv_dtype": "int8"}
    assert found.processor == {"do_normalize": False}


def test_lmms_eval_turns_values_into_numbers_and_they_are_read_all_the_same() -> None:
    assert arguments.parse("snapkv", 1024, {}, NAMED).method == foveakv.methods.get("snapkv", budget=1024)
    assert arguments.parse("hae", None, {"method.relative": True, "method.alpha": "none"}, NAMED).method == foveakv.HAE(
        relative=True, alpha=None
    )


@pytest.mark.parametrize(
    ("method", "budget", "settings", "message"),
    [
        (None, None, {}, "say which method"),
        ("hybridvk", None, {}, "did you mean 'hybridkv'"),
        ("hybridkv", None, {"method.thet": 1}, "did you mean 'theta'"),
        ("hybridkv", None, {"theta": 0.8}, r"write method\.theta="),
        ("hybridkv", None, {"bugdet": 0.8}, "did you mean 'budget'"),
        ("hybridkv", 0.1, {"method.budget": 0.2}, "given twice"),
        ("hybridkv", None, {"method.window": "wide"}, "expected 'auto' or a whole number"),
        ("hybridkv", None, {"kv_dtype": "int3"}, "kv_dtype"),
        ("hae", None, {"max_decode_slots": 4}, "leave max_decode_slots out"),
        ("full", 0.5, {}, "full has no option 'budget'"),
        ("none", 0.5, {"kv_dtype": "int8"}, "plain model and takes no budget, kv_dtype"),
    ],
)
def test_a_wrong_argument_says_what_to_do(method: Any, budget: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        arguments.parse(method, budget, settings, NAMED)


def test_a_budget_that_cannot_be_read() -> None:
    with pytest.raises(BudgetError):
        arguments.parse("snapkv", "much", {}, NAMED)


# ---- prompts


def conversation(*parts: Any) -> list[dict[str, Any]]:
    """One user message of texts, pictures, and parts as lmms-eval writes them."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, dict):
            content.append(part)
        else:
            content.append({"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "url": part})
    return [{"role": "user", "content": content}]


def test_pieces_keep_their_order_with_and_without_a_chat_template() -> None:
    messages = conversation("A: ", tiny_folder.picture(0), "\nB: ", tiny_folder.picture(1), "\nA: ")
    assert render(tiny_folder.processor(), messages) == "A: <image>\nB: <image>\nA: "
    assert render(tiny_folder.processor(chat=True), messages) == ("<s>user: A: <image>\nB: <image>\nA: \nassistant: ")


def test_a_template_that_writes_the_first_token_gets_no_second_one() -> None:
    processor = tiny_folder.processor(chat=True)
    processor.tokenizer.padding_side = "left"
    batch = [conversation(tiny_folder.picture(0), "one"), conversation("none at all")]
    inputs = batch_inputs(processor, batch, {})
    ids = inputs["input_ids"]
    assert ((ids == processor.tokenizer.bos_token_id).sum(dim=1) == 1).all()
    assert inputs["attention_mask"][1, 0] == 0  # the short one is padded on the left
    assert inputs["pixel_values"].shape[0] == 1


def test_settings_reach_the_processor() -> None:
    batch = [conversation(tiny_folder.picture(0), "one")]
    plain = batch_inputs(tiny_folder.processor(), batch, {})["pixel_values"]
    other = batch_inputs(tiny_folder.processor(), batch, {"do_normalize": False})["pixel_values"]
    assert not torch.equal(plain, other)
    assert other.min() >= 0


def test_contents_that_cannot_be_read(tmp_path: Path) -> None:
    processor = tiny_folder.processor()
    with pytest.raises(InputError, match="audio content"):
        batch_inputs(processor, [[{"role": "user", "content": [{"type": "audio", "url": "a.wav"}]}]], {})
    with pytest.raises(InputError, match="not found"):
        batch_inputs(processor, [conversation({"type": "image", "url": str(tmp_path / "no.png")}, "what?")], {})
    with pytest.raises(InputError, match="only accepts text"):
        batch_inputs(tiny_folder.tokenizer(), [conversation(tiny_folder.picture(0), "what?")], {})


def video(path: Path, frames: int) -> str:
    """A file of gray frames that get brighter."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed: pip install opencv-python-headless")
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10.0, (64, 48))
    for i in range(frames):
        writer.write(np.full((48, 64, 3), 20 * i, dtype=np.uint8))
    writer.release()
    return str(path)


def test_frames_of_a_video_are_evenly_spaced(tmp_path: Path) -> None:
    path = video(tmp_path / "clip.avi", 10)
    some, metadata = read_video(path, 4)
    assert some.shape == (4, 48, 64, 3)
    assert list(metadata.frames_indices) == [0, 3, 6, 9]
    assert metadata.fps == 10
    assert np.allclose(some.mean(axis=(1, 2, 3)), [0, 60, 120, 180], atol=4)
    assert len(read_video(path, 32)[0]) == 10


def test_videos_reach_the_processor_with_their_times(tmp_path: Path) -> None:
    """What the families' video processors make of them needs torchvision and is no part of this test."""
    seen: dict[str, Any] = {}

    def processor(**options: Any) -> dict[str, Any]:
        seen.update(options)
        return {}

    processor.tokenizer = SimpleNamespace(bos_token=None)  # type: ignore[attr-defined]
    clip = {"type": "video", "url": video(tmp_path / "clip.avi", 6)}
    batch_inputs(processor, [conversation(clip, "what?"), conversation("nothing")], {}, frames=2)
    assert seen["text"] == ["<video>what?", "nothing"]
    assert [len(frames) for frames in seen["videos"]] == [2]
    assert list(seen["video_metadata"][0].frames_indices) == [0, 5]
    assert seen["do_sample_frames"] is False


def test_videos_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(InputError, match="not a video"):
        read_video(str(tmp_path / "text.mp4"), 4)
    with pytest.raises(InputError, match="not found"):
        read_video(str(tmp_path / "no.mp4"), 4)
    with pytest.raises(InputError, match="from paths"):
        read_video({"url": "a.mp4", "video_start": 1}, 4)


# ---- figures


def report(stored: int, full: int, seconds: float | None) -> Any:
    return SimpleNamespace(
        stored_bytes=stored, full_bytes=full, peak_bytes=full, host_bytes=0, compression=full / stored,
        prefill_seconds=1.0, token_seconds=seconds, evicted=1, retrieved=0, notes=[],
    )  # fmt: skip


def test_means_are_per_request_and_the_file_has_every_batch(tmp_path: Path) -> None:
    records = Records({"model": "m"})
    records.add({"doc_ids": [0, 1]}, {"seconds": 2.0}, report(100, 400, 0.5))
    records.add({"doc_ids": [2]}, {"seconds": 1.0}, report(50, 100, None))
    means = records.means()
    assert means["stored_bytes"] == 50
    assert means["full_bytes"] == pytest.approx(500 / 3)
    assert means["compression"] == pytest.approx(500 / 150)
    assert means["token_seconds"] == 0.5
    records.write(tmp_path / "new" / "memory.json")
    content = json.loads((tmp_path / "new" / "memory.json").read_text())
    assert content["model"] == "m"
    assert [batch["stored_bytes"] for batch in content["batches"]] == [100, 50]


def test_the_plain_model_has_no_bytes() -> None:
    records = Records({})
    records.add({"doc_ids": [0]}, {"seconds": 2.0}, None)
    assert records.means() == {}


# ---- the page of published figures


def results_of(folder: Path, date: str, results: dict[str, Any], throughput: dict[str, Any] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"results": results, "throughput": throughput or {}}
    (folder / f"{date}_results.json").write_text(json.dumps(content))


def test_fill_writes_figures_behind_their_marks_and_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| 61.7 | <!-- ours run-a gqa/exact_match*100 --> | x |\n"
        "| 1862 | <!-- ours run-a mme/perception+mme/cognition --> old |\n"
        "| 0.22 | <!-- ours run-a throughput/avg_stored_bytes*1e-9 --> |\n"
        "| 57.9 | <!-- ours run-b textvqa_val/exact_match*100 --> |\n"
    )
    model = tmp_path / "results" / "run-a" / "model"
    results_of(model, "20260101_000000", {"gqa": {"alias": "gqa", "exact_match,none": 0.1}})
    results_of(
        model,
        "20260102_000000",
        {"gqa": {"exact_match,none": 0.6172}, "mme": {"perception,none": 1500.0, "cognition,none": 350}},
        {"avg_stored_bytes": 2.5e8},
    )
    for _ in range(2):
        assert fill.main([str(page), str(tmp_path / "results")]) == 0
        rows = page.read_text().splitlines()
        assert rows[0] == "| 61.7 | <!-- ours run-a gqa/exact_match*100 --> 61.72 | x |"
        assert rows[1].endswith("--> 1,850.00 |")
        assert rows[2].endswith("--> 0.25 |")
        assert rows[3] == "| 57.9 | <!-- ours run-b textvqa_val/exact_match*100 --> |"


def test_fill_says_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("| <!-- ours run gqa --> |")
    with pytest.raises(SystemExit):
        fill.main([str(page), str(tmp_path / "nowhere")])
    assert "nowhere is not a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fill.main([str(page), str(tmp_path)])
    assert "write TASK/METRIC" in capsys.readouterr().err
    page.write_text("| <!-- ours run gqa/exact_match --> |")
    (tmp_path / "run").mkdir()
    for content, words in (("[]", "expected a JSON object"), ('{"results": []}', "results must be an object")):
        (tmp_path / "run" / "x_results.json").write_text(content)
        with pytest.raises(SystemExit):
            fill.main([str(page), str(tmp_path)])
        assert words in capsys.readouterr().err


def test_the_marks_of_the_page_can_be_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf8")
    unchanged, filled, missing = fill.fill(text, tmp_path)
    assert unchanged == text
    assert filled == 0
    assert len(missing) == text.count("<!-- ours ")
    assert missing


@pytest.mark.parametrize("page", ["papers.md", "lmms-eval.md"])
def test_the_commands_of_the_pages_can_be_read(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_head_scores(torch.rand(2, 2), "qwen-heads.json")  # the file that SparseMM's command names
    found = re.findall(r"\bmethod=\w+[^\s\"`]*", (ROOT / "docs" / page).read_text(encoding="utf8"))
    assert len(found) > 3
    for words in found:
        settings = dict(word.split("=", 1) for word in words.split(","))
        arguments.parse(settings.pop("method"), settings.pop("budget", None), settings, NAMED)


# ---- whole runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("tiny"), chat=True)


def adapter(**options: Any) -> Any:
    from lmms_eval.models import get_model

    return get_model("foveakv")(**options)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, *, batch: int = 1) -> dict[str, Any]:
    """What lmms-eval says about the local task."""
    from lmms_eval import evaluator
    from lmms_eval.tasks import TaskManager

    monkeypatch.chdir(ROOT)  # the task names its file from there
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager("ERROR", include_path=str(TASKS), include_defaults=False, model_name="foveakv")
    return evaluator.simple_evaluate(
        model="foveakv", model_args=model, tasks=["foveakv_cards"], batch_size=batch, task_manager=manager,
        verbosity="ERROR", bootstrap_iters=0,
    )  # fmt: skip


def replies(results: dict[str, Any]) -> list[str]:
    return [sample["filtered_resps"][0] for sample in results["samples"]["foveakv_cards"]]


@needs_lmms
def test_lmms_eval_knows_the_model() -> None:
    names = [entry.name for entry in entry_points(group="lmms_eval.models")]
    assert "foveakv" in names, "the package was installed before it had this entry point: pip install -e . again"
    from lmms_eval.models import get_model

    assert get_model("foveakv").__name__ == "FoveaKV"


@needs_lmms
def test_the_plain_model_and_the_full_cache_give_the_same_replies(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, where no near tie can part a batch from single prompts."""
    plain = run(tmp_path, monkeypatch, f"pretrained={tiny},method=none,dtype=float64")
    full = run(tmp_path, monkeypatch, f"pretrained={tiny},method=full,dtype=float64", batch=3)
    assert replies(plain) == replies(full)
    assert "avg_stored_bytes" not in plain["throughput"]
    assert full["throughput"]["avg_stored_bytes"] > 0


@needs_lmms
def test_compression_is_reported_per_request(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.json"
    arguments = f"pretrained={tiny},method=snapkv,budget=0.2,method.window=4,report={file}"
    results = run(tmp_path, monkeypatch, arguments, batch=2)
    content = json.loads(file.read_text())
    assert content["method"]["budget"] == 0.2
    assert [batch["doc_ids"] for batch in content["batches"]] == [[0, 1], [2, 3]]
    assert all(batch["stored_bytes"] < batch["full_bytes"] for batch in content["batches"])
    assert results["throughput"]["avg_stored_bytes"] == pytest.approx(content["means"]["stored_bytes"])
    assert results["results"]["foveakv_cards"]["exact_match,none"] >= 0


@needs_lmms
@pytest.mark.demo
def test_the_embedded_model_reads_cards_with_a_smaller_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(tmp_path, monkeypatch, "pretrained=demo,method=hybridkv,budget=0.4,method.window=8")
    assert results["results"]["foveakv_cards"]["exact_match,none"] >= 0.5  # 4 cards; chance is a tenth
    assert results["throughput"]["avg_compression"] > 1.2


@needs_lmms
def test_mistakes_are_errors_before_anything_is_loaded() -> None:
    with pytest.raises(MethodError, match="did you mean"):
        adapter(pretrained="no/such/folder", method="snapkw")
    with pytest.raises(InputError, match="say which model"):
        adapter(method="none")
    with pytest.raises(InputError, match="batch_size=auto"):
        adapter(pretrained="no/such/folder", method="none", batch_size="auto")


@needs_lmms
def test_what_is_not_supported_is_an_error_and_the_model_is_left_as_it_was(tiny: Path) -> None:
    model = adapter(pretrained=str(tiny), method="hae", **{"method.relative": True})
    for ask in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(UnsupportedModeError):
            ask([])
    assert "generate" not in vars(model.model)


@needs_lmms
def test_an_error_of_a_method_ends_the_run(tiny: Path) -> None:
    """lmms-eval's own classes may log an error and go on with an empty answer, which is then scored."""
    model = adapter(pretrained=str(tiny), method="random")
    text = [{"role": "user", "content": [{"type": "text", "text": "no picture"}]}]
    model.task_dict = {"task": {"test": [None]}}
    request = SimpleNamespace(args=("", lambda doc: text, {"max_new_tokens": 2}, 0, "task", "test"))
    with pytest.raises(NoVisualTokensError):
        model.generate_until([request])
