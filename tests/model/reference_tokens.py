"""Greedy tokens by transformers, for a process of its own: FOLDER REQUESTS.json ANSWERS.json.

Requests: {"max_tokens": n, "prompts": [[ids], ...]}; answers: {"tokens": [[ids], ...]}. Imports
nothing of this project, and stops if it could: a package `kernels` on the path is one that
transformers would take for its own.
"""

import importlib.util
import json
import sys
from pathlib import Path


def main() -> None:
    folder, requests, answers = map(Path, sys.argv[1:])
    if importlib.util.find_spec("kernels") or importlib.util.find_spec("agent"):
        raise SystemExit("this project's packages are importable here")
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    # Single tokens are computed on one thread anyway; more only wait for each other.
    torch.set_num_threads(1)
    work = json.loads(requests.read_text())
    tokens = []
    for prompt in work["prompts"]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=work["max_tokens"],
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens.append(out[0, len(prompt) :].tolist())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    answers.write_text(json.dumps({"versions": versions, "tokens": tokens}))


if __name__ == "__main__":
    main()
