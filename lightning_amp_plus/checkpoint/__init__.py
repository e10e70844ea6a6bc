"""What of the precision a checkpoint holds, and whether a run may continue it."""
