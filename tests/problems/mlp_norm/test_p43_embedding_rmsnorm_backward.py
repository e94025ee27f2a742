import torch
from torch.nn.functional import embedding, rms_norm

from metakernelbench.problems.mlp_norm import p43_embedding_rmsnorm_backward as p43
from tests.problems.mistakes import accepted, altered, one_output_off
from tests.problems.support import case


def test_gradients_agree_with_autograd_where_the_saved_rows_are_consistent():
    grad, ids, *_, weight = (t.double() if t.is_floating_point() else t for t in case("p43").inputs)
    torch.manual_seed(0)
    leaves = [torch.randn(p43.VOCABULARY, weight.shape[0], dtype=torch.float64).requires_grad_(), weight]
    weight.requires_grad_()
    rows = embedding(ids, leaves[0])
    gradients = torch.autograd.grad(rms_norm(rows, weight.shape, weight, 1e-6), leaves, grad)
    with torch.no_grad():
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
        actual = p43.reference(grad, ids, rows, rstd, weight)
    for value, expected in zip(actual, gradients, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_the_smoke_draw_repeats_ids_and_leaves_rows_empty():
    draw = case("p43")
    ids = draw.inputs[1].flatten()
    assert ids.unique().numel() < ids.numel()
    touched = draw.expected[0].abs().sum(dim=1).nonzero().flatten()
    assert torch.equal(touched, ids.unique())


def test_cost_is_that_of_the_sheet():
    cost = p43.cost(p43.FULL)
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (402_857_984, 536_879_104, {})


def last_token_of_an_id_wins(grad, ids, x, r, w):
    g = grad.float()
    normalised, weighted = x * r, g * w.float()
    rows = r * (weighted - normalised * (weighted * normalised).mean(-1, keepdim=True))
    table = torch.zeros(p43.VOCABULARY, x.shape[-1])
    for token, row in zip(ids.flatten().tolist(), rows.flatten(0, 1), strict=True):
        table[token] = row
    return table.to(grad.dtype), p43.reference(grad, ids, x, r, w)[1]


def no_projection(grad, ids, x, r, w):
    table = torch.zeros(p43.VOCABULARY, x.shape[-1])
    table.index_add_(0, ids.flatten(), (r * grad.float() * w.float()).flatten(0, 1))
    return table.to(grad.dtype), p43.reference(grad, ids, x, r, w)[1]


def consistent_rstd(grad, ids, x, _, w):
    return p43.reference(grad, ids, x, torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), w)


def test_wrong_implementations_are_rejected():
    draw = case("p43")
    repeated = int(draw.inputs[1].flatten().mode().values)
    wrong = {
        "the last of several tokens with an id wins": last_token_of_an_id_wins,
        "no projection on the normalised row": no_projection,
        "rstd recomputed, though it is independent": consistent_rstd,
        "weight ignored": altered(p43.reference, norm_weight=torch.ones_like),
        "ids off by one": altered(p43.reference, input_ids=lambda i: i + 1),
        "an id taken for padding": one_output_off(
            p43.reference, 0, lambda t: t * (torch.arange(p43.VOCABULARY) != repeated)[:, None]
        ),
        "weight gradient without rstd": one_output_off(
            altered(p43.reference, rstd=torch.ones_like), 0, lambda _: draw.expected[0]
        ),
        "weight gradient averaged": one_output_off(p43.reference, 1, lambda g: g / 24),
    }
    assert accepted(draw, wrong) == []
