"""Tasks: what an album shows, and which facts of a list count."""

from __future__ import annotations

import pytest

from foveakv.evaluation import tasks
from foveakv.evaluation.grading import grade


def test_albums_are_nearly_all_images() -> None:
    """Four named cards, the other images without a caption; lists and turns ask for the cards only."""
    for form, facts in (("album-32", 1), ("album-list-32", 4), ("album-turns-32", 1)):
        item = tasks.find(form).item(1)
        text = item.turns[0].text
        assert len(item.images) == text.count("<image>") == 32
        assert text.count("'s card: <image>") == 4
        assert len(item.turns[0].facts) == facts
    assert len(item.turns) == 3
    assert len(tasks.find("album-64@validation").item(0).images) == 64


def test_the_first_item_of_a_list_does_not_count() -> None:
    """The first token of a list is its first digit, and the prefill that predicts it attends to everything."""
    for name, count in (("row", 6), ("reading", 9)):
        turn = tasks.find(name).item(0).turns[0]
        assert (len(turn.facts), turn.counted) == (count, count - 1)
        wrong_first = ", ".join(["x", *turn.facts[1:]])
        assert grade(turn, turn.answer) == grade(turn, wrong_first) == 1
        assert grade(turn, turn.facts[0]) == 0
        assert grade(turn, ", ".join([*turn.facts[:-1], "x"])) == pytest.approx(1 - 1 / (count - 1))
    assert tasks.find("cards-4").item(0).turns[0].counted == 1
