"""Linear attention problems against transformers' functions and layers of the models that they come from."""

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from metakernelbench.problems.linear_attention import p63_mamba2_layer as p63
from metakernelbench.problems.linear_attention import p64_mamba_chunk_scan as p64
from tests.problems.hugging_face.agreement import differs, loaded
from tests.problems.support import case


def with_time_second(*tensors):
    """Heads before time, as some problems have it, to time before heads, as transformers has it, or back."""
    return tuple(x.transpose(1, 2) for x in tensors)


@pytest.mark.parametrize(
    "rule", [qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule], ids=["chunked", "recurrent"]
)
def test_p62_is_qwen3_nexts_gated_delta_rule(rule):
    def theirs(query, key, value, g, beta, scale):
        assert scale == key.shape[-1] ** -0.5  # theirs is fixed
        return rule(*with_time_second(query, key, value, g, beta), use_qk_l2norm_in_kernel=True)[0]

    draw = case("p62")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p63_is_nemotron_hs_mamba2_layer():
    def theirs(hidden, in_proj, conv, conv_bias, dt_bias, a_log, d, norm, out_proj, shortest, longest, eps):
        heads, inner = len(a_log), len(norm)
        config = NemotronHConfig(
            hidden_size=hidden.shape[-1],
            mamba_num_heads=heads,
            mamba_head_dim=inner // heads,
            ssm_state_size=(len(conv) - inner) // (2 * p63.GROUPS),
            n_groups=p63.GROUPS,
            conv_kernel=conv.shape[-1],
            chunk_size=p63.CHUNK,
            time_step_min=shortest,
            layer_norm_epsilon=eps,
            layers_block_type=["mamba"],
        )
        layer = loaded(
            nemotron.NemotronHMamba2Mixer(config, 0),
            in_proj__weight=in_proj,
            conv1d__weight=conv,
            conv1d__bias=conv_bias,
            dt_bias=dt_bias,
            A_log=a_log,
            D=d,
            norm__weight=norm,
            out_proj__weight=out_proj,
        )
        assert longest == 1e6  # theirs has no upper limit, and this one never acts
        return layer(hidden)

    draw = case("p63")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def test_p64_is_granites_chunked_scan():
    def theirs(x, a, b, c, d, state):
        step = -a.transpose(1, 2)  # A is -1 for every head; theirs multiplies inputs by the step, ours are given so
        y, final = granite.mamba2_chunk_scan(
            x / step[..., None],
            step,
            -torch.ones(a.shape[1]),
            b,
            c,
            p64.CHUNK,
            initial_states=state,
            return_final_states=True,
        )
        return (y + d[:, None] * x).flatten(2), final

    assert not differs(case("p64"), theirs)


def test_p65_is_the_scan_of_nemotron_h_within_one_chunk():
    def theirs(x, a, b, c):
        step = -a.permute(0, 2, 3, 1)  # batch, chunk, time, head
        # Each chunk is a sequence of its own here: it starts from a state of zeros.
        inputs, step, b, c = (tensor.flatten(0, 1) for tensor in (x / step[..., None], step, b, c))
        return nemotron.mamba2_chunk_scan(inputs, step, -torch.ones(x.shape[-2]), b, c, x.shape[2]).view_as(x)

    assert not differs(case("p65"), theirs)


def test_p66_is_rwkvs_linear_attention():
    def theirs(decay, key, first, value, numerator, largest, denominator):
        output, states = rwkv_linear_attention_cpu(decay, first, key, value, [numerator, denominator, largest], True)
        return output, *states

    draw = case("p66")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


@pytest.mark.parametrize(
    "rule", [kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention], ids=["chunked", "recurrent"]
)
def test_p68_is_kimi_delta_attention(rule):
    def theirs(q, k, v, g, beta):
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        return rule(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)[0]

    draw = case("p68")
    assert not differs(draw, theirs)
    assert draw.accepts(theirs)


def decay_of(a_log, a, dt_bias):
    """As Qwen3-Next's layer forms its log-decay."""
    return -a_log.float().exp() * softplus(a.float() + dt_bias)


def test_p71_is_qwen3_nexts_rule_on_each_sequence_from_its_state():
    def theirs(q, k, v, state, a_log, a, dt_bias, b, boundaries, scale):
        assert scale == k.shape[-1] ** -0.5
        inputs = (q, k, v, decay_of(a_log, a, dt_bias), b.sigmoid())
        outputs, states = [], []
        for sequence, (begin, end) in enumerate(boundaries.unfold(0, 2, 1).tolist()):
            tokens = (x[None, begin:end] for x in inputs)
            start = state[sequence, None].mT  # theirs has the key channel first
            output, last = qwen.torch_chunk_gated_delta_rule(*tokens, initial_state=start, output_final_state=True)
            outputs.append(output[0])
            states.append(last[0].mT)
        return torch.cat(outputs), torch.stack(states)

    assert not differs(case("p71"), theirs)


def test_p72_is_one_step_of_qwen3_nexts_rule():
    def theirs(q, k, v, state, a_log, a, dt_bias, b, scale):
        assert scale == k.shape[-1] ** -0.5
        inputs = (q, k, v, decay_of(a_log, a, dt_bias), b.sigmoid())
        output, last = qwen.torch_recurrent_gated_delta_rule(*inputs, initial_state=state.mT, output_final_state=True)
        return output, last.mT

    assert not differs(case("p72"), theirs)


def test_p73_is_qwen3_nexts_rule_from_states_in_a_pool():
    def theirs(q, k, v, pool, rows, a_log, a, dt_bias, b, scale):
        assert scale == k.shape[-1] ** -0.5
        inputs = (q, k, v, decay_of(a_log, a, dt_bias), b.sigmoid())
        return qwen.torch_recurrent_gated_delta_rule(*inputs, initial_state=pool[rows].mT)[0], pool

    assert not differs(case("p73"), theirs)


def test_p74_is_qwen3_nexts_rule_without_decay():
    def theirs(q, k, v, beta, state):
        inputs = with_time_second(q, k, v, torch.zeros_like(beta), beta)
        output, last = qwen.torch_chunk_gated_delta_rule(
            *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return output.transpose(1, 2), last

    assert not differs(case("p74"), theirs)
