"""A comparison as a document, as a page to look at, and read back from JSON."""

__all__ = ["bands", "blocks", "closeups", "document", "html_page", "provenance", "saved"]
