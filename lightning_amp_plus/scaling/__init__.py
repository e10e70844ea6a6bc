"""Everything that scales, checks, measures or clips gradients. Used by the step sequence; knows no Lightning."""
