import torch

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p40_altup_magnitude_collapse as p40
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def token_by_token(hidden, w1, w2, epsilon):
    """In float64, one token at a time."""
    x = hidden.double()
    result = torch.empty_like(x[0])
    for b in range(x.shape[1]):
        for t in range(x.shape[2]):
            rms = (x[0, b, t].dot(x[0, b, t]) / x.shape[-1]).sqrt()
            total = x[0, b, t].clone()
            for stream, weight in ((1, w1), (2, w2)):
                p = weight.double() @ x[stream, b, t]
                total += p * rms / max(float(p.dot(p)) / len(p), epsilon) ** 0.5
            result[b, t] = total / 3
    return result.to(hidden.dtype)


def not_rescaled(hidden, w1, w2, _):
    x = hidden.float()
    return ((x[0] + x[1] @ w1.float().T / 8 + x[2] @ w2.float().T / 8) / 3).to(hidden.dtype)


def norm_of_the_unprojected(hidden, w1, w2, _):
    x = hidden.float()
    rms = x.square().mean(-1, keepdim=True).sqrt()
    scaled = [x[i] @ w.float().T * rms[0] / (8 * rms[i]) for i, w in ((1, w1), (2, w2))]
    return ((x[0] + scaled[0] + scaled[1]) / 3).to(hidden.dtype)


def test_agrees_with_tokens_done_one_at_a_time():
    draw = case("p40")
    assert draw.accepts(token_by_token)
    torch.testing.assert_close(draw.anchor[0], token_by_token(*promote(draw.inputs)))


def test_epsilon_is_a_floor_under_the_mean_square():
    hidden, *others = case("p40").inputs
    hidden[1, 0, 0] = 0  # an empty token has no direction and stays empty
    hidden[1, 0, 1] *= 1e-5  # a tiny one stays below the magnitude of stream 0
    expected = token_by_token(hidden.double(), *others)
    torch.testing.assert_close(p40.reference(hidden, *others).double(), expected, rtol=2**-7, atol=1e-6)
    assert expected.isfinite().all()


def test_cost_is_that_of_the_sheet():
    cost = p40.cost(p40.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (339_738_624, 100_663_296)
    assert cost.flops == {"bf16": 618_475_290_624}


def test_wrong_implementations_are_rejected():
    draw = case("p40")
    wrong = {
        "streams left at their own magnitude": not_rescaled,
        "magnitude of the stream before its projection": norm_of_the_unprojected,
        "weights swapped": lambda h, w1, w2, e: p40.reference(h, w2, w1, e),
        "weights transposed": lambda h, w1, w2, e: p40.reference(h, w1.T, w2.T, e),
        "streams in another order": altered(p40.reference, hidden_states=lambda h: h[[1, 0, 2]]),
        "stream 0 left out of the mean": lambda h, *x: (p40.reference(h, *x).float() - h[0].float() / 3).bfloat16(),
        "sum instead of mean": lambda *x: 3 * p40.reference(*x),
    }
    assert accepted(draw, wrong) == []
