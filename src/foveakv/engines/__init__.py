"""Engines carry out what methods decide. Today there is one: `foveakv.engines.transformers`."""
