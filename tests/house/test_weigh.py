"""What counts as a line of code."""

from house.weigh import weight

SOURCE = '''"""Says what it is for,

in several lines."""

import os  # which is used


def f(x):
    """Returns a text."""
    # Only a comment.
    text = """two
# lines"""
    return (
        text

    )


class Empty:
    """Nothing in it."""
'''


def test_blanks_comments_and_docstrings_do_not_count_and_texts_do():
    code = ["import os", "def f", "text = ", "# lines", "return (", "text", ")", "class Empty"]
    assert weight(SOURCE) == len(code)
