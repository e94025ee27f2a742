import torch
from torch.nn.functional import linear, rms_norm

from metakernelbench.problems.attention import p10_qk_norm_rope_softcap_backward_gemma3 as p10
from tests.problems.mistakes import altered
from tests.problems.support import case


def layer(x, cos, sin, q_weight, k_weight, v_weight, o_weight, q_norm, k_norm, scaling, cap, eps):
    """The forward pass with torch's own RMS norm, complex rotation, and one query head after the other."""
    size = q_norm.shape[0]
    turn = torch.complex(cos, sin)[:, :, None, : size // 2]

    def rotated(heads):
        y = torch.complex(heads[..., : size // 2], heads[..., size // 2 :]) * turn
        return torch.cat([y.real, y.imag], dim=-1)

    q, k, v = (linear(x, w).unflatten(-1, (-1, size)) for w in (q_weight, k_weight, v_weight))
    q, k = rotated(rms_norm(q, (size,), 1 + q_norm, eps)), rotated(rms_norm(k, (size,), 1 + k_norm, eps))
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    group, heads = q.shape[2] // k.shape[2], []
    for h in range(q.shape[2]):
        logits = cap * torch.tanh(torch.einsum("bqd,bkd->bqk", q[:, :, h], k[:, :, h // group]) * scaling / cap)
        exponentials = torch.exp(logits) * visible
        heads.append(exponentials / exponentials.sum(-1, keepdim=True) @ v[:, :, h // group])
    return linear(torch.cat(heads, dim=-1), o_weight)


def by_autograd(grad_output, x, cos, sin, *weights_and_constants):
    weights, constants = weights_and_constants[:6], weights_and_constants[6:]
    with torch.enable_grad():
        leaves = [t.double().requires_grad_() for t in (x, *weights)]
        y = layer(leaves[0], cos.double(), sin.double(), *leaves[1:], *constants)
        gradients = torch.autograd.grad(y, leaves, grad_output.double())
    return tuple(g.to(x.dtype) for g in gradients)


def test_gradients_agree_with_autograd():
    draw = case("p10")
    assert draw.accepts(by_autograd)
    for actual, anchor in zip(by_autograd(*draw.inputs), draw.anchor, strict=True):
        assert torch.allclose(actual.double(), anchor, rtol=1e-6, atol=1e-6)


def test_cost_is_that_of_the_sheet():
    cost = p10.cost(p10.FULL)
    assert cost.bytes == 822_085_632
    assert f"{cost.flops['fp32_matrix']:.3e}" == "2.242e+12"


def test_wrong_implementations_are_rejected():
    draw = case("p10")

    def one_gradient_off(index, change):
        def implementation(*inputs):
            outputs = list(p10.reference(*inputs))
            outputs[index] = change(outputs[index])
            return tuple(outputs)

        return implementation

    wrong = {
        "no soft cap": altered(p10.reference, attn_logit_softcapping=lambda x: 1e4 * x),
        "another soft cap": altered(p10.reference, attn_logit_softcapping=lambda _: 30.0),
        "another scale": altered(p10.reference, scaling=lambda x: 1.001 * x),
        "another eps": altered(p10.reference, rms_norm_eps=lambda _: 1e-5),
        "norm weight without the 1": altered(p10.reference, q_norm_weight=lambda x: x - 1),
        "rotation backwards": altered(p10.reference, sin=lambda x: -x),
        "no rotation": altered(p10.reference, cos=torch.ones_like, sin=torch.zeros_like),
        "inputs in bf16": altered(p10.reference, hidden_states=lambda x: x.bfloat16().float()),
        "key weight gradient forgets a query head": one_gradient_off(2, lambda x: x * 2 / 3),
        "norm weight gradient from one batch only": one_gradient_off(5, lambda x: x / 2),
    }
    assert [name for name, implementation in wrong.items() if draw.accepts(implementation)] == []
