"""Copy whole cache pages of keys and of values to other pools, under one list of page pairs.

Inputs (full workload):

    src_k, src_v   [1024, 32, 8, 256]  uint8  random bytes; pages of 65,536 bytes
    dst_k, dst_v   [1024, 32, 8, 256]  uint8  random bytes
    block_mapping  [256, 2]            int64  pairs (source page, destination page): all 512 numbers distinct, at random

Outputs: dst_k and dst_v, updated in place (the input tensors themselves); a page that is no destination stays.

For each pair (a, b): dst_k[b] = src_k[a] and dst_v[b] = src_v[a].
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = "Copy whole cache pages, for keys and for values, to destination pools under one list of page pairs."

PROVENANCE = Provenance(
    upstream="vLLM at b9b6306ebe0f5fa5046553667192e56bb3934af0",
    definition="tests/kernels/attention/test_cache.py::test_swap_blocks",
    licence="Apache-2.0",
)


@dataclass(frozen=True)
class Workload:
    pages: int
    pairs: int
    page_shape: tuple[int, int, int]


FULL = Workload(pages=1024, pairs=256, page_shape=(32, 8, 256))
SMOKE = Workload(pages=16, pairs=4, page_shape=(2, 2, 8))

OUTPUTS = ("dst_k", "dst_v")


def reference(
    src_k: torch.Tensor, src_v: torch.Tensor, dst_k: torch.Tensor, dst_v: torch.Tensor, block_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    source, destination = block_mapping.unbind(dim=1)
    dst_k[destination] = src_k[source]
    dst_v[destination] = src_v[source]
    return dst_k, dst_v


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    shape = (workload.pages, *workload.page_shape)
    pools = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(4))
    pages = torch.randperm(workload.pages, device=device)[: 2 * workload.pairs]
    return *pools, pages.view(2, workload.pairs).T.contiguous()


def cost(workload: Workload) -> Cost:
    tokens, heads, width = workload.page_shape
    copied = 2 * workload.pairs * tokens * heads * width
    return Cost(bytes_read=copied + 2 * 8 * workload.pairs, bytes_written=copied)
