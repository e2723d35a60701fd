"""Settings from a dict, a file, or text."""

import json

import pytest

from layerscope.monitor.config import settings_in

CONFIG = {"monitor_layers": {"a": {"alias": "b"}}, "monitor_epochs": [1, 5], "monitor_batches": [0], "lr": 0.1}
SETTINGS = {"layers_to_monitor": {"a": {"alias": "b"}}, "epochs_to_record": [1, 5], "batch_indices": [0]}


def test_a_dict_a_file_and_text_say_the_same(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG, indent=2))
    remarked = "# a remark\n" + json.dumps(CONFIG)
    assert [settings_in(each) for each in (CONFIG, path, str(path), json.dumps(CONFIG), remarked)] == [SETTINGS] * 5


def test_batches_may_be_left_out():
    assert settings_in({"monitor_layers": ["a"], "monitor_epochs": [1]})["batch_indices"] is None


@pytest.mark.parametrize(
    ("config", "said"),
    [({"lr": 1}, "has no 'monitor_layers'; it has lr"), ("{", "is not JSON"), ('[{"a": 1}]', "is a JSON list")],
)
def test_what_is_no_configuration_says_so(config, said):
    with pytest.raises(ValueError, match=said):
        settings_in(config)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        settings_in(tmp_path / "none.json")
