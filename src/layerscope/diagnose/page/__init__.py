"""A diagnosis as a document: the sentence, what is to blame and why, then the tree of modules."""

from __future__ import annotations

__all__ = ["document", "tree"]
