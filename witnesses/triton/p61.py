"""p61, NVFP4 feed-forward block, in Triton. The three products stay with eager PyTorch.

An E2M1 code times its E4M3 block scale has at most six significant bits, so it is exact in bfloat16: the kernels turn
codes and activations into such products, and the global scales of both operands are applied to what torch.mm returns.
"""

import torch
import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def absolute_maximum(x, partial, count, STEP: tl.constexpr):
    """Each program's share of max|x|."""
    best = tl.full((), 0.0, tl.float32)
    for start in range(tl.program_id(0) * STEP, count, tl.num_programs(0) * STEP):
        place = start + tl.arange(0, STEP)
        values = tl.abs(tl.load(x + place, mask=place < count, other=0.0).to(tl.float32))
        best = tl.maximum(best, tl.max(values, axis=0))
    tl.store(partial + tl.program_id(0), best)


@triton.jit
def encode_scale(partial, PARTIALS: tl.constexpr):
    """What a tensor is multiplied with so that its largest element becomes 448 * 6."""
    largest = tl.max(tl.load(partial + tl.arange(0, PARTIALS)), axis=0)
    scale = tl.div_rn(tl.full((), 2688.0, tl.float32), largest)
    return tl.where(largest > 0.0, tl.minimum(scale, 3.4028234663852886e38), 1.0)


@triton.jit
def to_e4m3(x):
    """The E4M3 value nearest to each number in 0 … 448, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    return tl.where(x < 0.015625, (x + 16384.0) - 16384.0, normal.to(tl.float32, bitcast=True))


@triton.jit
def to_e2m1(y):
    """The E2M1 value nearest to each number in ±6, ties to even."""
    bits = y.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    m = magnitude.to(tl.float32, bitcast=True)
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) & 0xFFC00000).to(tl.uint32)
    subnormal = ((m + 4194304.0) - 4194304.0).to(tl.uint32, bitcast=True)  # float32's own step at 2^22 is 0.5
    return (tl.where(m < 1.0, subnormal, normal) | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def quantise(x, partial, out, blocks, PARTIALS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """x in blocks of 16 → E2M1 value times block scale."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < blocks)[:, None]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    encode = encode_scale(partial, PARTIALS)
    decode = tl.div_rn(tl.full((), 1.0, tl.float32), encode)
    scale = tl.div_rn(tl.max(tl.abs(values), axis=1), tl.full((BLOCKS,), 6.0, tl.float32)) * encode
    scale = to_e4m3(tl.minimum(scale, 448.0))
    divisor = tl.where(scale > 0.0, scale * decode, 1.0)  # a block of zeros stays one whatever it is divided by
    inverse = tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), divisor)
    y = values * tl.minimum(inverse, 3.4028234663852886e38)[:, None]
    y = to_e2m1(tl.minimum(tl.maximum(y, -6.0), 6.0))
    tl.store(out + place, (y * scale[:, None]).to(tl.bfloat16), mask=inside)


@triton.jit
def scaled_bits(codes, scale):
    """The bits, in an int64, of the bfloat16 of the lowest code of `codes` times `scale`.

    The bits of an E2M1 number are the top bits of a float16 number 2^14 times smaller. The product is exact in
    bfloat16, so its bits are the upper half of the float32's.
    """
    half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.float16, bitcast=True)
    product = (half.to(tl.float32) * scale).to(tl.uint32, bitcast=True)
    return (product >> 16).to(tl.int64)


@triton.jit
def dequantise(codes, scales, out, blocks, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """Weight codes, four in 16 bits, and E4M3 block scales → their products, four bfloat16 in 64 bits."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    place = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    raw = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
    exponent, digits = raw >> 3, raw & 7
    normal = (((exponent + 120) << 23) | (digits << 20)).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, digits.to(tl.float32) * 0.001953125, normal)[:, None] * 16384.0
    four = tl.load(codes + place, mask=inside[:, None], other=0)
    packed = scaled_bits(four, scale) | (scaled_bits(four >> 4, scale) << 16)
    packed |= (scaled_bits(four >> 8, scale) << 32) | (scaled_bits(four >> 12, scale) << 48)
    tl.store(out + place, packed, mask=inside[:, None])


@triton.jit
def gated(
    gate,
    up,
    x_partial,
    gate_scale,
    up_scale,
    out,
    partial,
    count,
    PARTIALS: tl.constexpr,
    STEP: tl.constexpr,
):
    """silu(gate) * up in bfloat16 steps, and each program's share of its absolute maximum."""
    decode = tl.div_rn(tl.full((), 1.0, tl.float32), encode_scale(x_partial, PARTIALS))
    best = tl.full((), 0.0, tl.float32)
    for start in range(tl.program_id(0) * STEP, count, tl.num_programs(0) * STEP):
        place = start + tl.arange(0, STEP)
        inside = place < count
        g = (tl.load(gate + place, mask=inside, other=0.0) * (decode * gate_scale)).to(tl.bfloat16).to(tl.float32)
        u = (tl.load(up + place, mask=inside, other=0.0) * (decode * up_scale)).to(tl.bfloat16).to(tl.float32)
        silu = (g / (1.0 + tl.exp(-g))).to(tl.bfloat16).to(tl.float32)
        h = (silu * u).to(tl.bfloat16)
        tl.store(out + place, h, mask=inside)
        best = tl.maximum(best, tl.max(tl.abs(h.to(tl.float32)), axis=0))
    tl.store(partial + tl.program_id(0), best)


@triton.jit
def finish(x, partial, weight_scale, out, count, PARTIALS: tl.constexpr, STEP: tl.constexpr):
    """Apply the global scales and round."""
    place = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    decode = tl.div_rn(tl.full((), 1.0, tl.float32), encode_scale(partial, PARTIALS))
    values = tl.load(x + place, mask=place < count, other=0.0) * (decode * weight_scale)
    tl.store(out + place, values.to(tl.bfloat16), mask=place < count)


class Launcher:
    """The launches of one call; on a CPU with few large programs, since the interpreter charges for each."""

    def __init__(self, x: torch.Tensor) -> None:
        self.device, self.on_gpu = x.device, x.is_cuda
        self.step = 4096 if x.is_cuda else 16384
        self.blocks = 128 if x.is_cuda else 32768
        self.partials = 1024 if x.is_cuda else 1

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.empty(self.partials, dtype=torch.float32)
        absolute_maximum[(self.partials,)](x, partial, x.numel(), STEP=self.step)
        return partial

    def quantised(self, x: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        out = self.empty(*x.shape)
        blocks, per_program = x.numel() // BLOCK, min(self.blocks, 1024)
        grid = (triton.cdiv(blocks, per_program),)
        quantise[grid](x, partial, out, blocks, PARTIALS=self.partials, BLOCKS=per_program, BLOCK=BLOCK)
        return out

    def dequantised(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = self.empty(codes.shape[-2], 2 * codes.shape[-1])
        blocks = scales.numel()
        grid = (triton.cdiv(blocks, self.blocks),)
        fours, raw_scales = codes.view(torch.uint8).view(torch.uint16), scales.view(torch.uint8)
        dequantise[grid](fours, raw_scales, out.view(torch.int64), blocks, BLOCKS=self.blocks, WORDS=BLOCK // 4)
        return out

    def gated(
        self, gate: torch.Tensor, up: torch.Tensor, x_partial: torch.Tensor, gate_scale: float, up_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, partial = self.empty(*gate.shape), torch.empty_like(x_partial)
        gated[(self.partials,)](
            gate,
            up,
            x_partial,
            gate_scale,
            up_scale,
            out,
            partial,
            gate.numel(),
            PARTIALS=self.partials,
            STEP=self.step,
        )
        return out, partial

    def finished(self, x: torch.Tensor, partial: torch.Tensor, weight_scale: float) -> torch.Tensor:
        out = self.empty(*x.shape)
        grid = (triton.cdiv(x.numel(), self.step),)
        finish[grid](x, partial, weight_scale, out, x.numel(), PARTIALS=self.partials, STEP=self.step)
        return out


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a bᵀ in float32. bfloat16 operands are exact in float32, which is what a CPU multiplies."""
    return torch.mm(a, b.t(), out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float().t())


def solve(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_block_scales: torch.Tensor,
    gate_global_scale: float,
    up_weight: torch.Tensor,
    up_block_scales: torch.Tensor,
    up_global_scale: float,
    down_weight: torch.Tensor,
    down_block_scales: torch.Tensor,
    down_global_scale: float,
) -> torch.Tensor:
    run = Launcher(x)
    tokens = x.reshape(-1, x.shape[-1])
    x_partial = run.maximum(tokens)
    quantised = run.quantised(tokens, x_partial)
    gate = product(quantised, run.dequantised(gate_weight, gate_block_scales))
    up = product(quantised, run.dequantised(up_weight, up_block_scales))
    hidden, h_partial = run.gated(gate, up, x_partial, gate_global_scale, up_global_scale)
    down = product(run.quantised(hidden, h_partial), run.dequantised(down_weight, down_block_scales))
    return run.finished(down, h_partial, down_global_scale).reshape(x.shape)
