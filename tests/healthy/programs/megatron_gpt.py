"""Megatron core's GPT on CPU, data-parallel only, with log lines in Megatron's format."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

STEPS = int(os.environ.get("STEPS", 30))
LENGTH, VOCABULARY = 24, 128


# Megatron creates its buffers on the current CUDA device.
torch.cuda.current_device = lambda: torch.device("cpu")


def main():
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    try:
        model_parallel_cuda_manual_seed(1)
    except Exception as error:
        print(f"WARNING: no CUDA generator: {type(error).__name__}: {error}", flush=True)
    # Separate random number states exist on GPUs only. Without dropout, no random numbers are drawn.
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    places = torch.arange(LENGTH).repeat(2, 1)
    mask = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    for step in range(1, STEPS + 1):
        began = time.time()
        text = torch.randint(0, VOCABULARY, (2, LENGTH + 1))
        loss = model(text[:, :-1], places, mask, labels=text[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 3 == 0:
            took = (time.time() - began) * 1000
            print(
                f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {step:8d}/{STEPS:8d} | consumed samples: {step * 2:12d} |"
                f" elapsed time per iteration (ms): {took:.1f} | learning rate: 1.000000E-03 | global batch size: {2:5d} |"
                f" lm loss: {loss.item():.6E} | loss scale: 1.0 | grad norm: {float(norm):.3f} |"
                " number of skipped iterations:   0 | number of nan iterations:   0 |",
                flush=True,
            )
    print("[after training is done]", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
