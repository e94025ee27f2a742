import math

import torch

from metakernelbench.problems.formats.rotary import expected_table_rows, rotary_table, rotate_halves


def test_table_rows_are_cosines_then_sines():
    table = rotary_table(50, 8, 10000.0, torch.device("cpu")).double()
    for p in (0, 1, 7, 49):
        angles = [p / 10000 ** (2 * i / 8) for i in range(4)]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert torch.allclose(table[p], torch.tensor(expected, dtype=torch.float64), atol=2**-8)


def test_rotation_is_a_product_of_complex_numbers():
    torch.manual_seed(0)
    x, angle = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    turned = torch.complex(x[:, :4], x[:, 4:]) * torch.exp(1j * angle)
    assert torch.allclose(rotate_halves(x, angle.cos(), angle.sin()), torch.cat([turned.real, turned.imag], dim=-1))


def test_expected_table_rows_is_the_average_of_draws():
    torch.manual_seed(0)
    counts = [len(set(torch.randint(0, 32, (12,)).tolist())) for _ in range(500)]
    assert abs(sum(counts) / 500 - expected_table_rows(32, 12)) < 0.2
