import torch
from torch.nn.functional import gelu, layer_norm, linear, rms_norm

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import p27_patch_merger_mlp as p27
from tests.problems.mistakes import accepted, altered
from tests.problems.support import case


def rms_norm_with_bias(x, shape, weight, bias, eps):
    return rms_norm(x, shape, weight, eps) + bias


def patch_by_patch(
    hidden, grid, ln_weight, ln_bias, w1, b1, w2, b2, eps, activation=gelu, normalise=layer_norm, swapped=False
):
    """In float64, with torch's own LayerNorm; every merged row is collected one patch at a time."""
    x = normalise(hidden.double(), hidden.shape[1:], ln_weight.double(), ln_bias.double(), eps)
    merged, start = [], 0
    for frames, rows, columns in grid.tolist():
        for frame in range(frames):
            for row in range(0, rows, 2):
                for column in range(0, columns, 2):
                    corners = [(row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1)]
                    if swapped:
                        corners[1], corners[2] = corners[2], corners[1]
                    merged.append(torch.cat([x[start + (frame * rows + r) * columns + c] for r, c in corners]))
        start += frames * rows * columns
    inner = activation(linear(torch.stack(merged), w1.double(), b1.double()))
    return linear(inner, w2.double(), b2.double()).to(hidden.dtype)


def already_merged_order(hidden, _, ln_weight, ln_bias, w1, b1, w2, b2, eps):
    x = layer_norm(hidden.float(), hidden.shape[1:], ln_weight.float(), ln_bias.float(), eps).to(hidden.dtype)
    return linear(gelu(linear(x.reshape(-1, 4 * hidden.shape[1]), w1, b1)), w2, b2)


def test_agrees_with_rows_collected_patch_by_patch():
    draw = case("p27")
    assert draw.accepts(patch_by_patch)
    torch.testing.assert_close(draw.anchor[0], patch_by_patch(*promote(draw.inputs)))


def test_vectorized_computes_the_same():
    draw = case("p27")
    assert torch.equal(p27.vectorized(*draw.inputs), draw.expected)


def test_cost_is_that_of_the_sheet():
    cost = p27.cost(p27.FULL)
    assert (cost.bytes_read, cost.bytes_written) == (220_226_752, 58_720_256)
    assert cost.flops == {"bf16": 979_252_543_488}


def test_wrong_implementations_are_rejected():
    draw = case("p27")
    wrong = {
        "rows and columns of the grid swapped": altered(p27.reference, grid_thw=lambda g: g[:, [0, 2, 1]]),
        "corners in column order": lambda *x: patch_by_patch(*x, swapped=True),
        "patches taken as if they arrived merged": already_merged_order,
        "no activation": lambda *x: patch_by_patch(*x, activation=lambda y: y),
        "RMS norm, which keeps the offset of a patch": lambda *x: patch_by_patch(*x, normalise=rms_norm_with_bias),
        "LayerNorm bias missing": altered(p27.reference, ln_bias=torch.zeros_like),
        "LayerNorm weight missing": altered(p27.reference, ln_weight=torch.ones_like),
        "first bias missing": altered(p27.reference, fc1_bias=torch.zeros_like),
        "second bias missing": altered(p27.reference, fc2_bias=torch.zeros_like),
        "eps outside every scale": altered(p27.reference, eps=lambda _: 0.1),
    }
    assert accepted(draw, wrong) == []
