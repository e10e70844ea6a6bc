"""How well FP8 scales fit: ``measure`` is pure, ``window`` and ``watch`` look at layers, ``report`` is the result."""
