"""Updates the caches in place and returns them, as the reference does.

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
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    place = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    key_cache[place], k_scale_cache[place] = quantise(key[valid])
    value_cache[place], v_scale_cache[place] = quantise(value[valid])
    return key_cache, value_cache, k_scale_cache, v_scale_cache
