"""The rules by which DAP drops visual tokens, by hand, and the options of HAE."""

import pytest
import torch

from foveakv.errors import MethodError
from foveakv.methods.hae import HAE, PRESETS

VISUAL = torch.tensor([[False, True, True, True, True, False]])


def gone(
    method: HAE, sums: list[float], maxima: list[float] | None = None, variance: list[float] | None = None
) -> list[int]:
    """Columns that DAP drops of a text, four visual and a text token."""
    rows = [torch.tensor([[9.0, *(values or [0.0] * 4), 9.0]]) for values in (sums, maxima, variance)]
    return method.redundant(*rows, VISUAL)[0].nonzero()[:, 0].tolist()


# ------------------------------------------------------------------------------------------------ DAP's rules, by hand


def test_global_test_compares_with_a_share_of_all_visual_attention():
    # the sum is 10: below 0.15 * 10 are 1.0 and 1.4, and 1.5 is not strictly below
    assert gone(HAE(relative=False, r=0.15, alpha=None), [1.0, 6.1, 1.5, 1.4]) == [1, 4]
    assert gone(HAE(relative=False, r=0.15, alpha=None), [1.0, 6.0, 1.5, 1.5]) == [1]


def test_individual_test_saves_what_one_text_token_looks_at():
    sums, maxima = [1.0, 6.1, 1.5, 1.4], [0.2, 0.9, 0.1, 0.4]
    assert gone(HAE(relative=False, r=0.15, alpha=0.3), sums, maxima) == [1]
    assert gone(HAE(relative=False, r=0.15, alpha=0.2), sums, maxima) == []  # 0.2 is not strictly below
    assert gone(HAE(relative=False, r=0.15, alpha=0.5), sums, maxima) == [1, 4]


def test_relative_r_counts_in_uniform_shares():
    # 0.6 / 4 tokens = 0.15 of the sum
    assert gone(HAE(r=0.6, relative=True, alpha=None), [1.0, 6.1, 1.5, 1.4]) == [1, 4]
    assert gone(HAE(relative=True, alpha=None), [1.0, 6.0, 1.6, 2.0]) == [1, 3]  # 0.7 / 4 of 10.6 is 1.855


def test_absolute_r_is_the_papers():
    sums = [0.0011, 0.0013, 0.4, 0.5976]
    assert gone(HAE(relative=False, alpha=None), sums) == [1]
    assert gone(HAE(relative=False), sums, [0.0011, 0, 0, 0]) == []
    assert gone(HAE.preset("paper"), sums, [0.0009, 0, 0, 0]) == [1]


def test_at_most_c_leave_and_the_lowest_sums_first():
    sums = [1.2, 6.0, 1.1, 1.3]
    assert gone(HAE(relative=False, r=0.2, alpha=None), sums) == [1, 3, 4]
    assert gone(HAE(relative=False, r=0.2, alpha=None, c=2), sums) == [1, 3]
    assert gone(HAE(relative=False, r=0.2, alpha=None, c=0), sums) == []
    assert gone(HAE(relative=False, r=0.2, alpha=None, c=5), sums) == [1, 3, 4]


def test_target_keeps_exactly_so_many():
    sums = [1.0, 6.0, 1.0, 2.0]
    assert gone(HAE(target_visual_tokens=2), sums) == [1, 3]
    assert gone(HAE(target_visual_tokens=3), sums) == [3]  # of equals, the later one leaves
    assert gone(HAE(target_visual_tokens=0), sums) == [1, 2, 3, 4]
    assert gone(HAE(target_visual_tokens=9), sums) == []
    assert gone(HAE(target_visual_tokens=0.5), sums) == [1, 3]
    by_variance = HAE(target_visual_tokens=2, criterion="variance")
    assert gone(by_variance, sums, variance=[0.4, 0.1, 0.2, 0.3]) == [2, 3]


def test_variance_drops_below_the_quantile():
    sums, variance = [1.0, 6.0, 2.0, 1.0], [0.4, 0.1, 0.2, 0.3]
    # the 0.6 quantile of 0.1 0.2 0.3 0.4 is 0.28
    assert gone(HAE(criterion="variance"), sums, variance=variance) == [2, 3]
    assert gone(HAE(criterion="variance", variance_quantile=1.0), sums, variance=variance) == [2, 3, 4]
    assert gone(HAE(criterion="variance", c=1), sums, variance=variance) == [2]  # lowest variance first
    assert gone(HAE(criterion="dual+variance", relative=False, r=0.25, alpha=None), sums, variance=variance) == [3]


def test_a_sequence_without_attention_to_its_image_keeps_it():
    assert gone(HAE(alpha=None), [0.0] * 4) == []


# ------------------------------------------------------------------------------------------------------------- options


def test_presets_carry_the_papers_values():
    llava = HAE.preset("llava-1.5")
    assert (llava.r, llava.alpha, llava.recycle_bin_size, llava.budget) == (0.0012, 0.001, 64, None)
    phi = HAE.preset("phi-3.5-vision")
    assert (phi.r, phi.alpha, phi.recycle_bin_size, phi.budget) == (0.0015, 0.0015, 56, 956)
    story = HAE.preset("phi-3.5-vision-story", recent=32)
    assert (story.r, story.alpha, story.recycle_bin_size, story.budget, story.recent) == (0.0005, 0.0005, 128, 1024, 32)
    assert {"paper", "llava-1.5", "phi-3.5-vision", "phi-3.5-vision-story"} == set(PRESETS)
    for name in PRESETS:
        made = HAE.preset(name, recent=0)
        assert (made.score_layer, made.rows, made.relative, made.recent, made.sink) == (0, "sum", False, 0, 0)
        assert not made.value_norm
        assert (made.candidates, made.drop_hidden_states) == ("prompt", True)
    with pytest.raises(MethodError, match=r"phi-3\.5-vision"):
        HAE.preset("gpt")


def test_presets_leave_out_what_belongs_to_a_disabled_stage():
    prompt = HAE.preset("phi-3.5-vision", ddes=False)
    assert (prompt.budget, prompt.r, prompt.score_layer) == (None, 0.0015, 0)
    decoding = HAE.preset("phi-3.5-vision", dap=False)
    assert (decoding.budget, decoding.r, decoding.drop_hidden_states) == (956, None, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dap": False, "ddes": False}, "full"),
        ({"ddes": False, "budget": 0.2}, "target_visual_tokens"),
        ({"dap": False, "drop_hidden_states": True}, "dap=True"),
        ({"r": -1}, "negative"),
        ({"alpha": -0.1}, "None"),
        ({"c": -1}, "limit"),
        ({"criterion": "both"}, "dual\\+variance"),
        ({"variance_quantile": 0.0}, "\\(0, 1\\]"),
        ({"target_visual_tokens": -2}, "192"),
        ({"target_visual_tokens": 1.5}, "0.33"),
        ({"target_visual_tokens": True}, "192"),
        ({"target_visual_tokens": 9, "c": 2}, "replaces"),
        ({"target_visual_tokens": 9, "criterion": "dual+variance"}, "replaces"),
        ({"score_layer": -1}, "score_layer must be a layer .*; got -1"),
        ({"score_layer": True}, "score_layer must be a layer .*; got True"),
        ({"score_layer": 1.5}, "a share of the depth .*; got 1.5"),
        ({"score_layer": "best"}, "calibrated.*; got 'best'"),
        ({"score_layer": "4,4"}, "several layers"),
        ({"score_layer": ()}, "several layers"),
        ({"rows": "max"}, "rows must be one of 'mean' or 'sum'"),
        ({"early_layers": "none"}, "early_layers must be one of"),
        ({"candidates": "new"}, "candidates must be one of"),
        ({"scores": "all"}, "scores must be one of"),
        ({"value_norm": 1}, "value_norm must be True or False"),
        ({"dap": False, "rows": "sum"}, "rows='sum' is an option of DAP"),
        ({"ddes": False, "scores": "shared"}, "scores='shared' is an option of DDES"),
        ({"scores": "shared", "early_layers": "own"}, "leave early_layers at its default"),
        ({"scores": "shared", "per_head_scores": True}, "leave per_head_scores at its default"),
        ({"recycle_bin_size": 0}, "at least 1"),
        ({"mode": "flush"}, "rerank"),
        ({"score": "frequency"}, "importance"),
        ({"frequency_weight": 2}, "between 0 and 1"),
        ({"recent": -1}, "recent"),
        ({"sink": -1}, "sink"),
        ({"prefill_rows": 0}, "above 0"),
        ({"prefill_rows": "some"}, "above 0"),
        ({"prefill_rows": 2.5}, "prefill_rows must be 'all' or a whole number .*; got 2.5"),
        ({"recycle_bin_size": 2.5}, "recycle_bin_size must be a whole number, at least 1 .*; got 2.5"),
        ({"recycle_bin_size": "8"}, "recycle_bin_size .*; got '8'"),
        ({"recent": 1.5}, "recent must be a whole number, at least 0 .*; got 1.5"),
        ({"sink": 1.5}, "sink must be a whole number, at least 0 .*; got 1.5"),
        ({"alpha": float("nan")}, "alpha must be a number, at least 0 .*; got nan"),
        ({"r": "x"}, "r must be a number, at least 0 .*; got 'x'"),
        ({"c": 2.5}, "c must be a whole number, at least 0 .*; got 2.5"),
        ({"target_visual_tokens": float("nan")}, "target_visual_tokens .*; got nan"),
        ({"target_visual_tokens": "9"}, "target_visual_tokens .*; got '9'"),
        ({"frequency_weight": "x"}, "frequency_weight must be a number between 0 and 1; got 'x'"),
        ({"variance_quantile": None}, "variance_quantile .*; got None"),
        ({"dap": 1}, "dap must be True or False; got 1"),
        ({"per_head_scores": "no"}, "per_head_scores must be True or False; got 'no'"),
        ({"criterion": ["dual"]}, "criterion must be one of"),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(MethodError, match=message):
        HAE(**options)
