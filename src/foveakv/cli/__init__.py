"""The command line. Commands import torch and transformers when they run, so `foveakv --help` starts fast."""

from foveakv.cli.app import app, main

__all__ = ["app", "main"]
