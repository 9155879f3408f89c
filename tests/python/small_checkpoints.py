"""Two checkpoints of a small model by each library, as it writes them: the older one and the newer one.

usage: small_checkpoints.py DIRECTORY     makes huggingface, lightning, dcp, torch and orbax in it
"""

import os
import pathlib
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

STEPS = (10, 20)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 32)

    def forward(self, x, labels=None):
        out = self.net(x)
        return {"loss": out.square().mean(), "logits": out}


def huggingface(to):
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(to), per_device_train_batch_size=1, max_steps=STEPS[-1], save_steps=STEPS[0], report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=5,
    )
    data = [{"x": torch.randn(64), "labels": torch.zeros(1)} for _ in range(STEPS[-1])]
    transformers.Trainer(model=Net(), args=arguments, train_dataset=data).train()


def lightning(to):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(64, 32)

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    saving = pl.callbacks.ModelCheckpoint(dirpath=str(to), every_n_train_steps=STEPS[0], save_top_k=-1)
    data = torch.utils.data.DataLoader(torch.randn(STEPS[-1], 64), batch_size=1)
    pl.Trainer(
        max_steps=STEPS[-1], accelerator="cpu", devices=1, num_nodes=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving],
    ).fit(Module(), data)


def state(step):
    torch.manual_seed(step)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64))["loss"].backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def dcp(to):
    import torch.distributed.checkpoint as checkpoint

    for step in STEPS:
        checkpoint.save(state(step), checkpoint_id=str(to / f"step-{step}"), no_dist=True)


def torch_save(to):
    to.mkdir(parents=True)
    for step in STEPS:
        torch.save(state(step), to / f"ckpt_{step}.pt")


def orbax(to):
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(to.absolute())
    for step in STEPS:
        weights = {"weights": jnp.arange(2048, dtype=jnp.float32) + step, "bias": jnp.ones(32) * step}
        assert manager.save(step, args=ocp.args.StandardSave(weights))
    manager.wait_until_finished()
    manager.close()


def main():
    to = pathlib.Path(sys.argv[1])
    for name, make in [
        ("huggingface", huggingface), ("lightning", lightning), ("dcp", dcp), ("torch", torch_save), ("orbax", orbax),
    ]:
        make(to / name)


main()
