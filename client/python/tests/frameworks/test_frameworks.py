"""The hooks for frameworks, each with the real framework and a tiny model under the real launcher."""

from __future__ import annotations

import importlib.util
import textwrap

import pytest


def needs(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def sections(page) -> set:
    return {name for record in page["records"] for name in record["sections"]}


LIGHTNING = """
    import sys, torch, lightning.pytorch as pl
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 1)
        def training_step(self, batch, _):
            return self.net(batch).square().mean()
        def validation_step(self, batch, _):
            self.log("v", self.net(batch).mean())
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, num_nodes=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2, default_root_dir=sys.argv[1], {more}
    )
    trainer.fit(Net(), data, data)
"""


@needs("lightning")
@pytest.mark.parametrize("how", ["by its entry point", "by name"])
def test_lightning(run_job, tmp_path, how):
    by_name = how == "by name"
    more = "callbacks=[__import__('mainstay.lightning').lightning.MainstayCallback()]" if by_name else ""
    code = LIGHTNING.format(more=more).replace("sys.argv[1]", repr(str(tmp_path)))
    page = run_job(code, ranks=1).pages[0]
    told = [record["step"] for record in page["records"]]
    assert told == [1, 2, 3, 4], "4 batches an epoch, 2 of them a step; given by name too, each is told once"
    assert page["claim"]["total_steps"] == 4
    assert sections(page) >= {"data", "backward", "optimizer", "evaluation", "checkpoint"}
    assert all(record["loss"] > 0 for record in page["records"])
    assert page["beat"]["sections"] == []


@needs("lightning")
def test_lightnings_own_checkpoints_are_sealed(tmp_path, python):
    train = LIGHTNING.format(more="plugins=[io], callbacks=[saving]").replace("sys.argv[1]", repr(str(tmp_path)))
    train = train.replace("trainer = pl", """import mainstay.lightning
    io = mainstay.lightning.MainstayCheckpointIO()
    saving = pl.callbacks.ModelCheckpoint(dirpath=HERE, save_top_k=1, save_last=True, monitor=None)
    trainer = pl""").replace("HERE", repr(str(tmp_path / "saved")))
    # In one process, because importing Lightning takes long.
    again = textwrap.dedent("""
    import pathlib
    last = pathlib.Path(HERE, "last.ckpt")
    (manifest,) = last.glob("step-*/rank-00000/manifest.json")
    assert manifest.parent.parent.name == "step-000000000004", "the one of the first epoch is gone"
    def resume(epochs):
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, num_nodes=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=2, enable_checkpointing=False, plugins=[io],
        )
        trainer.fit(Net(), data, data, ckpt_path=str(last))
        return trainer.global_step
    print("at", resume(3))
    (state,) = last.glob("step-*/rank-00000/state*")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    try:
        resume(3)
    except RuntimeError as error:
        print("refused", str(last) in str(error))
    """).replace("HERE", repr(str(tmp_path / "saved")))
    said = python(textwrap.dedent(train) + again).stdout
    assert "at 6" in said and "refused True" in said


@needs("transformers", "accelerate")
@pytest.mark.parametrize("how", ["by default", "by name"])
def test_transformers(run_job, tmp_path, how):
    by_name = "callbacks=[__import__('mainstay.transformers').transformers.MainstayCallback()]," if how == "by name" else ""
    job = run_job(f"""
        import torch, transformers
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(4, 1)
            def forward(self, x, labels=None):
                out = self.net(x)
                return {{"loss": out.square().mean(), "logits": out}}
        data = [{{"x": torch.randn(4), "labels": torch.zeros(1)}} for _ in range(24)]
        arguments = transformers.TrainingArguments(
            output_dir={str(tmp_path / "out")!r}, per_device_train_batch_size=4, max_steps=6, logging_steps=1,
            eval_strategy="steps", eval_steps=2, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=Net(), args=arguments, train_dataset=data, eval_dataset=data,
            {by_name}
        )
        trainer.train()
        assert trainer.state.global_step == 6
    """, ranks=1)
    page = job.pages[0]
    assert [record["step"] for record in page["records"]] == [1, 2, 3, 4, 5, 6], "the trainer's global_step, each once"
    assert page["claim"]["total_steps"] == 6
    # What Transformers says of a callback that it has twice.
    assert "but there is already one" not in job.done.stderr + job.done.stdout
    assert sections(page) >= {"data", "backward", "optimizer", "evaluation", "checkpoint"}
    assert page["records"][0]["loss"] is None and all(record["loss"] > 0 for record in page["records"][1:])
    assert page["beat"]["sections"] == []


@needs("jax")
def test_jax_with_two_processes(run_job):
    job = run_job("""
        import os, jax, jax.numpy as jnp
        jax.config.update("jax_platforms", "cpu")
        try:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        except Exception:
            pass
        import mainstay.jax
        rank = int(os.environ["RANK"])
        jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 2, rank)
        assert jax.process_count() == 2
        @jax.jit
        def train_step(weights, batch):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
            return weights - 0.1 * grad, loss
        train_step = mainstay.jax.watch_step(train_step, first=10, loss=lambda result: result[1])
        from jax.experimental import multihost_utils
        weights = jnp.ones(4)
        for n in range(8):
            weights, loss = train_step(weights, jnp.ones((2, 4)) * (rank + 1))
            # Both ranks must reach this line, or neither continues.
            multihost_utils.sync_global_devices(f"step {n}")
        jax.block_until_ready(weights)
    """)
    for rank, page in job.pages.items():
        assert [record["step"] for record in page["records"]] == list(range(10, 18)), (rank, page)
        assert "compile" in page["records"][0]["sections"] and "dispatch" in page["records"][-1]["sections"]
        assert all(record["loss"] is not None for record in page["records"])


@needs("jax")
def test_a_jax_step_counts_when_its_results_are_ready(python, page):
    python("""
        import mainstay.jax
        class Array:
            size, ready = 1, False
            def is_ready(self): return self.ready
            def is_deleted(self): return False
            def __float__(self): return 0.5
        results = [Array() for _ in range(3)]
        from mainstay.jax import _Watch
        watch = _Watch(0, lambda result: result)
        for result in results:
            watch.dispatched(result)
        results[0].ready = results[2].ready = True
        watch.report()
    """, page=page)
    assert [(record["step"], record["loss"]) for record in page.read()["records"]] == [(0, 0.5)]


NVRX = """
    import os, time
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    client.start_section("setup")
    client.end_section("setup")
    for n in range(5):
        client.start_section("step")
        client.end_section("step")
        client.send_heartbeat()
    client.start_section("checkpointing")
    client.end_all_sections()
    state = client.state_dict()
    client.load_state_dict({"current_timeouts": {"heartbeat": {"initial": 9.0, "subsequent": 9.0, "were_calculated": True}}})
    time.sleep(1.5)
    client.shutdown_workload_monitoring()
    print("NVRX CLIENT DONE", flush=True)
    time.sleep(0.5)
"""


@needs("nvidia_resiliency_ext")
@pytest.mark.parametrize("watched", [0, 1])
def test_nvrx_client_unchanged(run_job, tmp_path, watched):
    job = run_job(NVRX, MAINSTAY_TORCH=watched)
    assert job.done.stdout.count("NVRX CLIENT DONE") == 2, job.done.stdout + job.done.stderr
    journal = "".join(path.read_text() for path in tmp_path.glob("logs/*/journal/*") if path.is_file())
    if watched:
        # The rank's own page comes first.
        assert all(page["claim"]["language"] == "python" for page in job.pages.values())
    else:
        assert journal.count("nvrx RankMonitorClient") == 2, journal
        assert "5 step(s)" in job.done.stderr + job.done.stdout
