"""Attention core of Qwen3-14B whose two products run on operands quantised to NVFP4 inside the call.

Inputs (full workload):

    query_states    [64, 40, 256, 128]  bf16  standard normal: batch, head, position, channel
    key_states      [64, 8, 256, 128]   bf16  standard normal
    value_states    [64, 8, 256, 128]   bf16  standard normal
    attention_mask  [64, 1, 256, 256]   bf16  0 on and below the diagonal, the lowest bf16 number above; always the same

Outputs, bf16: the attention's output [64, 40, 256, 128] and its probabilities [64, 40, 256, 256], unquantised.

Five consecutive query heads use one key/value head. Queries and keys are quantised (formats/nvfp4.py) along their
channels with one global scale each. The scores are rounded to bf16 before and after the factor 128 ** -0.5, and after
the mask; the softmax is computed in fp32 and rounded. Probabilities are quantised along the keys, values along the
positions of one channel, again with one global scale each. Almost half of the blocks of the probabilities are zero, and
their largest element is 1, because the first position sees itself only.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Compute grouped-query attention and its probabilities with queries, keys, probabilities and values quantised to "
    "NVFP4 before the two products."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 30, workload 1",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-14B",
    inferred=(
        "Two outputs: from the shape of the public recipe; that the second is the probabilities, unquantised: as in "
        "the eager attention of Hugging Face transformers.",
        "The quantiser follows NVIDIA TransformerEngine's NVFP4 reference; its divisions by 6 are true divisions: "
        "our choice.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    query_heads: int
    kv_heads: int
    sequence: int
    head_size: int


FULL = Workload(batch=64, query_heads=40, kv_heads=8, sequence=256, head_size=128)
# Two blocks of keys, so that some blocks are wholly masked.
SMOKE = Workload(batch=2, query_heads=4, kv_heads=2, sequence=32, head_size=32)

OUTPUTS = ("output", "probabilities")
FIXED = ("attention_mask",)


def quantized_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a bᵀ for each batch item and head, of operands quantised along their last dimension."""
    quantized_a, quantized_b = nvfp4.quantize(a.flatten(0, 1)), nvfp4.quantize(b.flatten(0, 1))
    product = nvfp4.matmul(quantized_a, quantized_b, wide(a)).to(a.dtype)
    return product.reshape(*a.shape[:2], *product.shape[1:])


def reference(
    query_states: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query_states.shape[1] // key_states.shape[1]
    key = key_states.repeat_interleave(group, dim=1)
    value = value_states.repeat_interleave(group, dim=1)
    scores = quantized_product(query_states, key) * query_states.shape[-1] ** -0.5 + attention_mask
    probabilities = torch.softmax(scores, dim=-1, dtype=wide(scores)).to(scores.dtype)
    output = quantized_product(probabilities, value.transpose(-1, -2).contiguous())
    return output, probabilities


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(heads: int) -> torch.Tensor:
        shape = (workload.batch, heads, workload.sequence, workload.head_size)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    query_states, key_states, value_states = (
        normal(heads) for heads in (workload.query_heads, workload.kv_heads, workload.kv_heads)
    )
    shape = (workload.batch, 1, workload.sequence, workload.sequence)
    lowest = torch.finfo(torch.bfloat16).min
    attention_mask = torch.full(shape, lowest, dtype=torch.bfloat16, device=device).triu(1)
    return query_states, key_states, value_states, attention_mask


def cost(workload: Workload) -> Cost:
    batch, sequence, head_size = workload.batch, workload.sequence, workload.head_size
    query = batch * workload.query_heads * sequence * head_size
    key = batch * workload.kv_heads * sequence * head_size
    pairs = batch * workload.query_heads * sequence * (sequence + 1) // 2  # query and key, on or below the diagonal
    return Cost(
        bytes_read=2 * (query + 2 * key),  # the mask is known
        bytes_written=2 * (query + batch * workload.query_heads * sequence * sequence),
        flops={"nvfp4": 2 * 2 * pairs * head_size},
    )
