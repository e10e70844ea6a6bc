"""FP8 coverage: which GEMMs of a training step really ran in which format, and why the others did not.

``gemm_watcher`` sees operations (``gemms`` knows which multiply, ``roles`` what for, ``fallback`` why not in FP8),
``transformer_engine`` hears of what cannot be seen, ``tally`` adds up, ``kernels`` looks at a GPU: ``report`` is what
comes out.
"""
