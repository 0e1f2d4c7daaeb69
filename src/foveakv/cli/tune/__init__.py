"""`foveakv tune`: choose budgets, HAE's deciding layer, or settings by agreement with the full cache."""

from foveakv.cli.tune.command import tune

__all__ = ["tune"]
