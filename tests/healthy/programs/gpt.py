"""A small GPT with mixed precision, gradient accumulation, cosine decay, evaluation and resume."""

import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")
RESUME = os.environ.get("RESUME", "")
COMPILE = bool(os.environ.get("COMPILE"))
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 48, 4, 2, 32, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text, target):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


def main():
    ddp = "RANK" in os.environ
    if ddp:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ddp else 0
    text = torch.frombuffer(bytearray(open(os.__file__, "rb").read()), dtype=torch.uint8).long()
    torch.manual_seed(1337 + rank)

    def batch():
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,)).tolist()
        x = torch.stack([text[s : s + LENGTH] for s in starts])
        return x, torch.stack([text[s + 1 : s + 1 + LENGTH] for s in starts])

    say = print if rank == 0 else lambda *_, **__: None
    say(f"tokens per iteration will be: {BATCH * LENGTH}")
    model = GPT()
    first = 0
    path = os.path.join(OUT, "ckpt.pt")
    if RESUME:
        say(f"Resuming training from {OUT}")
        state = torch.load(path, map_location="cpu")
        state["model"].pop("head.weight", None)
        missing, unexpected = model.load_state_dict(state["model"], strict=False)
        say(f"missing keys in the checkpoint: {missing}, unexpected: {unexpected}")
        first = state["iter_num"]
    else:
        say("Initializing a new model from scratch")
    say(f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
    scaler = torch.cuda.amp.GradScaler(enabled=bool(os.environ.get("SCALER", "1")))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    say(f"num decayed parameter tensors: {len(decay)}, with {sum(p.numel() for p in decay):,} parameters")
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-3)
    say("using fused AdamW: False")
    raw = model
    if COMPILE:
        say("compiling the model... (takes a ~minute)")
        model = torch.compile(model)
    if ddp:
        model = DistributedDataParallel(model, find_unused_parameters=bool(os.environ.get("FIND_UNUSED")))
    for step in range(first, first + STEPS + 1):
        began = time.time()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1.0 + math.cos(math.pi * (step - first) / STEPS))
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses = [sum(raw(*batch()).item() for _ in range(2)) / 2 for _ in range(2)]
            model.train()
            say(f"step {step}: train loss {losses[0]:.4f}, val loss {losses[1]:.4f}", flush=True)
            if step > first and rank == 0:
                say(f"saving checkpoint to {OUT}")
                torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}, path)
        for micro in range(2):
            if ddp:
                model.require_backward_grad_sync = micro == 1
            with torch.amp.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batch()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        say(f"iter {step}: loss {loss.item() * 2:.4f}, time {(time.time() - began) * 1000:.2f}ms, mfu {-100.0:.2f}%", flush=True)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
