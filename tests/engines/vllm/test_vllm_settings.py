"""Settings of the vLLM plugin: parsed at start and per request; what is unknown or unsupported is an error."""

from typing import Any

import pytest

import foveakv
from foveakv.engines.vllm.settings import ENGINE, Choice, parse, remembered
from foveakv.errors import MethodError, NoVisualTokensError
from foveakv.methods import available, get

HAE = {"method": "hae", "options": {"ddes": False, "target_visual_tokens": 0.25}}


def test_settings_name_a_method_and_its_options() -> None:
    settings = parse(HAE)
    method: Any = settings.default.create()
    assert isinstance(method, foveakv.HAE)
    assert method.target_visual_tokens == 0.25
    assert parse({"method": "off"}).default.off


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, 'needs "method"'),
        ({**HAE, "budgets": 0.1}, "no setting 'budgets'"),
        ({"method": "hae", "budget": 0.1}, 'belong into "options"'),
        ({"method": "randon"}, "did you mean"),
        ({"method": "random", "options": {"sead": 1}}, "'seed'"),
        ({"method": "random", "options": {"budget": "much"}}, "budget"),
        ({"method": "random", "options": 3}, "an object"),
        ({"method": 3}, "must be a name"),
        ({"method": "off", "options": {"budget": 1}}, "takes no options"),
        ({**HAE, "per_request": "no"}, "per_request"),
        ({**HAE, "allow_unverified": 1}, "allow_unverified"),
        ({**HAE, "attention_every": 0}, "attention_every"),
        ({"method": "hae"}, '"scores": "shared"'),
        ({"method": "hybridkv"}, "one set of tokens for all layers and heads"),
        ({"method": "snapkv"}, "one set of tokens for all layers and heads"),
        (
            {"method": "hae", "options": {"drop_hidden_states": True, "ddes": False, "score_layer": 2}},
            "residual stream",
        ),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((MethodError, ValueError), match=message):
        parse(given)


def test_every_method_runs_or_is_refused_with_a_reason() -> None:
    options: dict[str, dict[str, Any]] = {"sparsemm": {"head_scores": "heads.json"}}
    for name in available():
        try:
            method = get(name, **options.get(name, {}))
        except (MethodError, OSError, NoVisualTokensError):
            continue
        reason = ENGINE.refusal(method)
        assert (reason is None) == (method.granularity == "token"), (name, reason)


def test_requests_may_choose() -> None:
    settings = parse(HAE)
    assert settings.of_request(None) == settings.default
    assert settings.of_request({"other": 1}) == settings.default
    assert settings.of_request({"foveakv": "off"}).off
    random = {"method": "random", "options": {"budget": 0.5}}
    assert settings.of_request({"foveakv": random}).options == {"budget": 0.5}
    assert settings.of_request({"foveakv": '{"method": "random"}'}).method == "random"


WRONG = [
    "of",
    "{",
    "[" * 100_000,
    3,
    {"method": "hybridkv"},
    {"methods": "random"},
    {**HAE, "per_request": 1},
    {"method": "random", "options": {"name": "x"}},
    {"method": "random", "options": {1: 2}},
    {"method": "hae", "options": {"preset": [1]}},
    {"method": "hae", "options": {"preset": {}}},
]


@pytest.mark.parametrize("given", WRONG)
def test_invalid_choices_of_requests_are_refused(given: Any) -> None:
    with pytest.raises(MethodError):
        parse(HAE).of_request({"foveakv": given})


FILES = [
    "/etc/layers.json",
    "layers.json",
    "layers.json ",
    "\u00a0layers.JSON\n",
    "(layers.json)",
    "[ layers.json ] ",
    "~",
    "C:\\layers",
    "heads.safetensors",
    ["layers.json"],
    {"a": "layers.json"},
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_requests_cannot_name_files(file: Any) -> None:
    given = {"method": "hae", "options": {"ddes": False, "score_layer": file}}
    with pytest.raises(MethodError, match="cannot name files"):
        parse(HAE).of_request({"foveakv": given})


def test_choices_are_remembered_by_value_and_type() -> None:
    made: list[Choice] = []

    def create(choice: Choice) -> Any:
        made.append(choice)
        return choice.create()

    of_choice = remembered(create)
    budgets: list[Any] = [1, 1.0, "1.0", 0.5, 0.5, 1]
    methods: list[Any] = [of_choice(Choice("random", {"budget": each})) for each in budgets]
    assert [repr(each.budget) for each in methods] == [repr(each) for each in budgets]
    assert len(made) == 4
    for i in range(200):
        of_choice(Choice("random", {"seed": i}))
    with pytest.raises(MethodError, match="values that JSON has"):
        of_choice(Choice("random", {"budget": {1}}))
    of_choice(Choice("hae", {"ddes": False, "score_layer": [0, 1]}))


def test_operators_can_fix_the_method() -> None:
    settings = parse({**HAE, "per_request": False})
    assert settings.of_request({}) == settings.default
    with pytest.raises(MethodError, match="per_request"):
        settings.of_request({"foveakv": "off"})
