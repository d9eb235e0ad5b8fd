"""Makes transformers_golden.npz: logits of tiny random models by transformers, which shares no code with this package.

Run by hand, with torch and transformers 5 installed: python tests/data/make_transformers_golden.py
The models are tests/runtime/tiny.py's, whose weights are the same everywhere, so the test needs neither.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("tiny", HERE.parent / "runtime" / "tiny.py")
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)

IDS = [(37 * i + 11) % 288 for i in range(100)]
POSITIONS = [0, 1, 7, 31, 63, 64, 99]  # of the logits that are kept
SCALED = {"factor": 4.0, "original_max_position_embeddings": 32}
CASES = {  # name -> architecture, options of tiny_gguf, its scaling as transformers spells it
    "llama": ("llama", {}, {}),
    "llama-llama3": ("llama", {"tied": False, "metadata": {
        "llama.rope.scaling.type": "llama3", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32}},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2-yarn": ("qwen2", {"metadata": {
        "qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32}}, {"rope_type": "yarn", **SCALED}),
    "qwen3": ("qwen3", {}, {}),
    "gemma3": ("gemma3", {"layers": 7, "window": 16}, {}),
    "gemma3-linear": ("gemma3", {"layers": 7, "window": 16, "metadata": {
        "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}}, {"rope_type": "linear", "factor": 8.0}),
}  # fmt: skip
ROLES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def config(arch: str, options: dict, scaling: dict):
    rope = {"rope_type": "default", "rope_theta": tiny.ROPE_BASE[arch], **scaling}
    more: dict = {"rope_parameters": rope}
    if arch == "gemma3":
        layers, local = options["layers"], {"rope_type": "default", "rope_theta": 10000.0}
        more = {
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
            "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
            "sliding_window": options["window"], "query_pre_attn_scalar": 16, "num_hidden_layers": layers,
        }  # fmt: skip
    sizes = {
        "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "tie_word_embeddings": options.get("tied", True), "attn_implementation": "eager",
    }  # fmt: skip
    return CLASSES[arch][0](**{**sizes, **more})


def state(arch: str, path: Path) -> dict[str, torch.Tensor]:
    tensors = {t.name: t.data.reshape(tuple(int(n) for n in reversed(t.shape))) for t in gguf.GGUFReader(path).tensors}
    roles, out = {**ROLES, **(GEMMA if arch == "gemma3" else {})}, {}
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for name, array in tensors.items():
        *block, role, kind = name.split(".")
        if arch == "llama" and role in ("attn_q", "attn_k"):  # undo what converters do for the other layout of pairs
            array = array.reshape(-1, 8, 2, 64).swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma3" and role.endswith("norm"):
            array = array.astype(np.float64) - 1.0  # files hold 1 + w
        full = f"model.layers.{block[1]}.{roles[role]}" if block else top[role]
        out[f"{full}.{kind}"] = torch.tensor(np.array(array, np.float64))
    out.setdefault("lm_head.weight", out["model.embed_tokens.weight"])
    return out


def main() -> None:
    results = {}
    for name, (arch, options, scaling) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = tiny.tiny_gguf(Path(folder) / "model.gguf", arch, "F32", **options)
            model = CLASSES[arch][1](config(arch, options, scaling)).double().eval()
            model.load_state_dict(state(arch, path))
        with torch.no_grad():
            logits = model(torch.tensor([IDS])).logits[0, POSITIONS]
        results[name] = logits.numpy().astype(np.float32)
        print(name, results[name].std())
    cases = json.dumps({name: case[:2] for name, case in CASES.items()})
    np.savez_compressed(HERE / "transformers_golden.npz", ids=IDS, positions=POSITIONS, cases=cases, **results)


if __name__ == "__main__":
    main()
