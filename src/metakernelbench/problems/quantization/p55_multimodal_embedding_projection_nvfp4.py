"""Text embeddings in which masked positions are replaced, in order, by vision features projected with NVFP4.

Inputs (full workload):

    input_ids           [32, 1024]        int64             uniform in [0, 151936)
    embed_weight        [151936, 8192]    bf16              standard normal
    vision_features     [32, 384, 3584]   bf16              standard normal
    vision_proj_weight  [1, 8192, 1792]   float4_e2m1fn_x2  NVFP4 codes of standard normal / sqrt(3584), two a byte;
                                                            [.., out, in]
    vision_proj_scale   [1, 8192, 224]    float8_e4m3fn     its block scales
    vision_proj_global  Python float                        its global scale
    vision_proj_bias    [8192]            bf16              standard normal
    vision_token_mask   [32, 1024]        bool              True at 384 random positions of each sequence

Output: [32, 1024, 8192] bf16. The features are quantised to NVFP4 (formats/nvfp4.py) with one global scale for the
whole batch; their product with the weight is rounded to bf16, the bias is added in bf16, and row i of a sequence goes
to the i-th True position of its mask. If there are fewer rows or fewer positions, the first ones count.
"""

from dataclasses import dataclass

import torch

from metakernelbench.problems.formats import nvfp4
from metakernelbench.problems.formats.nvfp4 import Nvfp4
from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Look up text embeddings and replace those at masked positions, in order, by vision features projected with NVFP4 "
    "operands."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset Quant, row 7, workload 10",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Qwen3-VL, as upstream names it (no released one has hidden size 8192)",
    inferred=(
        "Unquantised tensors are bfloat16: by convention.",
        "The order of the inputs, and that the bias is added after a rounding: from the shape of the public recipe.",
        "The names of inputs 2, 4, 5, 6.",
        "The quantiser follows NVIDIA TransformerEngine's NVFP4 reference; its divisions by 6 are true divisions: "
        "our choice.",
    ),
)


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    vision_tokens: int
    vocabulary: int
    hidden: int
    vision_width: int


FULL = Workload(batch=32, sequence=1024, vision_tokens=384, vocabulary=151936, hidden=8192, vision_width=3584)
SMOKE = Workload(batch=2, sequence=32, vision_tokens=12, vocabulary=97, hidden=64, vision_width=48)

OUTPUTS = ("embeddings",)


def reference(
    input_ids: torch.Tensor,
    embed_weight: torch.Tensor,
    vision_features: torch.Tensor,
    vision_proj_weight: torch.Tensor,
    vision_proj_scale: torch.Tensor,
    vision_proj_global: float,
    vision_proj_bias: torch.Tensor,
    vision_token_mask: torch.Tensor,
) -> torch.Tensor:
    embeddings = embed_weight[input_ids]
    batch = vision_features.shape[0]
    weight = Nvfp4(
        vision_proj_weight.expand(batch, -1, -1), vision_proj_scale.expand(batch, -1, -1), vision_proj_global
    )
    product = nvfp4.matmul(nvfp4.quantize(vision_features), weight, wide(vision_features))
    projected = product.to(vision_features.dtype) + vision_proj_bias
    for b in range(batch):
        positions = vision_token_mask[b].nonzero().squeeze(-1)
        count = min(len(positions), projected.shape[1])
        if count > 0:
            embeddings[b, positions[:count]] = projected[b, :count]
    return embeddings


def vectorized(
    input_ids: torch.Tensor,
    embed_weight: torch.Tensor,
    vision_features: torch.Tensor,
    vision_proj_weight: torch.Tensor,
    vision_proj_scale: torch.Tensor,
    vision_proj_global: float,
    vision_proj_bias: torch.Tensor,
    vision_token_mask: torch.Tensor,
) -> torch.Tensor:
    """All sequences at once, and the weight dequantised once instead of once a sequence."""
    batch, vision_tokens, vision_width = vision_features.shape
    features = nvfp4.quantize(vision_features.reshape(1, -1, vision_width))
    weight = Nvfp4(vision_proj_weight, vision_proj_scale, vision_proj_global)
    product = nvfp4.matmul(features, weight, wide(vision_features)).to(vision_features.dtype)
    projected = (product + vision_proj_bias).reshape(batch, vision_tokens, -1)
    rank = vision_token_mask.cumsum(dim=-1) - 1
    replaced = vision_token_mask & (rank < vision_tokens)
    sequence, position = replaced.nonzero(as_tuple=True)
    embeddings = embed_weight[input_ids]
    embeddings[sequence, position] = projected[sequence, rank[sequence, position]]
    return embeddings


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    batch, sequence = workload.batch, workload.sequence
    input_ids = torch.randint(workload.vocabulary, (batch, sequence), device=device)
    embed_weight = normal(workload.vocabulary, workload.hidden)
    vision_features = normal(batch, workload.vision_tokens, workload.vision_width)
    std = workload.vision_width**-0.5
    weight = nvfp4.random_weight(workload.hidden, workload.vision_width, std, device)
    vision_proj_bias = normal(workload.hidden)
    vision_token_mask = torch.zeros(batch, sequence, dtype=torch.bool, device=device)
    for row in vision_token_mask:
        row[torch.randperm(sequence, device=device)[: workload.vision_tokens]] = True
    return input_ids, embed_weight, vision_features, *weight, vision_proj_bias, vision_token_mask


def cost(workload: Workload) -> Cost:
    batch, sequence, hidden, vocabulary = workload.batch, workload.sequence, workload.hidden, workload.vocabulary
    features = batch * workload.vision_tokens * workload.vision_width
    weight = hidden * workload.vision_width
    text = batch * (sequence - workload.vision_tokens)
    rows = round(vocabulary * (1 - (1 - 1 / vocabulary) ** text))  # distinct ids at text positions, as expected
    return Cost(
        bytes_read=(
            (8 + 1) * batch * sequence + 2 * features + weight // 2 + weight // 16 + 2 * hidden + 2 * rows * hidden
        ),
        bytes_written=2 * batch * sequence * hidden,
        flops={"nvfp4": 2 * features * hidden},
    )
