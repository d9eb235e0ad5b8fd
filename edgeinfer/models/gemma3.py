"""gemma3 (text): norms before and after each branch, normed heads, GELU gates, and five layers with a sliding window for
each that sees everything. Gemma Team 2025."""

from __future__ import annotations

from edgeinfer.models._transformer import Network


def describe(n: Network) -> None:
    x = n.embed()
    for layer in range(n.config.layers):
        p = f"blk.{layer}."
        h = n.norm(x, p + "attn_norm")
        q, k, v = n.linear(h, p + "attn_q", p + "attn_k", p + "attn_v")
        n.rope(layer, q, k, v, neox=True, norms=(p + "attn_q_norm", p + "attn_k_norm"))
        (h,) = n.linear(n.attention(layer, q), p + "attn_output")
        x = n.norm(h, p + "post_attention_norm", add=x)
        h = n.norm(x, p + "ffn_norm")
        gate, up = n.linear(h, p + "ffn_gate", p + "ffn_up")
        (h,) = n.linear(n.gated(gate, up, "gelu"), p + "ffn_down")
        x = n.norm(h, p + "post_ffw_norm", add=x)
    n.output(n.norm(n.wanted(x), "output_norm"))
