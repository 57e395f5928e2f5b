"""Record golden data of transformers' CLIP: a tiny vocabulary, tokens of texts, and two random text towers."""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPTokenizerFast
from transformers.models.clip.tokenization_clip import bytes_to_unicode

HERE = Path(__file__).parents[2] / "tests" / "golden" / "clip_text"
MERGES = [
    ("t", "h"), ("th", "e</w>"), ("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>"),
    ("p", "i"), ("pi", "c"), ("pic", "k</w>"), ("u", "p</w>"), ("c", "u"), ("cu", "b"), ("cub", "e</w>"),
]  # fmt: skip
TEXTS = [
    "pick up the red cube",
    "Pick  up the BLUE cube!",
    "don't touch it; it's 42 cm away",
    "",
    "würfel in die schüssel",
    "赤い立方体",
    "the " * 100,
]
LENGTH = 20
TOWERS = {
    "quick": {"hidden_act": "quick_gelu", "num_hidden_layers": 2, "num_attention_heads": 2},
    "exact": {"hidden_act": "gelu", "num_hidden_layers": 1, "num_attention_heads": 4},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        letters = list(bytes_to_unicode().values())
        words = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(pair) for pair in MERGES)]
        words += ["<|startoftext|>", "<|endoftext|>"]
        vocabulary.write_text(json.dumps({word: number for number, word in enumerate(words)}))
        merges.write_text("#version: 0.2\n" + "\n".join(map(" ".join, MERGES)) + "\n")
        slow = CLIPTokenizer(str(vocabulary), str(merges))
        fast = CLIPTokenizerFast(str(vocabulary), str(merges))
    (HERE / "tokenizer.json").write_text(fast.backend_tokenizer.to_str())
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    encoded, plain = fast(TEXTS, **options), slow(TEXTS, **options)
    cases = {"ids": encoded["input_ids"].numpy(), "mask": encoded["attention_mask"].numpy()}
    for text, fast_ids, slow_ids in zip(TEXTS, cases["ids"], plain["input_ids"].numpy(), strict=True):
        print("slow and fast agree" if (fast_ids == slow_ids).all() else "slow and fast differ", repr(text[:40]))
    for name, fields in TOWERS.items():
        torch.manual_seed(len(name) + fields["num_hidden_layers"])
        config = CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            projection_dim=16,
            max_position_embeddings=LENGTH,
            bos_token_id=len(words) - 2,
            eos_token_id=len(words) - 1,
            pad_token_id=len(words) - 1,
            attn_implementation="eager",
            **fields,
        )
        tower = CLIPTextModel(config).eval()
        with torch.no_grad():
            for weight in tower.parameters():
                weight.copy_(0.3 * torch.randn_like(weight) + (1.0 if weight.ndim == 1 else 0.0))
            answer = tower(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"])
        tower.save_pretrained(HERE / name)
        cases[f"{name}.last_hidden_state"] = answer.last_hidden_state.numpy()
    np.savez_compressed(HERE / "cases.npz", **cases)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "texts": TEXTS, "length": LENGTH}
    (HERE / "cases.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
