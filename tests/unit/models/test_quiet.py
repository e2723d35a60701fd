"""What libraries say while they are imported stays off the page, and nothing else does."""

import logging
import warnings

import pytest

from layerscope.models.quiet import quiet

TORCHAO = logging.getLogger("torchao")


def test_what_torchao_says_is_kept_quiet_and_what_others_say_is_not(caplog):
    with quiet():
        TORCHAO.warning("kernels")
        warnings.warn("from a library", UserWarning, stacklevel=1)
    assert not caplog.records
    TORCHAO.warning("mine")
    with pytest.warns(UserWarning, match="mine too"):
        warnings.warn("mine too", UserWarning, stacklevel=1)
    assert [record.message for record in caplog.records] == ["mine"]


def test_errors_come_through(caplog):
    with quiet():
        TORCHAO.error("broken")
    assert [record.message for record in caplog.records] == ["broken"]


def test_levels_come_back_when_the_block_raises():
    before = TORCHAO.level
    with pytest.raises(ZeroDivisionError), quiet():
        1 / 0  # noqa: B018
    assert TORCHAO.level == before
