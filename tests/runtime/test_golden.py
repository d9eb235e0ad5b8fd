"""Real files against float32 results of `transformers` on their dequantized weights (tests/data/golden).

A file MODEL.PROMPT.npz holds: text; ids (n,); nll (n - 1,), -log p(ids[i + 1] given ids[..i]); top_ids and top_logits
(n, 2), the two highest logits at each position; last_logits, every 16th logit at the last position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import edgeinfer

pytestmark = [pytest.mark.model, pytest.mark.slow]

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
MODELS = {
    "smollm2-135m-q4_1": "smollm2-135m",
    "gemma3-270m-q4_k_m": "gemma-3-270m",
    "qwen2.5-coder-0.5b-q4_k_m": "qwen2.5-coder-0.5b",
}


Golden = tuple[edgeinfer.Model, list[dict[str, np.ndarray]]]


@pytest.fixture(scope="module", params=MODELS)
def golden(request: pytest.FixtureRequest, real_model: Callable[[str], Path]) -> Iterator[Golden]:
    """A model, and what is known of it."""
    files = sorted(GOLDEN.glob(f"{request.param}.*.npz"))
    assert files
    with edgeinfer.load(real_model(MODELS[request.param])) as model:
        yield model, [dict(np.load(file)) for file in files]


def log_likelihoods(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    logits = logits[:-1].astype(np.float64)
    top = logits.max(-1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return total - logits[np.arange(len(logits)), ids[1:]]


def test_real_files_give_what_transformers_gives(golden: Golden) -> None:
    model, cases = golden
    ours, theirs = 0.0, 0.0
    misses, clear = 0, 0
    for case in cases:
        ids = model.tokenizer.encode(str(case["text"]), special=True)
        assert ids == case["ids"].tolist()
        logits = model.logits(ids)
        nll = log_likelihoods(logits, case["ids"])
        assert np.sqrt(np.mean((nll - case["nll"]) ** 2)) <= 0.2
        ours, theirs = ours + nll.sum(), theirs + case["nll"].sum()
        decided = case["top_logits"][:, 0] - case["top_logits"][:, 1] > 0.2
        wrong = (logits.argmax(-1) != case["top_ids"][:, 0])[decided].sum()
        assert wrong <= max(1, 0.02 * decided.sum())
        misses, clear = misses + wrong, clear + decided.sum()
    assert abs(ours / theirs - 1) <= 0.01
    assert misses <= max(1, 0.02 * clear)
