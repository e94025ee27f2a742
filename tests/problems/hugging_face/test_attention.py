"""Attention and KV cache problems against transformers' attention of the models that they come from."""

import math
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gemma3n import Gemma3nAudioConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioAttention
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention

from metakernelbench.grading.compare import promote
from metakernelbench.problems.attention import p18_dsa_topk_indexer_fp8 as p18
from metakernelbench.problems.kv_cache import p20_mla_rope_cache_update as p20
from metakernelbench.problems.kv_cache import p22_main_index_cache_insert_minimax_m3 as p22
from tests.problems.hugging_face.agreement import differs, disagreements, loaded, single
from tests.problems.support import case


class Heads(torch.nn.Module):
    """What transformers' eager attention asks of the layer that calls it."""

    def __init__(self, group):
        super().__init__()
        self.num_key_value_groups = group
        self.eval()


def attend(family, q, k, v, scale, visible=None):
    """The eager attention of a model family for one sequence, [tokens, heads, d], and the log-sum-exp of its logits,
    which it does not return: a logit less the logarithm of its probability."""
    eager = import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    group = q.shape[1] // k.shape[1]
    mask = None if visible is None else torch.zeros(visible.shape).masked_fill(~visible, -math.inf)[None, None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    output, probabilities = eager(Heads(group), q, k, v, mask, scaling=scale)
    likeliest = probabilities.argmax(dim=-1, keepdim=True)
    logits = q @ k.repeat_interleave(group, dim=1).mT * scale
    lse = (logits.gather(-1, likeliest) - probabilities.gather(-1, likeliest).log()) / math.log(2)
    return output[0], lse[0, :, :, 0].T


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def rows_of(sequences):
    return tuple(torch.cat(parts) for parts in zip(*sequences, strict=True))


def paged(family, *, causally):
    """Paged attention as a loop over sequences and their pages, around a family's eager attention."""

    def implementation(q, k_cache, v_cache, *rest):
        *indptrs, indices, last, scale = rest if k_cache.shape[1] > 1 else (*rest[:-1], None, rest[-1])
        query_offsets = indptrs[0].tolist() if causally else range(len(q) + 1)
        sequences = []
        for b, ((first, stop), (start, end)) in enumerate(
            zip(pairwise(query_offsets), pairwise(indptrs[-1].tolist()), strict=True)
        ):
            unused = 0 if last is None else k_cache.shape[1] - int(last[b])
            k, v = (
                torch.cat([cache[page] for page in indices[start:end].tolist()])[: -unused or None]
                for cache in (k_cache, v_cache)
            )
            visible = causal(stop - first, len(k)) if causally else None
            sequences.append(attend(family, q[first:stop], k, v, scale, visible))
        return rows_of(sequences)

    return implementation


def ragged(family):
    def implementation(q, k, v, query_offsets, key_offsets, scale):
        sequences = []
        for (first, stop), (start, end) in zip(
            pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True
        ):
            visible = causal(stop - first, end - start)
            sequences.append(attend(family, q[first:stop], k[start:end], v[start:end], scale, visible))
        return rows_of(sequences)

    return implementation


@pytest.mark.parametrize(
    ("problem", "theirs"),
    [
        ("p01", paged("llama", causally=False)),
        ("p02", paged("llama4", causally=False)),
        ("p03", paged("llama", causally=False)),
        ("p04", paged("llama", causally=True)),
        ("p05", paged("llama4", causally=True)),
        ("p06", paged("llama", causally=True)),
        ("p07", paged("qwen3_moe", causally=True)),
        ("p08", ragged("qwen3")),
        ("p09", ragged("qwen3_next")),
        ("p16", ragged("deepseek_v3")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_is_that_of_the_source_model(problem, theirs):
    assert not differs(case(problem), theirs)


@torch.enable_grad()
def test_p10_gradients_are_those_of_gemma3s_attention():
    draw = case("p10")
    grad_output, hidden, cos, sin, q, k, v, o, q_norm, k_norm, scale, cap, eps = draw.inputs
    head_size = len(q_norm)
    config = Gemma3TextConfig(
        hidden_size=hidden.shape[-1],
        num_attention_heads=len(q) // head_size,
        num_key_value_heads=len(k) // head_size,
        head_dim=head_size,
        query_pre_attn_scalar=head_size,
        rms_norm_eps=eps,
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    weights = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o, "q_norm": q_norm, "k_norm": k_norm}
    layer = loaded(Gemma3Attention(config, 0), **{f"{name}__weight": weight for name, weight in weights.items()})
    assert layer.scaling == scale
    hidden = hidden.clone().requires_grad_()
    mask = torch.full((hidden.shape[1],) * 2, -math.inf).triu(1)
    output, _ = layer(hidden, (cos, sin), mask, softcap=cap)
    parameters = [layer.get_submodule(name).weight for name in weights]
    gradients = torch.autograd.grad(output, [hidden, *parameters], grad_output)
    assert not disagreements(draw.anchor, gradients, draw.problem.outputs)


def test_p11_is_qwen2_5_vls_vision_attention():
    def theirs(hidden, ends, cos, sin, qkv, qkv_bias, proj, proj_bias):
        config = Qwen2_5_VLVisionConfig(
            hidden_size=hidden.shape[1], num_heads=cos.shape[1], attn_implementation="eager"
        )
        layer = loaded(
            Qwen2_5_VLVisionAttention(config),
            qkv__weight=qkv,
            qkv__bias=qkv_bias,
            proj__weight=proj,
            proj__bias=proj_bias,
        )
        offsets = torch.cat([ends.new_zeros(1), ends])
        return layer(hidden, offsets, position_embeddings=(cos[:, 0], sin[:, 0]))

    draw = case("p11")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p12_is_gemma3ns_audio_attention():
    def theirs(hidden, mask, q, k, v, pos, per_dim_scale, inv_timescales, cap):
        config = Gemma3nAudioConfig(hidden_size=hidden.shape[-1], conf_attention_logit_cap=cap)
        layer = loaded(
            Gemma3nAudioAttention(config),
            per_dim_scale=per_dim_scale,
            q_proj__weight=q,
            k_proj__weight=k,
            v_proj__weight=v,
            relative_position_embedding__pos_proj__weight=pos,
        )
        torch.testing.assert_close(layer.relative_position_embedding.inv_timescales[0, 0], inv_timescales)
        return layer(hidden, mask)

    draw = case("p12")
    assert not differs(draw, theirs)


@pytest.mark.parametrize("problem", ["p14", "p15"])
def test_absorbed_latent_attention_is_deepseek_v3s_attention_with_its_up_projection_folded_in(problem):
    draw = case(problem)
    _, q_pe, latents, k_pe, *offsets, indices, scale = single(draw.inputs)
    heads, latent, rotary, plain, value = q_pe.shape[1], latents.shape[-1], q_pe.shape[2], 24, 20
    config = deepseek.DeepseekV3Config(
        hidden_size=16,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=latent,
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=plain,
        v_head_dim=value,
        attn_implementation="eager",
    )
    layer = deepseek.DeepseekV3Attention(config, 0).eval()
    up = layer.kv_b_proj.weight.normal_(std=latent**-0.5).view(heads, plain + value, latent)
    q_plain = torch.randn(len(q_pe), heads, plain)
    q_absorbed = torch.einsum("thp,hpl->thl", q_plain, up[:, :plain])

    inputs = (q_absorbed, q_pe, latents, k_pe, *offsets, indices, scale)
    ours, our_lse = draw.problem.reference(*promote(inputs))
    ours = torch.einsum("thl,hvl->thv", ours, up[:, plain:].double())

    query_offsets = offsets[0].tolist() if problem == "p15" else range(len(q_pe) + 1)
    sequences = []
    for (first, stop), (start, end) in zip(pairwise(query_offsets), pairwise(offsets[-1].tolist()), strict=True):
        tokens = indices[start:end]
        k, v = layer.expand_kv(latents[tokens].transpose(0, 1)[None], k_pe[tokens].transpose(0, 1)[None])
        q = torch.cat([q_plain, q_pe], dim=-1)[first:stop]
        visible = causal(stop - first, end - start)
        sequences.append(attend("deepseek_v3", q, k[0].transpose(0, 1), v[0].transpose(0, 1), scale, visible))
    assert not disagreements((ours, our_lse), rows_of(sequences), draw.problem.outputs)


def test_p17_is_latent_attention_under_the_mask_of_the_selected_tokens():
    def theirs(q_nope, q_pe, latents, k_pe, selected, scale):
        """As deepseek_v32 does without its own kernel: attention over the whole pool, masked to the selection."""
        latents, k_pe = latents.flatten(0, 1), k_pe.flatten(0, 1)
        visible = torch.zeros(len(q_nope), len(latents), dtype=torch.bool)
        for row, tokens in enumerate(selected.tolist()):
            visible[row, [token for token in tokens if token >= 0]] = True
        keys = torch.cat([latents, k_pe], dim=-1)[:, None]
        return attend("deepseek_v32", torch.cat([q_nope, q_pe], dim=-1), keys, latents[:, None], scale, visible)

    assert not differs(case("p17"), theirs)


class Keys:
    """An index cache that already holds a sequence."""

    def __init__(self, keys):
        self.keys = keys

    def update_indexer(self, new, layer):
        return self.keys


def test_p18_selects_what_deepseek_v32s_indexer_selects():
    draw = case("p18")
    q, cache, weights, lengths, table = draw.inputs
    heads, size, page_size = q.shape[1], q.shape[2], cache.shape[1]
    config = DeepseekV32Config(
        hidden_size=heads, q_lora_rank=heads * size, index_n_heads=heads, index_head_dim=size, qk_rope_head_dim=4
    )
    assert config.index_topk == p18.TOP_K
    indexer = DeepseekV32Indexer(config, 0).eval()
    indexer.wq_b.weight.copy_(torch.eye(heads * size))
    indexer.weights_proj.weight.copy_(torch.eye(heads))
    unrotated = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    keys = p18.dequantised(cache, torch.float32)
    for b, length in enumerate(lengths.tolist()):
        pages = table[b, : -(-length // page_size)]
        cached = Keys(keys[pages].flatten(0, 1)[None, :length])
        no_mask = torch.zeros(1, 1, length)
        chosen = indexer(weights[b][None, None], q[b].float().view(1, 1, -1), unrotated, no_mask, None, cache=cached)
        slots = [int(pages[t // page_size]) * page_size + t % page_size for t in sorted(chosen.flatten().tolist())]
        ours = draw.expected[0][b].tolist()
        assert ours == slots + [-1] * (p18.TOP_K - len(slots))


def factors(table, positions):
    """cos and sin of the tokens, repeated for both halves of a head, as transformers' rotations take them."""
    return (torch.cat([half, half], dim=-1) for half in table[positions].chunk(2, dim=-1))


def test_p19_is_glm4_moes_norm_and_rotation_bit_for_bit():
    def theirs(qkv, positions, q_weight, k_weight, table, slots, kv_cache, eps):
        page_size, kv_heads, size = kv_cache.shape[2:]
        heads = qkv.view(len(qkv), -1, size)
        q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        q = loaded(glm.Glm4MoeRMSNorm(size, eps), weight=q_weight)(q)
        k = loaded(glm.Glm4MoeRMSNorm(size, eps), weight=k_weight)(k)
        cos, sin = factors(table, positions)
        q, k = glm.apply_rotary_pos_emb(q, k, cos, sin)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                kv_cache[0, slot // page_size, slot % page_size] = k[token]
                kv_cache[1, slot // page_size, slot % page_size] = v[token]
        return q, kv_cache

    draw = case("p19")
    assert not differs(draw, theirs)
    for ours, their in zip(draw.expected, theirs(*draw.inputs), strict=True):
        assert torch.equal(ours, their)


def test_p20_is_deepseek_v3s_query_projection_and_rotation_on_halves():
    def theirs(qkv, q_b, positions, table, slots, kv_cache):
        rank, rotary, page_size = q_b.shape[1], table.shape[1], kv_cache.shape[1]
        q = torch.nn.functional.linear(qkv[:, :rank], q_b).view(len(qkv), p20.HEADS, -1)
        compressed, k_pe = qkv[:, rank:-rotary], qkv[:, -rotary:]
        cos, sin = factors(table, positions)
        q_pe, k_pe = deepseek.apply_rotary_pos_emb(q[..., -rotary:], k_pe[:, None], cos, sin)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                kv_cache[slot // page_size, slot % page_size, 0] = torch.cat([compressed[token], k_pe[token, 0]])
        return torch.cat([q[..., :-rotary], q_pe], dim=-1), kv_cache

    draw = case("p20")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p22_is_minimax_m3s_norm_and_rotation_of_main_and_index_heads():
    def theirs(qkv, q_w, k_w, iq_w, ik_w, positions, table, slots, index_slots, kv_cache, index_cache):
        kv_heads, page_size, size = kv_cache.shape[1], kv_cache.shape[2], len(q_w)
        heads = qkv.view(len(qkv), -1, size)
        query_heads = heads.shape[1] - 2 * kv_heads - p22.INDEX_HEADS - 1
        q, k, v, iq, ik = heads.split([query_heads, kv_heads, kv_heads, p22.INDEX_HEADS, 1], dim=1)
        cos, sin = factors(table, positions)

        def norm(x, weight):
            return loaded(minimax.MiniMaxM3VLRMSNorm(size, p22.EPS), weight=weight)(x)

        q, k = minimax.apply_rotary_pos_emb(norm(q, q_w), norm(k, k_w), cos, sin)
        iq, ik = minimax.apply_rotary_pos_emb(norm(iq, iq_w), norm(ik, ik_w), cos, sin)
        for token, (slot, index_slot) in enumerate(zip(slots.tolist(), index_slots.tolist(), strict=True)):
            kv_cache[slot // page_size, :, slot % page_size] = torch.cat([k[token], v[token]], dim=-1)
            index_cache[index_slot // page_size, index_slot % page_size] = ik[token, 0]
        return q, iq, kv_cache, index_cache

    draw = case("p22")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)
