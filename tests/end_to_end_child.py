"""Child process of test_end_to_end.py: a user's script, which imports torch and nothing of ours."""

import json

import torch
from torch import nn


def rotate(x, cos, sin):
    """As diffusers' apply_split_rotary_emb: fp32 inside, rounded once."""
    batch, heads, tokens, half = cos.shape
    y = x.reshape(batch, tokens, heads, -1).swapaxes(1, 2).reshape(batch, heads, tokens, 2, half).float()
    first, second = y[..., :1, :], y[..., 1:, :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    out = y * cos
    out[..., :1, :].addcmul_(-sin, second)
    out[..., 1:, :].addcmul_(sin, first)
    return out.reshape(batch, heads, tokens, -1).swapaxes(1, 2).reshape(batch, tokens, -1).to(x.dtype)


class QueriesAndKeys(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm_q, self.norm_k = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)

    def forward(self, q, k, cos, sin):
        return rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = QueriesAndKeys(256).to(torch.bfloat16)
    q, k = torch.randn(2, 2, 512, 256).to(torch.bfloat16)
    cos, sin = torch.randn(2, 2, 512, 4, 32).transpose(2, 3)
    with torch.no_grad():
        compiled = torch.compile(model, backend="ltx", options={"ltx_inductor.cpu": True})
        pairs = zip(compiled(q, k, cos, sin), model(q, k, cos, sin), strict=True)
        differ = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
    from torch._dynamo.utils import counters

    import ltx_inductor

    report = ltx_inductor.last_report()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print("ANSWER" + json.dumps({"differ": differ, "hits": hits, "report": report.to_dict(), "text": str(report)}))
