"""Attention half of a diffusion transformer block: image queries over image and text keys, modulated by a timestep.

Inputs (full workload), fp32 where nothing else is said, (out, in) for every weight:

    hidden_states            [4, 1024, 3072]  standard normal: image tokens of a 4 x 16 x 16 grid
    timestep_embedding       [4, 3072]        standard normal
    encoder_hidden_states    [4, 256, 4096]   standard normal: text tokens
    adaln_linear_weight      [18432, 3072]    standard normal / sqrt(in)
    adaln_linear_bias        [18432]          0.1 * standard normal
    to_q/k/v_weight          [3072, 3072]     as above, each followed by its bias [3072]
    to_k/v_context_weight    [3072, 4096]     as above, each followed by its bias [3072]
    to_out_weight            [3072, 3072]     as above, followed by its bias [3072]
    pos_idx_axis0/1/2        [1024]           int64, fixed: n // 256, n // 16 mod 16, n mod 16 for image token n
    cos_axis0, sin_axis0     [16, 42]         fixed: of p · 10000 ** (-j / 42) in row p, column j
    cos_axis1, sin_axis1     [56, 42]         likewise
    cos_axis2, sin_axis2     [56, 42]         likewise
    is_joint_block           int              1

Output: [4, 1024, 3072] fp32, the updated image tokens.

The modulation is adaln_linear of silu(timestep_embedding); its first three sixths are shift, scale and gate, the rest
is for an MLP that is not part of this problem. The image tokens are layer-normalised (eps 1e-6, no weight),
multiplied by 1 + scale and shifted; q, k, v are projected from them, in heads of 128. Image q and k are rotated:
dimensions 0-41 by axis 0, 42-83 by axis 1, 84-125 by axis 2, and 126-127 not. Within an axis, dimensions (2i, 2i + 1)
turn by the angle in column 2i of that axis' table at the token's position: (x, y) → (x·cos - y·sin, y·cos + x·sin).
In a joint block the layer-normalised text tokens give further keys and values, unrotated. Attention with logits q·k /
sqrt(128), output projection, times gate, plus hidden_states. Everything is computed in fp32.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm, linear, silu

from metakernelbench.problems.problem import Cost, Inputs, Provenance

SUBJECT = (
    "Adaptive layer norm of image tokens, joint attention over image and text with a three-axis rotary embedding, "
    "output projection, gate and residual."
)

PROVENANCE = Provenance(
    upstream="SOL-ExecBench, subset L2, row 31, workload 3",
    licence="NVIDIA Evaluation Dataset License Agreement (nothing of the dataset is used)",
    source_model="FIBO, as upstream names it",
    inferred=(
        "The formulas follow what is publicly known of FIBO's block and of adaptive layer norm with a zero-initialised "
        "gate, cut down to the inputs that exist; no code of either is used.",
        "hidden_states, timestep_embedding and encoder_hidden_states are standard normal.",
        "The width of an axis is 42, a third of the head size rounded down; the two dimensions left are not rotated.",
        "Rotary base 10000, layer-norm eps 1e-6 without affine part, softmax scale head size ** -0.5.",
        "No RMS norm of q and k: no weights for it are among the inputs.",
        "Neighbouring dimensions are rotated as pairs by the even columns of the tables; odd columns stay unused.",
        "The text tokens are layer-normalised without modulation, for which no weights exist.",
        "The names of the weights, the order of inputs 4 to 17 and 21 to 26, and int64 positions.",
        "Only the image tokens are returned, as one bare tensor: nothing among the inputs could update the text.",
    ),
)

HEAD_SIZE = 128
AXIS_WIDTH = HEAD_SIZE // 3
ROTARY_BASE = 10000.0
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Workload:
    batch: int
    grid: tuple[int, int, int]
    text_tokens: int
    heads: int
    text_width: int
    table_rows: tuple[int, int, int]

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def width(self) -> int:
        return self.heads * HEAD_SIZE


FULL = Workload(batch=4, grid=(4, 16, 16), text_tokens=256, heads=24, text_width=4096, table_rows=(16, 56, 56))
SMOKE = Workload(batch=2, grid=(2, 2, 3), text_tokens=5, heads=2, text_width=96, table_rows=(4, 5, 6))

OUTPUTS = ("hidden_states",)
FIXED = (
    "pos_idx_axis0",
    "pos_idx_axis1",
    "pos_idx_axis2",
    "cos_axis0",
    "sin_axis0",
    "cos_axis1",
    "sin_axis1",
    "cos_axis2",
    "sin_axis2",
)


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, width] → [batch, head, tokens, HEAD_SIZE]."""
    return x.reshape(*x.shape[:2], -1, HEAD_SIZE).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the neighbouring pairs of x [..., 2n] by the angles of cos and sin [..., n]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def reference(
    hidden_states: torch.Tensor,
    timestep_embedding: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    adaln_linear_weight: torch.Tensor,
    adaln_linear_bias: torch.Tensor,
    to_q_weight: torch.Tensor,
    to_q_bias: torch.Tensor,
    to_k_weight: torch.Tensor,
    to_k_bias: torch.Tensor,
    to_v_weight: torch.Tensor,
    to_v_bias: torch.Tensor,
    to_k_context_weight: torch.Tensor,
    to_k_context_bias: torch.Tensor,
    to_v_context_weight: torch.Tensor,
    to_v_context_bias: torch.Tensor,
    to_out_weight: torch.Tensor,
    to_out_bias: torch.Tensor,
    pos_idx_axis0: torch.Tensor,
    pos_idx_axis1: torch.Tensor,
    pos_idx_axis2: torch.Tensor,
    cos_axis0: torch.Tensor,
    sin_axis0: torch.Tensor,
    cos_axis1: torch.Tensor,
    sin_axis1: torch.Tensor,
    cos_axis2: torch.Tensor,
    sin_axis2: torch.Tensor,
    is_joint_block: int,
) -> torch.Tensor:
    modulation = linear(silu(timestep_embedding), adaln_linear_weight, adaln_linear_bias)
    shift, scale, gate = modulation[:, None].chunk(6, dim=-1)[:3]
    width, text_width = hidden_states.shape[-1], encoder_hidden_states.shape[-1]
    x = layer_norm(hidden_states, (width,), eps=LAYER_NORM_EPS) * (1 + scale) + shift
    q = heads_of(linear(x, to_q_weight, to_q_bias))
    k = heads_of(linear(x, to_k_weight, to_k_bias))
    v = heads_of(linear(x, to_v_weight, to_v_bias))

    cos = torch.cat([cos_axis0[pos_idx_axis0], cos_axis1[pos_idx_axis1], cos_axis2[pos_idx_axis2]], dim=-1)[:, 0::2]
    sin = torch.cat([sin_axis0[pos_idx_axis0], sin_axis1[pos_idx_axis1], sin_axis2[pos_idx_axis2]], dim=-1)[:, 0::2]
    rotated = 2 * cos.shape[-1]
    q = torch.cat([rotate(q[..., :rotated], cos, sin), q[..., rotated:]], dim=-1)
    k = torch.cat([rotate(k[..., :rotated], cos, sin), k[..., rotated:]], dim=-1)

    if is_joint_block:
        text = layer_norm(encoder_hidden_states, (text_width,), eps=LAYER_NORM_EPS)
        k = torch.cat([heads_of(linear(text, to_k_context_weight, to_k_context_bias)), k], dim=2)
        v = torch.cat([heads_of(linear(text, to_v_context_weight, to_v_context_bias)), v], dim=2)
    probabilities = torch.softmax(q @ k.mT * HEAD_SIZE**-0.5, dim=-1)
    attended = (probabilities @ v).transpose(1, 2).flatten(2)
    return hidden_states + gate * linear(attended, to_out_weight, to_out_bias)


def random_linear(outputs: int, inputs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a bias."""
    return torch.randn(outputs, inputs, device=device) / inputs**0.5, 0.1 * torch.randn(outputs, device=device)


def rotary_table(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [rows, AXIS_WIDTH]."""
    frequencies = ROTARY_BASE ** (-torch.arange(AXIS_WIDTH, dtype=torch.float32, device=device) / AXIS_WIDTH)
    angles = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def make_inputs(workload: Workload, device: torch.device) -> Inputs:
    batch, width, text_width = workload.batch, workload.width, workload.text_width
    hidden_states = torch.randn(batch, workload.image_tokens, width, device=device)
    timestep_embedding = torch.randn(batch, width, device=device)
    encoder_hidden_states = torch.randn(batch, workload.text_tokens, text_width, device=device)
    linears = [random_linear(6 * width, width, device)]
    linears += [random_linear(width, width, device) for _ in range(3)]
    linears += [random_linear(width, text_width, device) for _ in range(2)]
    linears += [random_linear(width, width, device)]
    _, rows, columns = workload.grid
    token = torch.arange(workload.image_tokens, device=device)
    positions = (token // (rows * columns), token // columns % rows, token % columns)
    tables = [rotary_table(rows, device) for rows in workload.table_rows]
    activations = (hidden_states, timestep_embedding, encoder_hidden_states)
    return *activations, *(t for pair in linears for t in pair), *positions, *(t for pair in tables for t in pair), 1


def cost(workload: Workload) -> Cost:
    """Without the half of the modulation that is not used."""
    batch, width, text_width = workload.batch, workload.width, workload.text_width
    image, text = batch * workload.image_tokens, batch * workload.text_tokens
    activations = image * width + batch * width + text * text_width
    modulation = 3 * width * (width + 1)
    projections = 4 * width * (width + 1) + 2 * width * (text_width + 1)
    tables = 2 * AXIS_WIDTH * sum(workload.table_rows)
    products = batch * 3 * width * width + image * 4 * width * width + text * 2 * width * text_width
    pairs = image * (workload.image_tokens + workload.text_tokens)
    return Cost(
        bytes_read=4 * (activations + modulation + projections + tables) + 8 * 3 * workload.image_tokens,
        bytes_written=4 * image * width,
        flops={"fp32_matrix": 2 * products + 4 * pairs * width},
    )
