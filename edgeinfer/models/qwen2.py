"""qwen2: Qwen 2 and 2.5, and models distilled into them: llama with biases on q, k, v and NEOX rotation."""

from __future__ import annotations

from edgeinfer.models._transformer import Network


def describe(n: Network) -> None:
    x = n.embed()
    for layer in range(n.config.layers):
        p = f"blk.{layer}."
        h = n.norm(x, p + "attn_norm")
        q, k, v = n.linear(h, p + "attn_q", p + "attn_k", p + "attn_v")
        n.rope(layer, q, k, v, neox=True)
        (x,) = n.linear(n.attention(layer, q), p + "attn_output", add=x)
        h = n.norm(x, p + "ffn_norm")
        gate, up = n.linear(h, p + "ffn_gate", p + "ffn_up")
        (x,) = n.linear(n.gated(gate, up, "silu"), p + "ffn_down", add=x)
    n.output(n.norm(n.wanted(x), "output_norm"))
