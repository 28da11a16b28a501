"""Training the small GPT on the course's text, with PyTorch's kernels and with ours."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from helpers import gpt_training, profiling
from helpers.check import assert_close
from helpers.device import device, has_cuda
from helpers.gpt import GPT, GPTConfig, linear_gelu
from helpers.gpt_training import (
    VARIANTS,
    Characters,
    continued,
    course_text,
    excerpts,
    fused_linear_gelu,
    gradients,
    learning_rate,
    linear_triton_gelu,
    mean_loss,
    train,
)
from helpers.recompute import bytes_kept

TINY = GPTConfig(vocabulary=40, context=12, layers=1, heads=2, width=32, bias=False)


def tiny(way="PyTorch", config=TINY):
    torch.manual_seed(0)
    return GPT(config, *VARIANTS[way]).to(device())


def some_tokens(count=200, words=40):
    draw = torch.Generator().manual_seed(3)
    return torch.randint(words, (count,), generator=draw).to(device())


def test_the_text_is_that_of_the_notebooks_before():
    text = course_text()
    cells = [
        json.loads(path.read_text("utf-8"))["cells"]
        for path in sorted(gpt_training.NOTEBOOKS.glob("*.ipynb"))
    ]
    assert text.startswith("# 01. Know your GPU") and "\n\n# 11. FlashAttention\n" in text
    assert len(text) > 500_000 and "\n\n# 12. " not in text
    first = ["".join(cell["source"]) for cell in cells[0]]
    assert course_text(1) == "\n\n".join(first)
    assert course_text(2).startswith(course_text(1) + "\n\n# 02.")


def test_other_files_are_no_part_of_the_text(tmp_path, monkeypatch):
    for name, source in (
        ("02_b", ["b\n", "c"]),
        ("01_a", ["a"]),
        ("12_d", ["d"]),
        ("Untitled", []),
    ):
        cells = json.dumps({"cells": [{"source": source, "outputs": ["x"]}]})
        (tmp_path / f"{name}.ipynb").write_text(cells, "utf-8")
    monkeypatch.setattr(gpt_training, "NOTEBOOKS", tmp_path)
    assert course_text() == "a\n\nb\nc"


def test_characters_are_numbered_in_order():
    characters = Characters("hello ∞")
    assert characters.all == " ehlo∞" and len(characters) == 6
    tokens = characters.encode("oh ∞")
    assert tokens.dtype == torch.int64 and tokens.tolist() == [4, 2, 0, 5]
    assert characters.decode(tokens) == "oh ∞" and characters.encode("").shape == (0,)
    with pytest.raises(ValueError, match="'xy'"):
        characters.encode("hxyel")


def test_excerpts():
    tokens = torch.arange(30, device=device())
    found = list(excerpts(tokens, context=8, batch=3, steps=50))
    assert len(found) == 50
    for inputs, targets in found:
        assert inputs.shape == targets.shape == (3, 8) and inputs.device == tokens.device
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs - inputs[:, :1], torch.arange(8, device=device()).expand(3, 8))
    starts = {int(first) for inputs, _ in found for first in inputs[:, 0]}
    assert starts == set(range(22))  # the last one's targets end with the text
    again, other = (next(excerpts(tokens, 8, 3, 50, seed))[0] for seed in (0, 1))
    assert torch.equal(again, found[0][0]) and not torch.equal(other, found[0][0])
    with pytest.raises(ValueError, match="8 tokens"):
        next(excerpts(tokens[:8], 8, 1, 1))
    assert next(excerpts(tokens[:9], 8, 1, 1))[0].tolist() == [list(range(8))]


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 20, 2.0) for step in range(20)]
    assert rates[:2] == [1.0, 2.0] and rates[-1] == pytest.approx(0.2)
    steps = [b - a for a, b in zip(rates[1:], rates[2:], strict=False)]
    assert steps == pytest.approx([-0.1] * 18)
    assert learning_rate(0, 1, 3.0) == 3.0
    assert [learning_rate(step, 3, 1.0) for step in range(3)] == pytest.approx([1, 0.55, 0.1])


def test_training_is_that_of_pytorch():
    model, other = tiny(), tiny()
    batches = list(excerpts(some_tokens(), 12, 2, 5))
    losses = train(model, iter(batches), 1e-2)
    optimizer = torch.optim.AdamW(other.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, (inputs, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 5, 1e-2)
        loss = F.cross_entropy(other(inputs).transpose(1, 2), targets)
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for weight, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(weight, expected, 1e-4)
    assert losses[-1] < losses[0] and train(model, [], 1.0) == []


@pytest.mark.parametrize("way", [way for way in VARIANTS if way != "PyTorch"])
def test_ours_train_as_pytorch_does(way):
    inputs, targets = next(excerpts(some_tokens(), 12, 2, 1))
    found = gradients(tiny(way), inputs, targets)
    exact = gradients(tiny().double(), inputs, targets)
    assert found.keys() == exact.keys()
    for name, gradient in found.items():
        assert_close(gradient, exact[name])
    ours, theirs = (
        train(model, excerpts(some_tokens(), 12, 2, 2), 1e-2) for model in (tiny(way), tiny())
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_gradients_are_those_of_the_weights():
    model = tiny()
    inputs, targets = next(excerpts(some_tokens(), 12, 2, 1))
    found = gradients(model, inputs, targets)
    F.cross_entropy(model(inputs).transpose(1, 2), targets).backward()
    whole = model.blocks[0].qkv.weight.grad
    parts = [found.pop(f"blocks.0.{part}.weight") for part in "qkv"]
    assert parts[0].shape == (32, 32)
    assert_close(torch.cat(parts), whole)
    left = {name: p.grad for name, p in model.named_parameters() if ".qkv." not in name}
    assert found.keys() == left.keys()
    for name, gradient in found.items():
        assert_close(gradient, left[name])


@pytest.mark.parametrize("hidden", [linear_triton_gelu, fused_linear_gelu])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_hidden_layers(hidden, autocast):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 16, device=device()), torch.randn(24, 16, device=device())
    leaves = [t.requires_grad_() for t in (x, weight)]
    exact = linear_gelu(*(t.double() for t in leaves), None)
    grad = torch.randn(2, 3, 24, device=device())
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None):
        found = hidden(x, weight, None)
    assert found.dtype == (autocast or torch.float32) and found.shape == (2, 3, 24)
    assert_close(found, exact)
    expected = torch.autograd.grad(exact, leaves, grad.double())
    tolerance = {None: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}[autocast]
    for gradient, right in zip(
        torch.autograd.grad(found, leaves, grad.to(found.dtype)), expected, strict=True
    ):
        assert gradient.dtype == torch.float32
        assert_close(gradient, right, tolerance)


def test_a_bias_cannot_be_fused():
    x, weight, bias = (torch.ones(n, device=device()) for n in ((2, 4), (3, 4), (3,)))
    assert_close(linear_triton_gelu(x, weight, bias), linear_gelu(x, weight, bias))
    with pytest.raises(ValueError, match="bias"):
        fused_linear_gelu(x, weight, bias)


def test_the_fused_layer_keeps_one_tensor_less():
    inputs = some_tokens(24).view(2, 12)
    parted, fused = (
        bytes_kept(lambda model=model: model(inputs))
        for model in map(tiny, ("our attention, GeLU", "ours, fused"))
    )
    assert parted - fused == 2 * 12 * 4 * 32 * 4


def test_the_mean_loss_is_that_of_all_whole_pieces():
    model, tokens = tiny(), some_tokens(3 * 12 + 6)
    with torch.no_grad():
        logits = model(tokens[:36].view(3, 12)).flatten(0, 1)
    expected = F.cross_entropy(logits.double(), tokens[1:37]).item()
    for batch in (1, 2, 5):
        assert mean_loss(model, tokens, batch) == pytest.approx(expected, rel=1e-6)
    assert abs(mean_loss(model, tokens[:13], 1) - math.log(40)) < 0.2
    with pytest.raises(ValueError, match="12 tokens"):
        mean_loss(model, tokens[:12], 1)


def test_text_is_continued_from_the_last_tokens():
    model, start = tiny(), some_tokens(5)
    with torch.no_grad():  # as drawn, it expects what it saw last, wherever that was
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, device=weight.device))
    likeliest = continued(model, start, 20, words=40, temperature=0)
    assert likeliest.shape == (25,) and torch.equal(likeliest[:5], start)
    with torch.no_grad():
        for end in range(5, 25):  # beyond 12 the first ones are forgotten
            seen = likeliest[max(0, end - 12) : end]
            assert model(seen[None])[0, -1].argmax() == likeliest[end]
    assert torch.equal(continued(model, start, 20, words=40, temperature=1e-4), likeliest)
    model = tiny()
    drawn, again, other = (continued(model, start, 60, 7, 1.0, seed) for seed in (0, 0, 1))
    assert torch.equal(drawn, again) and not torch.equal(drawn, other)
    assert set(drawn[5:].tolist()) == set(range(7))  # of the words that there are, all


KERNELS = {
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Traits<64>>",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64",
        "attention_tiles_kernel",
        "attention_hopper_kernel",
        "delta_kernel",
        "keys_gradient_kernel",
        "queries_gradient_kernel",
    ],
    "GeLU": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at)>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluBackwardCUDAKernelImpl>",
        "triton_gelu_kernel",
        "triton_gelu_backward_kernel",
    ],
    "matmuls": [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "matmul_pingpong_kernel",
    ],
    "AdamW": [
        "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>"
    ],
    "rest": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>",
        "Memset (Device)",
    ],
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_by_kind(kind):
    assert {gpt_training.kind_of_kernel(name) for name in KERNELS[kind]} == {kind}


def test_ms_by_kind():
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": i, "dur": 500, "args": {"correlation": i}}
        for i, name in enumerate(KERNELS["attention"][:3] + KERNELS["rest"])
    ]
    found = gpt_training.ms_by_kind(profiling.Capture([], {"traceEvents": events}))
    assert found.to_dict() == {"GeLU": 0, "attention": 1.5, "matmuls": 0, "AdamW": 0, "rest": 1.5}
    if not has_cuda():
        nothing = gpt_training.ms_by_kind(profiling.capture(lambda: torch.ones(3) + 1))
        assert nothing.to_dict() == dict.fromkeys(found.index, 0)
