"""Front of a multi-token-prediction head of Ling 2: the next token's embedding and the hidden state, each normalised.

Inputs (full workload):

    input_ids        [32, 256]        int64  uniform in [0, 157184)
    hidden_states    [32, 256, 4096]  bf16   standard normal
    word_embeddings  [157184, 4096]   bf16   standard normal
    enorm_weight     [4096]           bf16   0.1 * standard normal + 1
    hnorm_weight     [4096]           bf16   0.1 * standard normal + 1
    eh_proj_weight   [4096, 8192]     bf16   0.02 * standard normal; [out, in]
    eps              1e-6

Output: [32, 256, 4096] bf16. Position j takes the embedding of the token at j + 1, the last position that of token 0.
Embedding and hidden state are RMS-normalised in fp32, rounded, and multiplied by their weights in bf16; their
concatenation, embedding first, is projected.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, linear

from metakernelbench.problems.problem import Cost, Inputs, Provenance, wide

SUBJECT = (
    "Embed the next token, RMS-normalise the embedding and the hidden state, and project their concatenation to the "
    "model's width."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L1, row 56, workload 0",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="Ling 2 flash (BailingMoeV2)",
    inferred=(
        "bfloat16: from the name of the problem; int64 ids: by convention.",
        "eh_proj_weight is 0.02 * standard normal: a constant is hidden upstream, its value is our choice.",
        "eps = 1e-6: from the published configurations of the model.",
        "The shift leaves token 0 at the end; the normalised value is rounded before the weight; the embedding comes "
        "first: as in the public multi-token-prediction layer of the model.",
    ),
)

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Workload:
    batch: int
    sequence: int
    vocabulary: int
    width: int


FULL = Workload(batch=32, sequence=256, vocabulary=157184, width=4096)
SMOKE = Workload(batch=3, sequence=6, vocabulary=50, width=32)

OUTPUTS = ("output",)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    z = x.to(wide(x))
    normalised = z * torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def reference(
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    word_embeddings: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eh_proj_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    next_ids = torch.roll(input_ids, -1, dims=-1)
    next_ids[:, -1] = 0
    embedded = rms_norm(embedding(next_ids, word_embeddings), enorm_weight, eps)
    hidden = rms_norm(hidden_states, hnorm_weight, eps)
    return linear(torch.cat((embedded, hidden), dim=-1), eh_proj_weight)


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    width, tokens = workload.width, (workload.batch, workload.sequence)
    input_ids = torch.randint(workload.vocabulary, tokens, device=device)
    hidden_states, word_embeddings = normal(*tokens, width), normal(workload.vocabulary, width)
    enorm_weight, hnorm_weight = 0.1 * normal(width) + 1, 0.1 * normal(width) + 1
    eh_proj_weight = WEIGHT_STD * normal(width, 2 * width)
    return input_ids, hidden_states, word_embeddings, enorm_weight, hnorm_weight, eh_proj_weight, 1e-6


def cost(workload: Workload) -> Cost:
    width, vocabulary = workload.width, workload.vocabulary
    tokens = workload.batch * workload.sequence
    drawn = workload.batch * (workload.sequence - 1)
    # The rows that are expected to be looked up: row 0, and of the others those that some drawn id names.
    rows = round(1 + (vocabulary - 1) * (1 - (1 - 1 / vocabulary) ** drawn))
    weight = 2 * width * width
    return Cost(
        bytes_read=8 * tokens + 2 * (tokens * width + rows * width + 2 * width + weight),
        bytes_written=2 * tokens * width,
        flops={"bf16": 2 * tokens * weight},
    )
