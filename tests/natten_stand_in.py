"""The real front end of NATTEN with its compiled library replaced by slow functions that run on the CPU.

`natten_with_ops()` imports natten a second time, beside whatever is imported already, with a `natten.libnatten` that is
made here, and tells it that CPU tensors are on an H100. The torch ops, their schemas, fakes and the code that calls
them are natten's own: so a compiled model has the graph that it has on a machine with the library.
"""

from __future__ import annotations

import functools
import sys
import types

import torch

PLAIN = ([1, 1, 1], [1, 1, 1], [False] * 3)


@functools.cache
def natten_with_ops():
    """The natten module, whose ops (in torch.ops.natten) have CPU kernels from now on."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "natten"}
    library = sys.modules["natten.libnatten"] = types.ModuleType("natten.libnatten")
    library.__getattr__ = _others
    library.token_permute_3d, library.token_unpermute_3d = _permute, _unpermute
    library.hopper_na3d_forward, library.na3d_forward = _hopper, _cutlass
    library.hopper_fmha_forward = _fmha
    try:
        import natten
        from natten._libnatten import torch_wrappers as wrappers

        for op in (
            wrappers.token_permute_3d_torch_op,
            wrappers.token_unpermute_3d_torch_op,
            wrappers.hopper_na3d_forward_torch_op,
            wrappers.na3d_forward_torch_op,
            wrappers.hopper_fmha_forward_torch_op,
        ):
            op.register_kernel("cpu", op._init_fn)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "natten":
                for attribute, value in (("is_cuda", lambda device: True), ("get_device_cc", lambda device=None: 90)):
                    if hasattr(module, attribute):
                        setattr(module, attribute, value)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "natten"]:
            del sys.modules[name]
        sys.modules.update(ours)
    return natten


def window_attention(q, k, v, kernel_size, scale):
    """Attention of every query to its window, all scores of the grid at once, and the logsumexp; in fp32 or better."""
    grid = q.shape[1:4]
    inside = torch.ones((), dtype=torch.bool)
    for axis, (n, w) in enumerate(zip(grid, kernel_size, strict=True)):
        start = (torch.arange(n) - w // 2).clamp(0, n - w)[:, None]
        one = (torch.arange(n) >= start) & (torch.arange(n) < start + w)
        inside = inside & one.view([n if i in (axis, axis + 3) else 1 for i in range(6)])
    inside = inside.flatten(3).flatten(0, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    a, b, c = (t.to(wide).flatten(1, 3).transpose(1, 2) for t in (q, k, v))
    scores = (a @ b.transpose(-1, -2) * scale).masked_fill(~inside, float("-inf"))
    out = (scores.softmax(-1).to(q.dtype).to(wide) @ c).transpose(1, 2).reshape(q.shape)
    return out, scores.logsumexp(-1).transpose(1, 2).reshape(q.shape[:-1])


def _others(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_):
        raise NotImplementedError(f"no stand-in for {name}")

    return missing


def _permute(output, tensor, tile_shape, dilation, flip):
    from_torch = _torch_permutes().token_permute_torch(tensor, tile_shape, dilation, flip)
    output.copy_(from_torch.view(output.shape))


def _unpermute(output, tensor, tile_shape, dilation, flip):
    folded = tensor.view(-1, tensor.shape[1] // _product(dilation), *tensor.shape[2:])
    output.copy_(_torch_permutes().token_unpermute_torch(folded, output.shape[1:4], tile_shape, dilation, flip))


def _torch_permutes():
    return natten_with_ops().token_permute.torch_impl


def _hopper(output, q, k, v, lse, window, stride, dilation, causal, scale, q_shape, kv_shape, grid, q_tile, kv_tile, _):
    torch_impl = _torch_permutes()
    assert list(q_shape) == [-(-n // t) * t for n, t in zip(grid, q_tile, strict=True)] or dilation != [1, 1, 1]
    if (stride, dilation, causal) != PLAIN:  # nobody looks at the values
        output.zero_()
        lse.zero_()
        return
    q, k, v = (
        torch_impl.token_unpermute_torch(t, grid, tile, [1, 1, 1], True)
        for t, tile in ((q, q_tile), (k, kv_tile), (v, kv_tile))
    )
    out, sums = window_attention(q, k, v, window, scale)
    output.copy_(torch_impl.token_permute_torch(out, q_tile, [1, 1, 1], True))
    lse.copy_(torch_impl.token_permute_torch(sums.unsqueeze(-1), q_tile, [1, 1, 1], True).squeeze(-1))


def _cutlass(output, q, k, v, lse, window, stride, dilation, causal, scale, *_):
    out, sums = window_attention(q, k, v, window, scale)
    output.copy_(out)
    lse.copy_(sums)


def _fmha(output, q, k, v, lse, causal, scale, *_):
    a, b, c = (t.float().transpose(1, 2) for t in (q, k, v))
    scores = a @ b.transpose(-1, -2) * scale
    output.copy_((scores.softmax(-1) @ c).transpose(1, 2))
    lse.copy_(scores.logsumexp(-1).transpose(1, 2))


def _product(values):
    return functools.reduce(lambda a, b: a * b, values, 1)
