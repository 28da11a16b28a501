"""The small GPT, against one that is written down again here, in float64 and without modules."""

import dataclasses
import math

import pytest
import torch

from helpers.gpt import GPT, GPTConfig, causal_attention, linear_gelu, training_step

SMALL = GPTConfig(vocabulary=61, context=12, layers=3, heads=2, width=16)


def slow_attention(q, k, v):
    """Position by position; each sees itself and those before it."""
    out = torch.empty_like(v)
    for i in range(q.shape[2]):
        scores = torch.einsum("bhd,bhjd->bhj", q[:, :, i], k[:, :, : i + 1]) / q.shape[-1] ** 0.5
        out[:, :, i] = torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), v[:, :, : i + 1])
    return out


def norm(x, weight, bias):
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def reference(state, tokens, config):
    """The logits from the weights alone."""
    p = {name: value.double() for name, value in state.items()}
    batch, length = tokens.shape
    x = p["embedding.weight"][tokens] + p["positions.weight"][:length]
    for layer in range(config.layers):
        w = {k.removeprefix(f"blocks.{layer}."): v for k, v in p.items()}

        def linear(x, name, w=w):
            return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

        qkv = linear(norm(x, w["norm_1.weight"], w.get("norm_1.bias", 0)), "qkv")
        parts = qkv.view(batch, length, 3, config.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = slow_attention(*parts).permute(0, 2, 1, 3).reshape(batch, length, config.width)
        x = x + linear(mixed, "projection")
        h = linear(norm(x, w["norm_2.weight"], w.get("norm_2.bias", 0)), "up")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, "down")
    return norm(x, p["norm.weight"], p.get("norm.bias", 0)) @ p["embedding.weight"].T


@pytest.fixture
def model():
    return drawn(SMALL)


def drawn(config):
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():  # as drawn, layers hardly change their input, and biases are zero
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("length", [1, 5, 12])
def test_the_logits(model, length):
    tokens = torch.randint(61, (2, length))
    logits = model(tokens)
    assert logits.shape == (2, length, 61)
    expected = reference(model.state_dict(), tokens, SMALL)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_logits_without_biases():
    config = dataclasses.replace(SMALL, bias=False)
    model, tokens = drawn(config), torch.randint(61, (2, 12))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    expected = reference(model.state_dict(), tokens, config)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_size_of_gpt_2():
    with torch.device("meta"):
        models = [GPT(GPTConfig(vocabulary)) for vocabulary in (50257, 50304)]
    small, padded = (sum(p.numel() for p in model.parameters()) for model in models)
    assert small == 124_439_808 and padded - small == 47 * 768


def test_no_position_sees_later_ones(model):
    tokens = torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 61
    before, after = model(tokens)[0], model(changed)[0]
    assert (
        torch.equal(before[:7], after[:7]) and not torch.isclose(before[7:], after[7:]).all(1).any()
    )


def test_attention_is_an_argument(model):
    seen = []

    def attention(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return causal_attention(q, k, v)

    other = GPT(SMALL, attention)
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 7))
    assert torch.equal(other(tokens), model(tokens))
    assert seen == [((2, 2, 7, 8),) * 3] * 3
    other = GPT(SMALL, lambda q, k, v: v)
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(other(tokens), model(tokens))


@pytest.mark.parametrize("bias", [True, False])
def test_the_hidden_layer_is_an_argument(bias):
    config, seen = dataclasses.replace(SMALL, bias=bias), []

    def hidden(x, weight, bias):
        seen.append((x.shape, weight.shape, None if bias is None else bias.shape))
        return linear_gelu(x, weight, bias)

    model, other = drawn(config), GPT(config, hidden=hidden)
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 7))
    assert torch.equal(other(tokens), model(tokens))
    assert seen == [((2, 7, 16), (64, 16), (64,) if bias else None)] * 3
    other = GPT(config, hidden=torch.nn.functional.linear)
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(other(tokens), model(tokens))


def test_it_starts_as_a_guess_and_with_small_residuals():
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens, targets = torch.randint(61, (2, 8, 12))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert abs(loss.item() - math.log(61)) < 0.05
    stds = [block.down.weight.std().item() for block in model.blocks]
    assert stds == pytest.approx([0.02 / math.sqrt(6)] * 3, rel=0.1)
    assert model.blocks[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert all(block.qkv.bias.eq(0).all() for block in model.blocks)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_training_lowers_the_loss(autocast):
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens, targets = torch.randint(61, (2, 4, 12))
    weights = [weight.clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [training_step(model, optimizer, tokens, targets, autocast).item() for _ in range(25)]
    assert abs(losses[0] - math.log(61)) < 0.1 and losses[-1] < 0.5 * losses[0]
    changed = [not torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True)]
    assert all(changed)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_matmuls_run_in_the_type_that_is_asked_for(autocast):
    seen = set()

    def attention(q, k, v):
        seen.update((q.dtype, k.dtype, v.dtype))
        return causal_attention(q, k, v)

    model = GPT(SMALL, attention)
    tokens, targets = torch.randint(61, (2, 4, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = training_step(model, optimizer, tokens, targets, autocast)
    assert seen == {autocast or torch.float32} and loss.dtype == torch.float32


def test_a_step_starts_from_no_gradient_and_returns_the_loss_before():
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens, targets = torch.randint(61, (2, 4, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first = training_step(model, optimizer, tokens, targets)
    gradient = model.norm.weight.grad.clone()
    second = training_step(model, optimizer, tokens, targets)
    assert first == second and not first.requires_grad
    assert torch.equal(model.norm.weight.grad, gradient)  # not added up


def test_a_padded_vocabulary_changes_no_loss_when_it_is_masked():
    torch.manual_seed(0)
    plain, padded = GPT(SMALL), GPT(GPTConfig(64, 12, 3, 2, 16))
    state = plain.state_dict()
    state["embedding.weight"] = torch.cat([state["embedding.weight"], torch.randn(3, 16)])
    padded.load_state_dict(state)
    tokens = torch.randint(61, (2, 12))
    torch.testing.assert_close(padded(tokens)[..., :61], plain(tokens))


@pytest.mark.parametrize("wrong", [dict(width=17), dict(heads=3), dict(layers=0), dict(context=-1)])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ValueError):
        GPTConfig(**(dict(vocabulary=61, context=12, layers=3, heads=2, width=16) | wrong))


def test_impossible_tokens_are_refused(model):
    with pytest.raises(ValueError, match="13 tokens"):
        model(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="batch, sequence"):
        model(torch.zeros(5, dtype=torch.long))
