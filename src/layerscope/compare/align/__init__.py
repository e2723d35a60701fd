"""Which point and which moment of one run is which of another, and how that is known."""
