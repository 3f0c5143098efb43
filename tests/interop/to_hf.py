"""Write the default model as a Hugging Face folder that vLLM serves."""

import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.model.export_hf import export

CONTROL = 3  # gguf.TokenType.CONTROL


def write(source: Path, folder: Path) -> Path:
    """Write `source`, a GGUF of the llama class with a smollm tokenizer, into `folder`."""
    export(source, folder)
    reader = gguf.GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False)
         for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    )  # fmt: skip
    made.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "chat_template": facts["tokenizer.chat_template"],
                "pad_token": named["eos_token"],
                **named,
            }
        )
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
