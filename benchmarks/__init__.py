"""Ratios against plain runs, peers and the machine's limits; interleaved in one process, never as a timed test."""
