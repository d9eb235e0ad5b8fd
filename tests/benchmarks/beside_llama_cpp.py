#!/usr/bin/env python3
"""Speed beside llama.cpp on the same file, in alternation, as ratios. Not a test: it needs a quiet machine and a peer.

    python tests/benchmarks/beside_llama_cpp.py MODEL --peer-python PEER/bin/python [--prefill 512] [--decode 64] [--rounds 5]

PEER is a virtual environment with llama-cpp-python, built for this processor (pip install --no-binary :all: llama-cpp-python).
Each side loads the model once, in a process of its own; then they take turns. Printed: medians in tokens/s, their ratio, the
load average and the read bandwidth of this machine's memory as our threads see it. Discard a run when anything else ran.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

PEER = """
import sys, time
from llama_cpp import Llama
threads = int(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
def evaluate(ids, position):
    if position == 0:
        model.reset()
    model.eval(ids)
"""
OURS = """
import sys, time
import edgeinfer
model = edgeinfer.load(sys.argv[1], threads=int(sys.argv[2]), context=2048)
sequence = model.cache.open()
model.cache.reserve(sequence, 2048)
def evaluate(ids, position):
    for first in range(0, len(ids), 512):
        part = ids[first : first + 512]
        positions = range(position + first, position + first + len(part))
        model.step(part, positions, [sequence.index] * len(part), [len(part) - 1], lambda i, logits: logits[0].argmax())
"""
SERVE = """
print("ready", flush=True)
for line in sys.stdin:
    kind, n = line.split()
    n = int(n)
    if kind == "bandwidth":
        print(model.read_bandwidth() / 1e9, flush=True)
        continue
    ids = [(i * 7919) % 30000 + 100 for i in range(n if kind == "prefill" else 8)]
    begun = time.perf_counter()
    evaluate(ids, 0)
    if kind == "decode":
        begun = time.perf_counter()
        for i in range(n):
            evaluate([ids[i % 8]], 8 + i)
    print(n / (time.perf_counter() - begun), flush=True)
"""


class Side:
    def __init__(self, python: str, code: str, model: str, threads: int) -> None:
        command = [python, "-c", code + SERVE, model, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout and self._process.stdout.readline().strip() == "ready"

    def ask(self, kind: str, n: int) -> float:
        assert self._process.stdin and self._process.stdout
        print(kind, n, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    peer = Side(options.peer_python, PEER, options.model, options.threads)
    ours = Side(sys.executable, OURS, options.model, options.threads)
    for kind, n in (("prefill", options.prefill), ("decode", options.decode)):
        results: dict[Side, list[float]] = {peer: [], ours: []}
        for round_ in range(options.rounds + 1):
            for side, speeds in results.items():
                speed = side.ask(kind, n)
                if round_:  # the first round warms up
                    speeds.append(speed)
        theirs, mine = (statistics.median(results[side]) for side in (peer, ours))
        print(f"{kind} {n}: llama.cpp {theirs:.1f} tokens/s, edgeinfer {mine:.1f} tokens/s, ratio {mine / theirs:.2f}")
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    print(f"load average {load}; read bandwidth {ours.ask('bandwidth', 0):.1f} GB/s with {options.threads} threads")


if __name__ == "__main__":
    main()
