import torch
from torch.nn.functional import rms_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p42_shifted_embedding_dual_rmsnorm as p42
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def token_by_token(ids, hidden, table, e_weight, h_weight, projection, eps, *, last=0, shift=1, hidden_first=False):
    """In float64 without any rounding inside, with torch's own RMS norm."""
    rows, length = [], ids.shape[1]
    for b, sequence in enumerate(ids.tolist()):
        for j in range(length):
            token = sequence[j + shift] if j + shift < length else (last if last is not None else sequence[0])
            halves = [
                rms_norm(table[token].double(), e_weight.shape, e_weight.double(), eps),
                rms_norm(hidden[b, j].double(), h_weight.shape, h_weight.double(), eps),
            ]
            rows.append(torch.cat(halves[::-1] if hidden_first else halves) @ projection.double().T)
    return torch.stack(rows).reshape(hidden.shape).to(hidden.dtype)


def test_agrees_with_tokens_done_one_at_a_time():
    draw = case("p42")
    assert draw.accepts(token_by_token)
    torch.testing.assert_close(draw.anchor[0], token_by_token(*promote(draw.inputs)))


def test_cost_is_that_of_the_sheet():
    cost = p42.cost(p42.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (199_450_624, 67_108_864)
    assert cost.flops == {"bf16": 549_755_813_888}


def test_wrong_implementations_are_rejected():
    draw = case("p42")
    wrong = {
        "embedding of the current token": lambda *x: token_by_token(*x, shift=0),
        "the roll wraps around": lambda *x: token_by_token(*x, last=None),
        "hidden state before the embedding": lambda *x: token_by_token(*x, hidden_first=True),
        "norm weights swapped": lambda ids, h, t, e, w, *x: p42.reference(ids, h, t, w, e, *x),
        "no weight on the embedding": altered(p42.reference, enorm_weight=torch.ones_like),
        "no weight on the hidden state": altered(p42.reference, hnorm_weight=torch.ones_like),
        "hidden state 20% too large": altered(p42.reference, hnorm_weight=lambda w: 1.2 * w),
        "eps of another scale": altered(p42.reference, eps=lambda _: 0.3),
    }
    assert accepted(draw, wrong) == []
