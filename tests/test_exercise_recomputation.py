"""The checker of exercise 04.2 takes what is right, and says what is wrong."""

import gc
import re

import pytest

from helpers.exercises import recomputation  # first: it sets Triton's mode

# isort: split
import torch
from torch.utils.checkpoint import checkpoint
from verdicts import verdict


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """The checker of 04.2 collects garbage: it need not look through all that is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def sigmoids(x):
    s1 = torch.sigmoid(x)
    s2 = torch.sigmoid(s1)
    return s1, s2, torch.sigmoid(s2)


def composition(x):
    return sigmoids(x)[-1]


def slope(*values):
    product = 1
    for s in values:
        product = product * (s * (1 - s))
    return product


def made(save, gradient, forward=composition):
    """An autograd Function: save(ctx, x, y), and gradient(grad_output, *saved tensors)."""

    class Sigmoids(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = forward(x)
            save(ctx, x, y)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            return gradient(grad_output, *ctx.saved_tensors)

    return Sigmoids


def keep_x(ctx, x, y):
    ctx.save_for_backward(x)


def keep(*which):
    def save(ctx, x, y):
        values = dict(zip(("x", "s1", "s2", "s3", "y"), (x, *sigmoids(x), y), strict=True))
        ctx.save_for_backward(*(values[name] for name in which))

    return save


def from_x(grad, x):
    return grad * slope(*sigmoids(x))


class Solution(torch.autograd.Function):  # the notebook's
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(torch.sigmoid(torch.sigmoid(x)))

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        s1 = torch.sigmoid(x)
        s2 = torch.sigmoid(s1)
        s3 = torch.sigmoid(s2)
        return grad_output * s3 * (1 - s3) * s2 * (1 - s2) * s1 * (1 - s1)


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return composition(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.shape = inputs[0].shape  # an attribute, but no tensor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        return from_x(grad_output.reshape(ctx.shape), *ctx.saved_tensors)


def by_autograd(grad, x):
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        return torch.autograd.grad(composition(again), again, grad)[0]


def keep_contiguous(ctx, x, y):
    ctx.save_for_backward(x.contiguous())


def keep_slope(ctx, x, y):
    ctx.save_for_backward(slope(*sigmoids(x)))


def from_s1(grad, s1):
    s2 = torch.sigmoid(s1)
    return grad * slope(s1, s2, torch.sigmoid(s2))


RIGHT = {
    "the notebook's": Solution,
    "its apply": Solution.apply,
    "around it": lambda x: Solution.apply(x) * 1,
    "set up": WithSetup,
    "autograd in backward": made(keep_x, by_autograd),
    "vjp": made(keep_x, lambda grad, x: torch.func.vjp(composition, x)[1](grad)[0]),
    "s1": made(keep("s1"), from_s1),
    "x contiguous": made(keep_contiguous, from_x),
    "the slope": made(keep_slope, torch.mul),
    "1 - s1 as sigmoid(-x)": made(
        keep_x,
        lambda grad, x: (
            grad * torch.sigmoid(-x) * torch.sigmoid(x) * slope(*sigmoids(torch.sigmoid(x))[:2])
        ),
    ),
    "checkpoint": lambda x: checkpoint(composition, x, use_reentrant=False),
    "checkpoint of a module": lambda x: checkpoint(
        torch.nn.Sequential(*(torch.nn.Sigmoid() for _ in range(3))), x, use_reentrant=False
    ),
    "a copy in forward": made(keep_x, from_x, lambda x: composition(x.clone())),
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
def test_right_sigmoids(capsys, answer):
    assert verdict(capsys, "04.2", answer) == "correct."


def by_attribute(name, which, gradient):
    class Sigmoids(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = composition(x)
            setattr(ctx, name, which(x, y))
            return y

        @staticmethod
        def backward(ctx, grad_output):
            return gradient(grad_output, getattr(ctx, name))

    return Sigmoids


def hidden(store, push, pop):
    """What is saved lies in `store`, outside ctx."""

    class Sigmoids(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            push(store, x)
            return composition(x)

        @staticmethod
        def backward(ctx, grad_output):
            return from_x(grad_output, pop(store))

    return Sigmoids


def in_a_closure(x):
    s = sigmoids(x.detach())

    class Sigmoids(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return s[-1].clone()

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * slope(*s)

    return Sigmoids.apply(x)


class Forgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return composition(x)


class Stubs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, grad_output):
        raise NotImplementedError


class BackwardIsAStub(Forgotten):
    @staticmethod
    def backward(ctx, grad_output):
        raise NotImplementedError


def inverted(s):
    return torch.log(s) - torch.log1p(-s)


def from_y(grad, y):
    s2 = inverted(y)
    return grad * slope(y, s2, inverted(s2))


def with_exponentials(grad, x):
    s1, s2, s3 = sigmoids(x)
    return grad * slope(s2, s3) * torch.exp(-x) / (1 + torch.exp(-x)) ** 2


def in_place_on_grad(grad, x):
    return grad.mul_(slope(*sigmoids(x)))


def in_place_on_x(grad, x):
    s1 = x.sigmoid_()
    return from_s1(grad, s1)


def detached(x):
    with torch.no_grad():
        return composition(x)


def straight_through(x):
    return x + (composition(x) - x).detach()


def under_hooks(x):
    """What SigmoidBackward0 saves is packed into a list."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone()], lambda packed: packed[0]):
        return composition(x)


def changes_x(x):
    with torch.no_grad():
        x.mul_(1.5)
        x.div_(1.4)
    return Solution.apply(x)


def wrong(gradient):
    return made(keep_x, gradient)


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach().numpy().copy()
        return composition(x)

    @staticmethod
    def backward(ctx, grad_output):
        return from_x(grad_output, torch.from_numpy(ctx.x))


def beside_x(make):
    """Saves x, and on ctx what make(x) is."""

    def save(ctx, x, y):
        ctx.save_for_backward(x)
        ctx.beside = make(x)

    return made(save, from_x)


def lacking(*missing):
    """The gradient without some of the three slopes."""
    return wrong(
        lambda grad, x: grad * slope(*(s for i, s in enumerate(sigmoids(x), 1) if i not in missing))
    )


LACKS = "the gradient lacks "
WRONG_SIGMOIDS = {
    # What is kept.
    "plain": (composition, r"keeps 3 tensors of x's size .*plain sigmoids keep s1, s2 and s3"),
    "s1 s2 s3": (made(keep("s1", "s2", "s3"), lambda g, *s: g * slope(*s)), "keeps 3 tensors"),
    "x and y": (made(keep("x", "y"), lambda g, x, y: from_x(g, x)), "keeps 2 tensors"),
    "s1 s2": (
        made(keep("s1", "s2"), lambda g, a, b: g * slope(a, b, torch.sigmoid(b))),
        "keeps 2 tensors",
    ),
    "x and s1": (made(keep("x", "s1"), lambda g, x, s: from_x(g, x)), "keeps 2 tensors"),
    "stacked": (
        made(
            lambda ctx, x, y: ctx.save_for_backward(torch.stack(sigmoids(x))),
            lambda g, s: g * slope(*s),
        ),
        "keeps 3 tensors",
    ),
    "two, half precision beside": (
        made(
            lambda ctx, x, y: ctx.save_for_backward(x, x.half()),
            lambda g, x, h: from_x(g, x),
        ),
        "keeps 1.5 tensors",
    ),
    "three on ctx": (
        by_attribute("s", lambda x, y: sigmoids(x), lambda g, s: g * slope(*s)),
        "keeps 3 tensors",
    ),
    "x on ctx": (by_attribute("x", lambda x, y: x, from_x), r"ctx\.x holds a tensor"),
    "x on ctx, in a list of pieces": (
        by_attribute(
            "pieces",
            lambda x, y: [piece.clone() for piece in x.reshape(-1).split(64)],
            lambda g, pieces: from_x(g, torch.cat(pieces).view(g.shape)),
        ),
        r"ctx\.pieces holds a tensor, whole or in parts",
    ),
    "numbers on ctx beside x": (beside_x(lambda x: x.tolist()), r"ctx\.beside holds a tensor"),
    "NumPy on ctx beside x": (
        beside_x(lambda x: x.detach().numpy().copy()),
        r"ctx\.beside holds a tensor",
    ),
    "s1 on ctx, in a list": (
        by_attribute("saved", lambda x, y: [sigmoids(x)[0]], lambda g, s: from_s1(g, *s)),
        r"ctx\.saved holds a tensor",
    ),
    "y on ctx": (by_attribute("y", lambda x, y: y, from_y), r"ctx\.y holds a tensor"),
    "numpy": (InNumpy, "no tensor: use ctx.save_for_backward"),
    "a list outside": (hidden([], list.append, list.pop), "something besides ctx"),
    "a queue outside": (hidden([], list.append, lambda s: s.pop(0)), "something besides ctx"),
    "one variable outside": (
        hidden({}, lambda s, x: s.update(x=x), lambda s: s["x"]),
        "something besides ctx",
    ),
    "a closure": (in_a_closure, "keeps 3 tensors|something besides ctx"),
    "hooks": (under_hooks, "keeps 3 tensors"),
    "compiled": (torch.compile(composition, backend="aot_eager"), "leave torch.compile out"),
    # From what is kept.
    "y inverted": (
        made(keep("y"), from_y),
        "in fp32 the gradient at x = -.*is s1 computed back from s2 or y",
    ),
    "y by logit": (
        made(keep("y"), lambda g, y: g * slope(y, y.logit(), y.logit().logit())),
        "in fp32 the gradient at x = -.*is s1 computed back from s2 or y",
    ),
    "s2 inverted": (
        made(keep("s2"), lambda g, s: g * slope(torch.sigmoid(s), s, inverted(s))),
        "in fp32 the gradient at x = -.*is s1 computed back from s2 or y",
    ),
    "in half precision": (
        made(
            lambda ctx, x, y: ctx.save_for_backward(x.half()),
            lambda g, x: from_x(g, x.to(g.dtype)),
        ),
        "the gradient is wrong",
    ),
    "exponentials overflow": (
        made(keep_x, with_exponentials),
        r"x = -50 is .*does an exponential overflow",
    ),
    # Gradients.
    "grad_output ignored": (wrong(lambda g, x: slope(*sigmoids(x))), LACKS + "grad_output as"),
    "ones for grad_output": (
        wrong(lambda g, x: from_x(torch.ones_like(g), x)),
        LACKS + "grad_output as",
    ),
    "no chain": (lacking(1, 2), LACKS + r"s1 \(1 - s1\) and s2 \(1 - s2\) as a factor"),
    "s1's slope alone": (lacking(2, 3), LACKS + r"s2 \(1 - s2\) and s3 \(1 - s3\)"),
    "two of three": (lacking(3), LACKS + r"s3 \(1 - s3\) as a factor"),
    "without the first": (lacking(1), LACKS + r"s1 \(1 - s1\) as"),
    "grad_output alone": (wrong(lambda g, x: g), LACKS + r"s1 \(.*s2 \(.*s3 \(1 - s3\) as"),
    "1 - s": (
        wrong(lambda g, x: g * (1 - sigmoids(x)[0]) * slope(*sigmoids(x)[1:])),
        "the gradient is wrong: relative error",
    ),
    "s (1 + s)": (
        wrong(lambda g, x: g * sigmoids(x)[0] * (1 + sigmoids(x)[0]) * slope(*sigmoids(x)[1:])),
        "gradient is wrong",
    ),
    "slopes at the wrong place": (
        wrong(lambda g, x: g * slope(*sigmoids(torch.sigmoid(x)))),
        "gradient is wrong",
    ),
    "the first cubed": (wrong(lambda g, x: g * slope(sigmoids(x)[0]) ** 3), "gradient is wrong"),
    "the sign": (wrong(lambda g, x: -from_x(g, x)), "gradient is wrong"),
    "slopes added": (
        wrong(lambda g, x: g * sum(slope(s) for s in sigmoids(x))),
        "gradient is wrong",
    ),
    "grad_output's sum": (wrong(lambda g, x: from_x(g.sum(), x)), "gradient is wrong"),
    "zeros": (wrong(lambda g, x: torch.zeros_like(x)), "gradient is wrong"),
    "None": (wrong(lambda g, x: None), "no gradient comes back"),
    "no backward": (Forgotten, "backward is not written yet"),
    "a stub for backward": (BackwardIsAStub, "backward is not written yet"),
    "under no_grad": (detached, "no grad_fn"),
    "detached": (lambda x: composition(x).detach(), "no grad_fn"),
    "detached x": (lambda x: Solution.apply(x.detach()), "no grad_fn"),
    "straight through": (straight_through, "gradient"),
    "grad_output in place": (wrong(in_place_on_grad), "backward changes grad_output"),
    "x in place in backward": (wrong(in_place_on_x), "backward changes x"),
    "x in place in forward": (changes_x, "x is changed|y is wrong"),
    "flattened by view": (
        wrong(lambda g, x: from_x(g.view(-1), x.view(-1)).view(x.shape)),
        "RuntimeError: view size",
    ),
    "contiguous memory taken for granted": (
        wrong(lambda g, x: from_x(g, x.as_strided(g.shape, g.contiguous().stride()))),
        "for (a transposed|every other column of) x the gradient is wrong",
    ),
    "at least one dimension": (wrong(lambda g, x: from_x(g, x[:])), "IndexError: slice"),
    "at least one element": (wrong(lambda g, x: from_x(g, x + 0 * x.max())), "RuntimeError: max"),
    "one shape": (wrong(lambda g, x: from_x(g, x.reshape(5))), "RuntimeError"),
    "fp32 inside": (
        wrong(lambda g, x: from_x(g.float(), x.float()).to(g.dtype)),
        "in float64 the gradient is wrong",
    ),
    # Values.
    "two sigmoids": (made(keep_x, from_x, lambda x: sigmoids(x)[1]), "y is wrong"),
    "four sigmoids": (
        made(keep_x, from_x, lambda x: torch.sigmoid(composition(x))),
        "y is wrong",
    ),
    "tanh": (made(keep_x, from_x, torch.tanh), "y is wrong"),
    "x back": (made(keep_x, from_x, torch.clone), "y is wrong"),
    "always fp32": (made(keep_x, from_x, lambda x: composition(x.float())), "y is of torch.float"),
    "flat": (made(keep_x, from_x, lambda x: composition(x).flatten()), "y is wrong: shape"),
    "a tuple": (sigmoids, "return the tensor y, not tuple"),
    "nothing": (lambda x: None, "return the tensor y, not NoneType"),
    "checkpoint with reentrance": (
        lambda x: checkpoint(composition, x, use_reentrant=True),
        "use_reentrant=False",
    ),
}


@pytest.mark.parametrize("answer, hint", WRONG_SIGMOIDS.values(), ids=WRONG_SIGMOIDS)
def test_wrong_sigmoids_are_rejected_with_a_hint(capsys, answer, hint):
    said = verdict(capsys, "04.2", answer)
    assert re.search(hint, said), said
    assert len(said) < 500 and "Traceback" not in said


def test_only_the_second_graph_fails(capsys, monkeypatch):
    """Without the look at memory, one variable for two graphs gives wrong gradients."""
    monkeypatch.setattr(recomputation, "_assert_frugal", lambda function: None)
    for name in ("a list outside", "one variable outside"):
        said = verdict(capsys, "04.2", WRONG_SIGMOIDS[name][0])
        assert "two results wait" in said or "IndexError" in said, said


def test_stubs_are_not_attempted(capsys):
    def stub(x):
        raise NotImplementedError

    assert verdict(capsys, "04.2", stub) == "not attempted yet."
    assert verdict(capsys, "04.2", Stubs) == "not attempted yet."


def test_gradcheck_has_the_last_word(capsys):
    def gradient(grad, x):
        return from_x(grad, x) * (1 + (x.numel() == 6))  # 6 elements come there alone

    assert "gradcheck says: Jacobian mismatch" in verdict(capsys, "04.2", wrong(gradient))


def test_what_is_no_function_is_rejected(capsys):
    assert "Pass the function itself" in verdict(capsys, "04.2", torch.ones(3))
