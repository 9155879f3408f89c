"""Hugging Face's Trainer on a tiny GPT-2 built from its configuration, with a tokenizer trained here."""

import os

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

STEPS = int(os.environ.get("STEPS", 30))
OUT = os.environ.get("OUT", ".")


def tokenizer(lines):
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<pad>"], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")


class Lines(torch.utils.data.Dataset):
    def __init__(self, lines, tokens):
        self.lines, self.tokens = lines, tokens

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        # The tokenizer is also used in worker processes, and warns about it.
        return self.tokens(self.lines[index], truncation=True, max_length=32)


def main():
    set_seed(3)
    lines = [line for line in open(os.__file__).read().splitlines() if len(line) > 20][:400]
    tokens = tokenizer(lines)
    tokens(lines[:10])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokens), n_positions=64, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=os.path.join(OUT, "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", 1)),
        logging_steps=5,
        save_steps=max(5, STEPS // 2),
        save_total_limit=2,
        report_to=os.environ.get("REPORT", "none").split(","),
        use_cpu=True,
        dataloader_num_workers=int(os.environ.get("WORKERS", 0)),
        disable_tqdm=bool(os.environ.get("NO_BAR")),
        log_level=os.environ.get("HF_LEVEL", "info"),
        ddp_backend="gloo",
        ddp_find_unused_parameters=bool(os.environ.get("FIND_UNUSED")),
        torch_compile=bool(os.environ.get("COMPILE")),
        gradient_checkpointing=bool(os.environ.get("RECOMPUTE")),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Lines(lines, tokens),
        eval_dataset=Lines(lines[:16], tokens),
        data_collator=DataCollatorForLanguageModeling(tokens, mlm=False),
    )
    last = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    result = trainer.train(resume_from_checkpoint=last if os.environ.get("RESUME") else None)
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
