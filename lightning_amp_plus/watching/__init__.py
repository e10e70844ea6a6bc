"""Watching a training step: every operation that is dispatched, and where it runs. For the census and FP8 coverage."""
