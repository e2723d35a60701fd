"""A comparison as a document, as a page to look at, and read back from JSON."""
