"""The built-in transformer: the same everywhere, quick, and causal."""

import torch

from layerscope.models.tiny import tiny_transformer

IDS = torch.tensor([list(b"hello, world")])


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    one = tiny_transformer(seed=7)(IDS)
    torch.manual_seed(2)
    assert torch.equal(one, tiny_transformer(seed=7)(IDS))
    assert not torch.equal(one, tiny_transformer(seed=8)(IDS))


def test_building_it_leaves_the_random_state_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_transformer()
    assert torch.equal(torch.rand(3), expected)


def test_a_position_never_sees_what_comes_after_it():
    model = tiny_transformer()
    changed = IDS.clone()
    changed[0, 6:] = 0
    torch.testing.assert_close(model(IDS)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(IDS)[:, 6:], model(changed)[:, 6:])


def test_it_tells_positions_apart():
    logits = tiny_transformer()(torch.zeros(1, 4, dtype=torch.long))
    # The same byte everywhere: attention reads one value, so only the count of positions could differ, and does not.
    torch.testing.assert_close(logits[0, 0], logits[0, 3])
    mixed = tiny_transformer()(torch.tensor([[1, 2, 1, 2, 3]]))
    swapped = tiny_transformer()(torch.tensor([[2, 1, 1, 2, 3]]))
    assert not torch.allclose(mixed[0, -1], swapped[0, -1])


def test_its_modules_have_the_names_of_its_big_relatives():
    names = {name for name, _ in tiny_transformer().named_modules()}
    assert {"model.embed_tokens", "model.layers.7.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"} <= names
