"""The references beside Hugging Face transformers' own modules, where a model's layer is there.

Modules are built from tiny configurations, get the smoke draw's weights, and download nothing. In float32 on the draw's
values they must give the reference's anchor within 1e-5 of its largest magnitude (gradients through float64 layers
within 1e-12); where the layer also rounds as the problem does, the contract must accept it in the draw's own dtypes.

    problem    what of transformers it is compared with
    p01 p03    Llama's eager attention, one sequence after the other, and its log-sum-exp from the probabilities
    p02 p05    Llama 4's, likewise
    p04 p06    Llama's with a causal mask
    p07        Qwen3 MoE's
    p08        Qwen3's
    p09        Qwen3-Next's
    p10        autograd through Gemma 3's attention layer, soft cap passed in
    p11        Qwen2.5-VL's vision attention layer
    p12        Gemma 3n's audio attention layer
    p14 p15    DeepSeek-V3's attention in expanded form, whose up-projection the problem has folded in
    p16        DeepSeek-V3's eager attention
    p17        DeepSeek-V3.2's eager attention under the mask of the selection
    p18        DeepSeek-V3.2's indexer, on dequantised keys
    p19        GLM-4 MoE's norm and partial rotation; bit for bit
    p20        DeepSeek-V3's rotation on halves; the projection is torch's
    p22        MiniMax-M3's norm and partial rotation, of main and index heads
    p27        Qwen3-Omni's patch merger, with patches brought into merge order
    p28        Llama's norm
    p29 p37    the feed-forward of Qwen2.5-Omni's diffusion transformer: FLUX and Step1X, alike, are not there
    p30        ConvNeXt V2's layer without convolution and norm
    p32        Phi-3's MLP: Parakeet's own feed-forward has no gate
    p33 p34    Llama's norm and MLP, and autograd through the MLP
    p35        autograd through ALBERT's feed-forward and norm
    p36        Qwen3 MoE's norm
    p38        autograd through Qwen3's norm
    p39        the last norm of Qwen2.5-Omni's diffusion transformer: FLUX, alike, is not there
    p40        the whole of Gemma 3n's text model with no layers and no last norm
    p41        Gemma 3n's norm
    p42        Bailing's norm: its multi-token-prediction layer is not there
    p43        autograd through an embedding and Jamba's norm
    p44        DeepSeek-V3's router, and its experts on weights that transformers dequantises
    p45        Qwen3 MoE's experts with dropped pairs weighted zero: no layer there drops by capacity among 8 experts
    p46        autograd through Qwen3 MoE's router; the mask's gradient is the problem's own reading
    p47        ERNIE-4.5's mixture block
    p48        Qwen3-Next's mixture block
    p49        Bailing's router
    p50        autograd through MiMo-V2-Flash's experts
    p51        gpt-oss' experts
    p52        transformers' FP8 quantiser and dequantiser, which take the reciprocal of a scale, around torch's product
    p53        its FP8 dequantiser and Qwen3's MLP
    p54 p56    its FP8 quantiser and dequantiser, with Qwen3's and DeepSeek-V3's norms
    p57 p61    Llama's attention layer and Qwen3's MLP, around our NVFP4 quantiser and its reading of the codes
    p59 p60    its reading of NVFP4 codes
    p62        Qwen3-Next's gated delta rule, chunked and recurrent
    p63        Nemotron-H's Mamba-2 layer
    p64        Granite's chunked scan
    p65        Nemotron-H's scan of one chunk
    p66        RWKV's linear attention
    p68        Kimi Linear's delta attention, chunked and recurrent
    p71 to p74 Qwen3-Next's gated delta rule, recurrent or chunked

    no counterpart
    p13        FIBO is a model of diffusers
    p21        per-token-head FP8 caches, as p23, p24, p25 and p26, are a server's, not a model's
    p31        Stable Diffusion's UNet is in diffusers; its norm is torch's
    p55        the replacement of embeddings is inside Qwen3-VL's whole model, which has no NVFP4 projection
    p58        no attention there quantises its two products
    p67        HyenaDNA's code is not part of transformers
    p69        gated linear attention is flash-linear-attention's
    p70        RetNet is not part of transformers
"""
