"""On-device LLM inference: load a GGUF model, generate, chat.

    import edgeinfer
    with edgeinfer.load("smollm2-135m", download=True) as model:
        for piece in model.session().send("Hello"):
            print(piece, end="")
"""

from edgeinfer.errors import EdgeInferError
from edgeinfer.model import Model, load
from edgeinfer.planning import Plan, plan
from edgeinfer.reply import Reply, Timings
from edgeinfer.sampling import SamplingParams
from edgeinfer.session import Session

__version__ = "0.1.0"
__all__ = ["EdgeInferError", "Model", "Plan", "Reply", "SamplingParams", "Session", "Timings", "load", "plan"]
