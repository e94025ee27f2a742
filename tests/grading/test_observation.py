from __future__ import annotations

import pytest
import torch

from metakernelbench.grading.observation import nearest_copy, occurs, perturb, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_perturbing_changes_what_was_written_and_nothing_else(dtype: torch.dtype) -> None:
    before = torch.zeros(4, 8).to(dtype)
    x = before.clone()
    x[1:3] = (torch.arange(16).reshape(2, 8) % 5).to(dtype)
    written = x.clone()
    assert perturb(x, before)
    assert not same_bits(x, written)
    assert same_bits(x[0], written[0]) and same_bits(x[3], written[3])


def test_perturbed_floats_are_far_from_what_they_were() -> None:
    x, before = torch.randn(1000), torch.zeros(1000)
    written = x.clone()
    perturb(x, before)
    assert float((x - written).abs().min()) > 0.4 * float(written.abs().max())


def test_perturbed_indices_stay_in_range() -> None:
    x, before = torch.randperm(64), torch.full((64,), -1)
    assert perturb(x, before)
    assert x.sort().values.tolist() == list(range(64))


@pytest.mark.parametrize(
    "make",
    [
        lambda done: done.clone(),
        lambda done: done.double(),
        lambda done: done.T.contiguous(),
        lambda done: done.reshape(-1),
        lambda done: done.flatten()[torch.randperm(done.numel())],
    ],
    ids=["copy", "cast", "transposition", "reshape", "permutation"],
)
def test_a_finished_result_is_recognised_however_it_is_laid_out(make: object) -> None:
    done = torch.randn(5, 7)
    assert callable(make)
    copy = nearest_copy(done, [torch.randn(5, 7), make(done)])
    assert copy is not None and torch.equal(copy, done)


def test_real_work_is_not_a_copy_of_its_input() -> None:
    x = torch.randn(5, 7)
    copy = nearest_copy(torch.softmax(x, -1), [x])
    assert copy is not None and not torch.allclose(copy, torch.softmax(x, -1))
    assert nearest_copy(x.sum(-1), [x]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("start", [0, 1, 17, 36])
def test_a_result_is_found_in_a_larger_memory(dtype: torch.dtype, start: int) -> None:
    memory = (torch.randn(100) * 50).to(dtype)
    assert occurs(memory[start : start + 64].clone().view(8, 8), memory)


def test_a_result_that_does_not_stand_in_one_place_is_not_found() -> None:
    memory = torch.arange(100.0)
    written = memory[10:74].clone()
    written[33] = 0.5
    assert not occurs(written, memory)
    assert not occurs(memory.clone(), memory)  # as large: what `nearest_copy` looks at
    assert not occurs(memory[:3].bfloat16(), memory)


def test_all_places_of_a_memory_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metakernelbench.grading.observation._PLACES_AT_ONCE", 7)
    memory = torch.randn(100)
    assert all(occurs(memory[start : start + 5].clone(), memory) for start in range(96))
