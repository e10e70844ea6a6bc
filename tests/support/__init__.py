"""Tiny models, faults and Trainers that several test files share."""
