"""Grade a reply by the facts that it must contain."""

from __future__ import annotations

from foveakv.evaluation.items import Turn


def grade(turn: Turn, reply: str) -> float:
    """Share of the turn's facts that the reply gets right, 0 to 1.

    The first line of the reply is split at the turn's separator, and the first n pieces count, n being the number of
    facts, so that extra answers are no extra attempts. A fact is right if it equals a piece; in an ordered turn, the
    piece at its own place. Repeating a fact counts once. The first `turn.uncounted` facts are left out.
    """
    separator = turn.separator.strip()
    pieces = [piece.strip() for piece in reply.strip().split("\n", 1)[0].split(separator)][: len(turn.facts)]
    if turn.ordered:
        pairs = list(zip(turn.facts, pieces, strict=False))
        right = sum(fact == piece for fact, piece in pairs[turn.uncounted :])
    else:
        right = 0
        for fact in turn.facts:
            if fact in pieces:
                pieces.remove(fact)
                right += 1
    return right / max(1, turn.counted)
