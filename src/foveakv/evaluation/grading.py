"""Replies against facts."""

from __future__ import annotations

from foveakv.evaluation.items import Turn


def grade(turn: Turn, reply: str) -> float:
    """Share of the turn's facts that the reply gets right, 0 to 1.

    The reply is cut at the turn's separator (and at its first line break); a fact is right where it equals a piece, in
    an ordered turn the piece at its own place. A reply that says a fact twice gets it once.
    """
    separator = turn.separator.strip()
    pieces = [piece.strip() for piece in reply.strip().split("\n", 1)[0].split(separator)]
    if turn.ordered:
        right = sum(fact == piece for fact, piece in zip(turn.facts, pieces, strict=False))
    else:
        left = list(pieces)
        right = 0
        for fact in turn.facts:
            if fact in left:
                left.remove(fact)
                right += 1
    return right / max(1, len(turn.facts))
