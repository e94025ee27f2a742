"""MLP and norm problems against transformers' layers of the models that they come from, or of the same form.

Where a backward problem's saved tensors are drawn independently, the comparison first makes them consistent: only then
is there a forward pass whose gradients they belong to.
"""

import pytest
import torch
from torch.nn.functional import linear
from transformers.models.albert import AlbertConfig
from transformers.models.albert.modeling_albert import AlbertLayer
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridRMSNorm
from transformers.models.convnextv2 import ConvNextV2Config
from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2Layer
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm, Gemma3nTextModel
from transformers.models.jamba.modeling_jamba import JambaRMSNorm
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import DiTMLP, Qwen2_5_OmniAdaLayerNormZero_Final
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionPatchMerger

from metakernelbench.grading.compare import promote
from metakernelbench.problems.mlp_norm import (
    p28_fused_add_rmsnorm,
    p34_swiglu_mlp_backward,
    p36_rmsnorm_h128,
    p37_gelu_mlp_backward,
    p40_altup_magnitude_collapse,
    p43_embedding_rmsnorm_backward,
)
from tests.problems.hugging_face.agreement import differs, disagreements, loaded, single
from tests.problems.support import case


def llama_mlp(gate, up, down):
    config = LlamaConfig(hidden_size=len(down), intermediate_size=len(gate))
    return loaded(LlamaMLP(config), gate_proj__weight=gate, up_proj__weight=up, down_proj__weight=down)


def in_merge_order(patches, grids):
    """Patches in raster order, in the order of Qwen's processors: neighbourhood by neighbourhood."""
    order, start = [], 0
    for frames, rows, columns in grids.tolist():
        for frame in range(frames):
            for row in range(0, rows, 2):
                for column in range(0, columns, 2):
                    for y, x in ((row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1)):
                        order.append(start + (frame * rows + y) * columns + x)
        start += frames * rows * columns
    return patches[order]


def test_p27_is_qwen3_omnis_patch_merger_once_patches_are_in_merge_order():
    def theirs(hidden, grids, ln_weight, ln_bias, fc1, fc1_bias, fc2, fc2_bias, eps):
        config = Qwen3OmniMoeVisionEncoderConfig(
            hidden_size=hidden.shape[1], spatial_merge_size=2, out_hidden_size=len(fc2)
        )
        merger = loaded(
            Qwen3OmniMoeVisionPatchMerger(config),
            ln_q__weight=ln_weight,
            ln_q__bias=ln_bias,
            mlp__0__weight=fc1,
            mlp__0__bias=fc1_bias,
            mlp__2__weight=fc2,
            mlp__2__bias=fc2_bias,
        )
        assert merger.ln_q.eps == eps
        return merger(in_merge_order(hidden, grids))

    draw = case("p27")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p28_is_llamas_norm_of_the_sum():
    def theirs(hidden, residual, weight):
        return loaded(LlamaRMSNorm(len(weight), p28_fused_add_rmsnorm.EPS), weight=weight)(hidden + residual)

    draw = case("p28")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p29_is_the_feed_forward_of_a_diffusion_transformer():
    def theirs(hidden, fc1, fc1_bias, fc2, fc2_bias):
        mlp = DiTMLP(len(fc2), mult=len(fc1) / len(fc2))
        weights = {"ff__0__weight": fc1, "ff__0__bias": fc1_bias, "ff__3__weight": fc2, "ff__3__bias": fc2_bias}
        return loaded(mlp, **weights)(hidden)

    assert case("p29").accepts(theirs)


def test_p30_is_convnext_v2s_layer_without_its_depthwise_convolution_and_norm():
    def theirs(x, fc1, fc1_bias, grn, grn_bias, fc2, fc2_bias, eps):
        assert eps == 1e-6  # theirs is fixed
        layer = ConvNextV2Layer(ConvNextV2Config(), x.shape[-1])
        layer.dwconv, layer.layernorm = torch.nn.Identity(), torch.nn.Identity()
        loaded(
            layer,
            pwconv1__weight=fc1,
            pwconv1__bias=fc1_bias,
            grn__weight=grn,
            grn__bias=grn_bias,
            pwconv2__weight=fc2,
            pwconv2__bias=fc2_bias,
        )
        return layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) - x  # the layer adds its input

    draw = case("p30")
    assert not disagreements(draw.anchor, theirs(*promote(draw.inputs)), draw.problem.outputs, 1e-13)


def test_p32_is_phi3s_mlp_whose_gate_comes_first_in_the_stacked_matrix():
    def theirs(hidden, gate_up, down):
        config = Phi3Config(hidden_size=len(down), intermediate_size=down.shape[1], pad_token_id=0)
        return loaded(Phi3MLP(config), gate_up_proj__weight=gate_up, down_proj__weight=down)(hidden)

    assert case("p32").accepts(theirs)


def test_p33_is_llamas_norm_and_mlp_on_the_rounded_sum():
    def theirs(hidden, residual, norm, gate, up, down, eps):
        return llama_mlp(gate, up, down)(loaded(LlamaRMSNorm(len(norm), eps), weight=norm)(hidden + residual))

    draw = case("p33")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


@torch.enable_grad()
def test_p34_gradients_are_those_of_llamas_mlp():
    draw = case("p34")
    grad_output, hidden, _, _, _, gate, up, down = promote(draw.inputs)
    mlp = llama_mlp(gate, up, down)
    hidden.requires_grad_()
    parameters = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
    theirs = torch.autograd.grad(mlp(hidden), [hidden, *parameters], grad_output)
    with torch.no_grad():
        a = linear(hidden, gate)
        saved = a, torch.nn.functional.silu(a), linear(hidden, up)
        ours = p34_swiglu_mlp_backward.reference(grad_output, hidden, *saved, gate, up, down)
    assert not disagreements(ours, theirs, draw.problem.outputs, 1e-12)


@torch.enable_grad()
def test_p35_gradients_are_those_of_alberts_feed_forward_and_norm():
    draw = case("p35")
    grad_output, hidden, fc1, _, _, fc2, _, _, ln_weight, eps = promote(draw.inputs)
    config = AlbertConfig(hidden_size=len(fc2), intermediate_size=len(fc1), num_attention_heads=1, layer_norm_eps=eps)
    layer = AlbertLayer(config).double().eval()
    parameters = [layer.ffn.weight, layer.ffn.bias, layer.ffn_output.weight, layer.ffn_output.bias]
    parameters += [layer.full_layer_layer_norm.weight, layer.full_layer_layer_norm.bias]
    with torch.no_grad():
        for parameter, value in zip(parameters, (fc1, None, fc2, None, ln_weight, None), strict=True):
            parameter.zero_() if value is None else parameter.copy_(value)
    hidden.requires_grad_()
    output = layer.full_layer_layer_norm(layer.ff_chunk(hidden) + hidden)
    theirs = torch.autograd.grad(output, [hidden, *parameters], grad_output)
    assert not disagreements(draw.anchor, theirs, draw.problem.outputs, 1e-6)  # saved tensors are float32


def test_p36_is_qwen3_moes_norm():
    def theirs(hidden, weight):
        return loaded(Qwen3MoeRMSNorm(len(weight), p36_rmsnorm_h128.EPS), weight=weight)(hidden)

    draw = case("p36")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


@torch.enable_grad()
def test_p37_gradients_are_those_of_a_diffusion_transformers_feed_forward():
    draw = case("p37")
    grad_output, x, fc1, fc2, _, _ = promote(draw.inputs)
    mlp = DiTMLP(len(fc2), mult=len(fc1) / len(fc2)).double().eval()
    first, activation, _, second = mlp.ff
    with torch.no_grad():
        first.weight.copy_(fc1)
        second.weight.copy_(fc2)
        saved = first(x), activation(first(x))
        ours = p37_gelu_mlp_backward.reference(grad_output, x, fc1, fc2, *saved)
    x.requires_grad_()
    theirs = torch.autograd.grad(mlp(x), [x, *mlp.parameters()], grad_output)
    assert not disagreements(ours, theirs, draw.problem.outputs, 1e-12)


@torch.enable_grad()
def test_p38_gradients_are_those_of_qwen3s_norm_of_the_sum():
    draw = case("p38")
    grad_output, normalized, rstd, weight = single(draw.inputs)
    total = normalized / rstd  # the problem does not pass it
    hidden, residual = (0.3 * total).requires_grad_(), (0.7 * total).requires_grad_()
    norm = loaded(Qwen3RMSNorm(len(weight), 1e-6), weight=weight)
    theirs = torch.autograd.grad(norm(hidden + residual), [hidden, residual, norm.weight], grad_output)
    assert not disagreements(draw.anchor, theirs, draw.problem.outputs)


def test_p39_is_an_adaptive_norm_whose_scale_comes_before_its_shift():
    def theirs(hidden, conditioning, mod, mod_bias, proj, proj_bias, eps):
        norm = Qwen2_5_OmniAdaLayerNormZero_Final(hidden.shape[-1])
        assert norm.norm.eps == eps
        return linear(loaded(norm, linear__weight=mod, linear__bias=mod_bias)(hidden, conditioning), proj, proj_bias)

    assert case("p39").accepts(theirs)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # the model has no layers
def test_p40_is_the_end_of_gemma3ns_text_model():
    draw = case("p40")
    hidden, first_weight, second_weight, epsilon = single(draw.inputs)
    config = Gemma3nTextConfig(
        hidden_size=hidden.shape[-1],
        num_hidden_layers=0,
        num_kv_shared_layers=0,
        altup_num_inputs=len(hidden),
        vocab_size=8,
        vocab_size_per_layer_input=8,
        hidden_size_per_layer_input=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=[],
        layer_types=[],
        activation_sparsity_pattern=[],
    )
    model = Gemma3nTextModel(config).eval()
    model.norm = torch.nn.Identity()  # the problem ends before it
    streams = [hidden[0]]
    for unembed, weight in zip(model.altup_unembed_projections, (first_weight, second_weight), strict=True):
        unembed.weight.copy_(weight)
        unembed.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0]))
    theirs = model(
        inputs_embeds=hidden[0], per_layer_inputs=hidden.new_zeros(*hidden.shape[1:3], 0, 4)
    ).last_hidden_state
    ours = p40_altup_magnitude_collapse.reference(torch.stack(streams), first_weight, second_weight, epsilon)
    assert not disagreements([ours], theirs, draw.problem.outputs)


def test_p41_normalises_queries_and_keys_as_gemma3n_does():
    def theirs(hidden, q, k, v, q_norm, k_norm, eps):
        size = len(q_norm)
        query, key, value = (linear(hidden, w).unflatten(-1, (-1, size)) for w in (q, k, v))
        query = loaded(Gemma3nRMSNorm(size, eps), weight=q_norm)(query)
        key = loaded(Gemma3nRMSNorm(size, eps), weight=k_norm)(key)
        return query, key, value

    draw = case("p41")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p42_normalises_embedding_and_hidden_state_as_bailing_does():
    def theirs(ids, hidden, table, e_weight, h_weight, projection, eps):
        shifted = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
        embedded = loaded(BailingHybridRMSNorm(len(e_weight), eps), weight=e_weight)(table[shifted])
        normed = loaded(BailingHybridRMSNorm(len(h_weight), eps), weight=h_weight)(hidden)
        return linear(torch.cat([embedded, normed], dim=-1), projection)

    draw = case("p42")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


@torch.enable_grad()
def test_p43_gradients_are_those_of_jambas_norm_of_an_embedding():
    draw = case("p43")
    grad_output, ids, _, _, weight = single(draw.inputs)
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(p43_embedding_rmsnorm_backward.VOCABULARY, grad_output.shape[-1])
    norm = loaded(JambaRMSNorm(len(weight), 1e-6), weight=weight)
    rows = embedding(ids)
    theirs = torch.autograd.grad(norm(rows), [embedding.weight, norm.weight], grad_output)
    with torch.no_grad():
        rstd = torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 1e-6)
        ours = p43_embedding_rmsnorm_backward.reference(grad_output, ids, rows, rstd, weight)
    assert not disagreements(ours, theirs, draw.problem.outputs)


@pytest.mark.parametrize(("problem", "wrong"), [("p28", 1e-3), ("p36", 1e-3)])
def test_a_norm_with_another_eps_does_not_agree(problem, wrong):
    """That these comparisons can fail at all."""

    def theirs(hidden, *rest):
        *residual, weight = rest
        return loaded(LlamaRMSNorm(len(weight), wrong), weight=weight)(sum(residual, hidden))

    assert differs(case(problem), theirs) == {"normalised": pytest.approx(5e-4, rel=0.5)}
