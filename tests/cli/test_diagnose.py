"""`layerscope diagnose`: the verdict, the page, the exit code."""

import json

import pytest

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(16, 16))

    def forward(self, x):
        for name in self.names:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def right():
    return Net("one", "two", "three")


def with_inputs():
    return right(), torch.randn(3, 16)


def half():
    return right().bfloat16()


def wrong():
    model = right()
    with torch.no_grad():
        model.two.weight.mul_(1.05)
    return model


def wrong_gradient():
    model = right()
    model.two.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 1.3,))
    return model


def renamed():
    model = Net("a", "b", "c")
    with torch.no_grad():
        model.c.weight.mul_(1.05)
    return model


def raising():
    model = right()
    model.two.register_forward_pre_hook(fail)
    return model


def fail(module, args):
    raise RuntimeError("no kernel for this")


def x():
    return {"x": torch.randn(3, 16)}


def none():
    return []
"""


@pytest.fixture
def models(tmp_path):
    (tmp_path / "make.py").write_text(MODELS)
    return "make.py"


def read(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_fault_is_named_in_the_first_line_and_the_exit_code_is_1(cli, models):
    answer = cli("diagnose", "make.py:with_inputs", "make.py:wrong")
    assert answer.code == 1
    title, sentence, *_ = answer.out.splitlines()
    assert title == "make.py:with_inputs against make.py:wrong"
    assert sentence.startswith("✗ ")
    assert "two" in sentence
    assert "times 1.05" in answer.out
    assert answer.err == ""


@pytest.mark.parametrize("candidate", ["right", "half"])
def test_a_healthy_pair_has_exit_code_0(cli, models, candidate):
    answer = cli("diagnose", "make.py:with_inputs", f"make.py:{candidate}")
    assert answer.code == 0
    assert answer.out.splitlines()[1].startswith("✓ ")


def test_json_and_markdown_say_the_same(cli, models):
    found = read(cli("diagnose", "make.py:with_inputs", "make.py:wrong", "--json").out)
    assert (found["verdict"], found["root"]) == ("differs", "two")
    assert found["cause"]["kind"] == "weights"
    assert {row["name"] for row in found["rows"]} == {"", "one", "two", "three"}
    page = cli("diagnose", "make.py:with_inputs", "make.py:wrong", "--markdown")
    assert page.code == 1
    assert page.out.startswith("# make.py:with_inputs against make.py:wrong\n")
    assert found["because"].split(":")[0] in page.out.replace("\\", "").replace("`", "")


def test_inputs_are_those_asked_for_or_the_references_or_the_candidates(cli, models):
    for args in (("right", "wrong", "--inputs", "make.py:x"), ("with_inputs", "wrong"), ("wrong", "with_inputs")):
        first, second, *rest = args
        found = read(cli("diagnose", f"make.py:{first}", f"make.py:{second}", *rest, "--json").out)
        assert found["root"] == "two"
    answer = cli("diagnose", "make.py:right", "make.py:wrong")
    assert answer.code == 2
    assert "came without inputs" in answer.err
    answer = cli("diagnose", "make.py:right", "make.py:wrong", "--inputs", "make.py:none")
    assert answer.code == 2
    assert "empty list" in answer.err


def test_a_prompt_and_a_seed_go_to_both_models(cli):
    answer = cli("diagnose", "tiny-transformer", "tiny-transformer", "--prompt", "Hello", "--seed", "3", "--json")
    assert answer.code == 0
    assert read(answer.out)["verdict"] == "same"


def test_gradients_are_judged_when_asked_for(cli, models):
    assert cli("diagnose", "make.py:with_inputs", "make.py:wrong_gradient").code == 0
    answer = cli("diagnose", "make.py:with_inputs", "make.py:wrong_gradient", "--backward", "--json")
    assert answer.code == 1
    assert read(answer.out)["root"] == "two"


def test_rules_say_what_belongs_together(cli, models, tmp_path):
    (tmp_path / "pairs.txt").write_text("pair one -> a\npair two -> b\npair three -> c\n")
    found = read(cli("diagnose", "make.py:with_inputs", "make.py:renamed", "--pairing", "pairs.txt", "--json").out)
    assert found["root"] == "three"
    assert found["roots"][0]["counterpart"] == "c"
    answer = cli("diagnose", "make.py:with_inputs", "make.py:renamed", "--pairing", "nowhere.txt")
    assert answer.code == 2
    assert "nowhere.txt" in answer.err


def test_a_candidate_that_raises_is_a_difference_and_a_reference_that_does_is_not_usable(cli, models):
    answer = cli("diagnose", "make.py:with_inputs", "make.py:raising")
    assert answer.code == 1
    assert "no kernel for this" in answer.out
    answer = cli("diagnose", "make.py:raising", "make.py:with_inputs")
    assert answer.code == 2
    assert answer.out == ""
    assert "no kernel for this" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("nowhere", "tiny-transformer"),
        ("tiny-transformer", "nowhere"),
        ("tiny-transformer", "tiny-transformer", "--inputs", "nowhere.npz"),
        ("tiny-transformer", "tiny-transformer", "--prompt", "x", "--inputs", "make.py:x"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(cli, models, args):
    answer = cli("diagnose", *args)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("layerscope: ")
    assert answer.err.count("\n") == 1


def test_two_pages_at_once_are_refused(cli):
    answer = cli("diagnose", "a", "b", "--json", "--markdown")
    assert answer.code == 2
    assert "ask for one of them" in answer.err
