"""The dtype census: in which dtypes one real training step ran, module by module, beside what the plan promised.

``recording`` watches the step, ``comparing`` judges what it saw (pure), ``census`` is the result. Used by the callback
``DtypeCensus``, which decides when to look, and by the checkpoint contract, which keeps the result.
"""

from lightning_amp_plus.census.census import Census

__all__ = ["Census"]
