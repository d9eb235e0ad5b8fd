"""On-device LLM inference: load a GGUF model, generate, chat.

    import edgeinfer
    with edgeinfer.load("smollm2-135m", download=True) as model:
        for piece in model.session().send("Hello"):
            print(piece, end="")

Names are imported when first used, so that a program that only may need a model starts as fast without one.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer.diagnostics import doctor_report, warmup
    from edgeinfer.errors import EdgeInferError
    from edgeinfer.model import Model, load
    from edgeinfer.planning import Plan, plan
    from edgeinfer.reply import Reply, Timings
    from edgeinfer.sampling import SamplingParams
    from edgeinfer.session import Session

__version__ = "0.1.0"

if not os.path.isdir(os.path.join(__path__[0], "formats")):
    # Imported from a checkout, where the other rooms stand beside this folder: Python run there finds it first, installed
    # or not
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))

__all__ = [
    "EdgeInferError",
    "Model",
    "Plan",
    "Reply",
    "SamplingParams",
    "Session",
    "Timings",
    "doctor_report",
    "load",
    "plan",
    "warmup",
]

_HOMES = {
    "EdgeInferError": "errors",
    "Model": "model",
    "Plan": "planning",
    "Reply": "reply",
    "SamplingParams": "sampling",
    "Session": "session",
    "Timings": "reply",
    "doctor_report": "diagnostics",
    "load": "model",
    "plan": "planning",
    "warmup": "diagnostics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"edgeinfer.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
