"""The command line. Commands import torch and transformers when they run, so that `foveakv --help` answers at once."""

from foveakv.cli.app import app

__all__ = ["app"]
