"""Replies against facts."""

from __future__ import annotations

from foveakv.evaluation.items import Turn


def grade(turn: Turn, reply: str) -> float:
    """Share of the turn's facts that the reply gets right, 0 to 1.

    The reply is cut at the turn's separator (and at its first line break), and as many pieces count as there are facts:
    who says more than was asked gets no second try. A fact is right where it equals a piece, in an ordered turn the
    piece at its own place. A reply that says a fact twice gets it once.
    """
    separator = turn.separator.strip()
    pieces = [piece.strip() for piece in reply.strip().split("\n", 1)[0].split(separator)][: len(turn.facts)]
    if turn.ordered:
        right = sum(fact == piece for fact, piece in zip(turn.facts, pieces, strict=False))
    else:
        right = 0
        for fact in turn.facts:
            if fact in pieces:
                pieces.remove(fact)
                right += 1
    return right / max(1, len(turn.facts))
