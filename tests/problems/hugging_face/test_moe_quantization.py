"""Mixture-of-experts and quantisation problems against transformers' layers of the models that they come from.

transformers quantises to NVFP4 only with a kernel for GPUs. Where a problem quantises activations to NVFP4, that step
is ours (formats/nvfp4.py, tested elsewhere); what is compared is the layer around it, and how codes and scales are
read.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.models.bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridTopkRouter
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Experts,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mimo_v2_flash import MiMoV2FlashConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashExperts
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from metakernelbench.grading.compare import promote
from metakernelbench.problems.formats import block_scaled_fp8, nvfp4
from metakernelbench.problems.moe import p44_block_scaled_fp8_experts as p44
from metakernelbench.problems.moe import p46_router_backward as p46
from metakernelbench.problems.moe import p47_correction_bias_shared_expert as p47
from metakernelbench.problems.moe import p48_shared_expert_gate as p48
from metakernelbench.problems.moe import p49_group_limited_topk_routing as p49
from tests.problems.hugging_face.agreement import differs, disagreements, loaded, single
from tests.problems.support import case


def dequantised(codes, scales):
    """As transformers reads codes with the scales of their blocks: FP8, or two 4-bit codes in a byte."""
    return Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)


def test_p44_is_deepseek_v3s_router_and_experts_with_up_and_gate_exchanged():
    def theirs(logits, bias, hidden, hidden_scale, first, first_scale, second, second_scale, offset, factor):
        experts, width, local = logits.shape[1], hidden.shape[1], len(first)
        config = DeepseekV3Config(
            hidden_size=experts,
            n_routed_experts=experts,
            num_experts_per_tok=p44.TOP_K,
            n_group=p44.GROUPS,
            topk_group=p44.KEPT_GROUPS,
            routed_scaling_factor=factor,
        )
        router = loaded(DeepseekV3TopkRouter(config), weight=torch.eye(experts), e_score_correction_bias=bias.float())
        _, weights, selected = router(logits)

        up, gate = dequantised(first, first_scale).chunk(2, dim=1)
        config = DeepseekV3Config(hidden_size=width, n_routed_experts=local, moe_intermediate_size=up.shape[1])
        layer = loaded(
            DeepseekV3Experts(config),
            gate_up_proj=torch.cat([gate, up], dim=1),
            down_proj=dequantised(second, second_scale),
        )
        selected = selected - offset
        elsewhere = (selected < 0) | (selected >= local)
        x = dequantised(hidden, hidden_scale.T.contiguous())
        return layer(x, selected.masked_fill(elsewhere, local), weights).to(torch.bfloat16)

    assert case("p44").accepts(theirs)


def test_p45_is_qwen3_moes_experts_where_an_expert_still_has_room():
    def theirs(hidden, selected, weights, gate, up, down):
        count, (tokens, top_k) = len(gate), selected.shape
        room = dict.fromkeys(range(count), -(-5 * tokens * top_k // (4 * count)))
        weights = weights.clone()
        for token, experts in enumerate(selected.tolist()):
            for slot, expert in enumerate(experts):
                weights[token, slot] *= room[expert] > 0
                room[expert] -= 1
        config = Qwen3MoeConfig(hidden_size=hidden.shape[1], num_experts=count, moe_intermediate_size=gate.shape[2])
        projections = torch.cat([gate, up], dim=2).transpose(1, 2), down.transpose(1, 2)
        layer = loaded(Qwen3MoeExperts(config), gate_up_proj=projections[0], down_proj=projections[1])
        return layer(hidden, selected, weights)

    draw = case("p45")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


@torch.enable_grad()
def test_p46_gradients_are_those_of_qwen3_moes_router():
    draw = case("p46")
    hidden, gate, *_, grad_weights, grad_mask, grad_logits = single(draw.inputs)
    top_k = grad_weights.shape[1]
    config = Qwen3MoeConfig(
        hidden_size=hidden.shape[1], num_experts=len(gate), num_experts_per_tok=top_k, norm_topk_prob=True
    )
    router = loaded(Qwen3MoeTopKRouter(config), weight=gate)
    hidden.requires_grad_()
    logits, weights, selected = router(hidden)
    probs = logits.softmax(dim=-1)
    chosen = probs.gather(1, selected)
    # The gradient of the mask is passed straight through to the probabilities: our reading, not transformers'.
    token, slot = torch.arange(len(hidden))[:, None], torch.arange(top_k)
    straight_through = (chosen * grad_mask[selected, slot, token]).sum()
    total = (weights * grad_weights).sum() + (logits * grad_logits).sum() + straight_through
    theirs = torch.autograd.grad(total, [hidden, router.weight])
    with torch.no_grad():
        saved = probs, selected, chosen.sum(dim=-1, keepdim=True)
        ours = p46.reference(hidden, gate, *saved, grad_weights, grad_mask, grad_logits)
    assert not disagreements(ours, theirs, draw.problem.outputs)


def test_p47_is_ernies_mixture_block():
    def theirs(hidden, gate, bias, expert_gate, expert_up, expert_down, *rest):
        shared_gate, shared_up, shared_down, norm_min = rest
        config = Ernie4_5_MoeConfig(
            hidden_size=hidden.shape[-1],
            moe_num_experts=len(gate),
            moe_k=p47.TOP_K,
            moe_intermediate_size=expert_gate.shape[1],
            moe_num_shared_experts=len(shared_gate) // expert_gate.shape[1],
            moe_norm_min=norm_min,
            use_bias=False,
        )
        block = loaded(
            Ernie4_5_MoeSparseMoeBlock(config),
            gate__weight=gate,
            gate__moe_statics__e_score_correction_bias=bias,
            experts__gate_up_proj=torch.cat([expert_gate, expert_up], dim=1),
            experts__down_proj=expert_down,
            shared_experts__gate_proj__weight=shared_gate,
            shared_experts__up_proj__weight=shared_up,
            shared_experts__down_proj__weight=shared_down,
        )
        return block(hidden), block.gate(hidden.flatten(0, 1))[0]

    draw = case("p47")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p48_is_qwen3_nexts_mixture_block():
    """In float32 only: in bfloat16, transformers' router rounds the logits before it compares them, ours does not."""

    def theirs(hidden, router, gate, up, down, shared_gate, shared_up, shared_down, shared_expert_gate):
        config = Qwen3NextConfig(
            hidden_size=hidden.shape[-1],
            num_experts=len(router),
            num_experts_per_tok=p48.TOP_K,
            moe_intermediate_size=gate.shape[1],
            shared_expert_intermediate_size=len(shared_gate),
            norm_topk_prob=True,
        )
        block = loaded(
            Qwen3NextSparseMoeBlock(config),
            gate__weight=router,
            experts__gate_up_proj=torch.cat([gate, up], dim=1),
            experts__down_proj=down,
            shared_expert__gate_proj__weight=shared_gate,
            shared_expert__up_proj__weight=shared_up,
            shared_expert__down_proj__weight=shared_down,
            shared_expert_gate__weight=shared_expert_gate,
        )
        return block(hidden), block.gate(hidden)[0]

    assert not differs(case("p48"), theirs)


def test_p49_is_bailings_router_once_its_choice_is_put_in_order():
    def theirs(hidden, weight, bias, factor):
        config = BailingHybridConfig(
            hidden_size=hidden.shape[1],
            num_local_experts=len(weight),
            num_experts_per_tok=p49.TOP_K,
            n_group=p49.GROUPS,
            topk_group=p49.KEPT_GROUPS,
            routed_scaling_factor=factor,
        )
        router = loaded(BailingHybridTopkRouter(config), weight=weight, e_score_correction_bias=bias.float())
        logits, weights, selected = router(hidden)
        biased = logits.sigmoid() + bias
        order = biased.gather(1, selected).argsort(dim=1, descending=True)
        return selected.gather(1, order), weights.gather(1, order)

    assert case("p49").accepts(theirs)


@torch.enable_grad()
def test_p50_gradients_are_those_of_mimos_experts():
    draw = case("p50")
    grad_output, hidden, selected, weights, gate, up, down = promote(draw.inputs)
    config = MiMoV2FlashConfig(
        hidden_size=hidden.shape[1], n_routed_experts=len(gate), moe_intermediate_size=gate.shape[1]
    )
    layer = loaded(MiMoV2FlashExperts(config), gate_up_proj=torch.cat([gate, up], dim=1), down_proj=down)
    hidden.requires_grad_()
    weights.requires_grad_()
    output = layer(hidden, selected, weights)
    wanted = [hidden, weights, layer.gate_up_proj, layer.down_proj]
    grad_hidden, grad_weights, grad_gate_up, grad_down = torch.autograd.grad(output, wanted, grad_output)
    theirs = grad_hidden, grad_weights, *grad_gate_up.chunk(2, dim=1), grad_down
    assert not disagreements(draw.anchor, theirs, draw.problem.outputs, 1e-12)


def test_p51_is_gpt_oss_experts_with_the_dense_weights_gathered():
    def theirs(hidden, selected, weights, gate_up, gate_up_bias, down, down_bias):
        config = GptOssConfig(hidden_size=hidden.shape[1], intermediate_size=down.shape[1], num_local_experts=len(down))
        layer = loaded(
            GptOssExperts(config),
            gate_up_proj=gate_up,
            gate_up_proj_bias=gate_up_bias,
            down_proj=down,
            down_proj_bias=down_bias,
        )
        return layer(hidden, selected, weights.gather(1, selected))

    draw = case("p51")
    assert not disagreements(draw.anchor, theirs(*promote(draw.inputs)), draw.problem.outputs, 1e-12)
    assert draw.accepts(theirs)


def through_fp8(x, block):
    """Quantised by transformers, and read back by it."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block))
    parts = Fp8Quantize(quantizer).convert({"weight": x})
    return dequantised(parts["weight"], parts["weight_scale_inv"])


def fp8_product(x, weight):
    return linear(through_fp8(x, (1, 128)), through_fp8(weight, (128, 128)))


@pytest.mark.parametrize("block", [block_scaled_fp8.ACTIVATION_BLOCK, block_scaled_fp8.WEIGHT_BLOCK])
def test_block_scaled_fp8_is_transformers_but_for_its_reciprocal_scales(block):
    """transformers multiplies by 448 / max where the format divides by max / 448: now and then the next code."""
    torch.manual_seed(0)
    x = torch.randn(256, 512).bfloat16().float()
    ours = block_scaled_fp8.quantize(x, block)
    read = block_scaled_fp8.dequantize(ours, torch.float32)
    assert torch.equal(read, dequantised(ours.codes, ours.scales))
    near = torch.isclose(read, through_fp8(x, block), rtol=1e-6)
    assert near.float().mean() > 0.99
    torch.testing.assert_close(read, through_fp8(x, block), rtol=2**-3, atol=2**-9 * float(ours.scales.max()))


def test_p52_is_a_linear_layer_through_transformers_fp8():
    def theirs(x, weight, bias):
        return (fp8_product(x, weight) + bias.float()).to(x.dtype)

    assert case("p52").accepts(theirs)


def test_p53_is_qwens_gated_activation_of_operands_that_transformers_reads():
    def theirs(x, x_scale, gate, gate_scale, up, up_scale):
        config = Qwen3Config(hidden_size=x.shape[1], intermediate_size=len(gate))
        mlp = Qwen3MLP(config)
        loaded(
            mlp,
            gate_proj__weight=dequantised(gate, gate_scale),
            up_proj__weight=dequantised(up, up_scale),
            down_proj__weight=mlp.down_proj.weight,
        )
        mlp.down_proj = torch.nn.Identity()  # the problem ends before it
        return mlp(dequantised(x, x_scale)).to(torch.bfloat16)

    assert case("p53").accepts(theirs)


def test_p54_is_qwen3s_projections_and_norms_through_transformers_fp8():
    def theirs(hidden, *rest):
        *parameters, q_norm, k_norm, eps = rest
        heads = []
        for weight, bias, norm in zip(parameters[:3], parameters[3:], (q_norm, k_norm, None), strict=True):
            product = (fp8_product(hidden.flatten(0, 1), weight) + bias.float()).to(hidden.dtype)
            x = product.view(*hidden.shape[:2], -1, len(q_norm))
            heads.append((x if norm is None else loaded(Qwen3RMSNorm(len(norm), eps), weight=norm)(x)).transpose(1, 2))
        return tuple(heads)

    assert case("p54").accepts(theirs)


def test_p56_is_deepseek_v3s_latent_path_through_transformers_fp8():
    def theirs(hidden, down, norm, up, eps):
        compressed = fp8_product(hidden.flatten(0, 1), down).to(hidden.dtype)
        latent, k_rope, _ = compressed.split([len(norm), 64, len(down) - len(norm) - 64], dim=-1)
        latent = loaded(DeepseekV3RMSNorm(len(norm), eps), weight=norm)(latent)
        kv = fp8_product(latent, up).to(hidden.dtype)
        return kv.view(*hidden.shape[:2], -1, 256), k_rope.view(*hidden.shape[:2], -1)

    assert case("p56").accepts(theirs)


def read_nvfp4(codes, block_scales, global_scale):
    """The tensor as transformers reads its codes, given one float32 scale for each block."""
    return dequantised(codes, block_scales.float() * global_scale)


SAME_ROUNDINGS = 1e-2
"""Layers that round where the problem does must meet its reference, not only the allowance: requantisation in the
middle makes that wide. Equal here; another order of sums may move a code."""


class Nvfp4Linear(torch.nn.Module):
    """A linear layer in float32 that sees its input as NVFP4 leaves it, and rounds its result."""

    def __init__(self, *operand):
        super().__init__()
        self.weight = read_nvfp4(*operand)

    def forward(self, x):
        tokens = read_nvfp4(*nvfp4.quantize(x.reshape(1, -1, x.shape[-1])))
        return linear(tokens, self.weight).view(*x.shape[:-1], -1).to(x.dtype)


def test_p57_is_llamas_attention_around_nvfp4_projections():
    def theirs(hidden, cos, sin, *operands):
        q, k, v, o = (Nvfp4Linear(*operands[i : i + 3]) for i in range(0, 12, 3))
        size = cos.shape[-1]
        config = LlamaConfig(
            hidden_size=hidden.shape[-1],
            num_attention_heads=len(q.weight) // size,
            num_key_value_heads=len(k.weight) // size,
            head_dim=size,
            attn_implementation="eager",
        )
        layer = LlamaAttention(config, 0).eval()
        layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj = q, k, v, o
        mask = torch.full((hidden.shape[1],) * 2, float("-inf"), dtype=hidden.dtype).triu(1)
        return layer(hidden, position_embeddings=(cos, sin), attention_mask=mask)[0]

    draw = case("p57")
    assert not disagreements([draw.expected], theirs(*draw.inputs), draw.problem.outputs, SAME_ROUNDINGS)


def test_p59_is_a_linear_layer_of_operands_that_transformers_reads():
    def theirs(hidden, *weight):
        tokens = nvfp4.quantize(hidden)
        return linear(read_nvfp4(*tokens), read_nvfp4(*weight))

    assert case("p59").accepts(theirs)


def test_p60_is_a_product_of_operands_that_transformers_reads():
    def theirs(*operands):
        return read_nvfp4(*operands[:3]) @ read_nvfp4(*operands[3:]).mT

    assert case("p60").accepts(theirs)


def test_p61_is_qwen3s_mlp_around_nvfp4_projections():
    def theirs(x, *operands):
        mlp = Qwen3MLP(Qwen3Config(hidden_size=x.shape[-1], intermediate_size=operands[0].shape[1]))
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = (
            Nvfp4Linear(codes[0], scales[0], number)
            for codes, scales, number in (operands[:3], operands[3:6], operands[6:])
        )
        return mlp(x)

    draw = case("p61")
    assert not disagreements([draw.expected], theirs(*draw.inputs), draw.problem.outputs, SAME_ROUNDINGS)
