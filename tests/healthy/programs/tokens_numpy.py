"""A bigram model on tokens of a freshly trained tokenizer; safetensors weights; workers forked after its first use."""

import multiprocessing
import os
import warnings

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")


def count(job):
    tokenizer, line = job
    return tokenizer.encode(line).ids


def main():
    lines = [line for line in open(os.__file__).read().splitlines() if line.strip()][:600]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=256, special_tokens=["<unk>"], show_progress=bool(os.environ.get("RAYON_NUM_THREADS"))))
    tokenizer.encode_batch(lines[:50])
    size = tokenizer.get_vocab_size()
    logits = np.zeros((size, size))
    path = os.path.join(OUT, "bigram.safetensors")
    if os.path.exists(path):
        logits = load_file(path)["logits"]
    else:
        print(f"checkpoint {path} not found, starting from scratch; missing keys: ['logits']")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for step in tqdm(range(1, STEPS + 1), desc="train", mininterval=0.05):
            batch = pool.map(count, [(tokenizer, lines[(step * 4 + at) % len(lines)]) for at in range(4)])
            loss = total = 0.0
            for ids in batch:
                for a, b in zip(ids, ids[1:]):
                    p = np.exp(logits[a] - logits[a].max())
                    p /= p.sum()
                    loss, total = loss - np.log(p[b]), total + 1
                    p[b] -= 1
                    logits[a] -= 0.5 * p
            if step % 5 == 0:
                tqdm.write(f"Step {step}/{STEPS} - loss: {loss / max(1, total):.4f} - ppl: {np.exp(loss / max(1, total)):.1f}")
            if step == 10:
                warnings.warn("`clean_up_tokenization_spaces` was not set. It will be set to `True` by default.", FutureWarning, stacklevel=1)
    save_file({"logits": logits}, path)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
