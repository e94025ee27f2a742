"""Returns new caches where the reference updates its inputs.

problem: p21
dsl: tirx
devices: cpu
"""

import torch
import tvm
from tvm.script import tirx as T


@T.prim_func
def scales(x: T.handle, s: T.handle):
    vectors, size = T.int32(), T.int32()
    X = T.match_buffer(x, (vectors, size), "float32")
    S = T.match_buffer(s, (vectors,), "float32")
    for i in T.serial(vectors):
        S[i] = T.float32(0)
        for j in T.serial(size):
            S[i] = T.max(S[i], T.abs(X[i, j]))
        S[i] = T.max(S[i] * T.float32(1 / 448), T.float32(1e-6))


compiled = tvm.compile(tvm.IRModule({"main": scales}), target="llvm")


def quantise(x):
    flat = x.float().reshape(-1, x.shape[-1])
    scale = torch.empty(len(flat))
    compiled(flat, scale)
    y = (flat * (1 / scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return y.view(torch.uint8).view(x.shape), scale.view(x.shape[:-1])


def solve(key, value, slot_mapping, key_cache, value_cache, k_scale_cache, v_scale_cache):
    slots = slot_mapping[: int((slot_mapping >= 0).sum())]
    results = []
    for new, cache, scale_cache in ((key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache)):
        codes, scale = quantise(new[slot_mapping >= 0])
        cache, scale_cache = cache.clone(), scale_cache.clone()
        cache.view(-1, *cache.shape[2:])[slots] = codes
        scale_cache.view(-1, scale_cache.shape[2])[slots] = scale
        results.append((cache, scale_cache))
    (keys, key_scales), (values, value_scales) = results
    return keys, values, key_scales, value_scales
