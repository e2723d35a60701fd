"""Which point and which moment of one run is which of another, and how that is known."""

__all__ = ["alignment", "leaves", "moments", "names", "pairing", "run_points", "similarity", "unmatched"]
