"""Entry point of lightning_amp_plus for every Lightning Trainer of the environment; outside the package on purpose.

Lightning calls ``callbacks`` for each Trainer it makes, ours or not. So this imports nothing: a program that never imported
``AmpPrecision`` pays nothing and gets no callback.
"""

import sys


def callbacks() -> list:
    """The resume guard where ``AmpPrecision`` may be in use, else nothing."""
    if "lightning_amp_plus.precision" not in sys.modules:
        return []
    try:
        from lightning_amp_plus.integration.guard import ResumeGuard
    except Exception as error:
        # Half-imported or half-installed: a Trainer of somebody else must still come up, whatever is wrong with us.
        print(
            f"lightning_amp_plus: resumes are checked late, since the guard cannot be imported ({error}).",
            file=sys.stderr,
        )
        return []
    return [ResumeGuard()]
