//! Lightning, and Hugging Face's Trainer with Accelerate, over two hosts: programs that know nothing of Mainstay,
//! with their own checkpoints in a directory that both hosts share. One that loses a rank ends with the parameters
//! of an undisturbed run.

use mainstay_tests::{is_root, python_with_frameworks, skipped};

use super::assert_undisturbed;
use super::cluster::Cluster;

const LIGHTNING: &str = r#"
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def training_step(self, batch, number):
        return torch.nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

class Waits(pl.Callback):
    def on_train_batch_end(self, trainer, *rest):
        step(trainer.global_step)

def train(out, callbacks):
    pl.seed_everything(7)
    inputs = torch.randn(80, 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp", max_epochs=4,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True), *callbacks], logger=False, enable_progress_bar=False,
    )
    model = Regression()
    last = f"{out}/last.ckpt"
    trainer.fit(model, data, ckpt_path=last if os.path.exists(last) else None)
    return model
"#;

const TRANSFORMERS: &str = r#"
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs)[:, 0], labels)}

class Waits(TrainerCallback):
    def on_step_end(self, arguments, state, control, **rest):
        step(state.global_step)

def train(out, callbacks):
    set_seed(7)
    inputs = torch.randn(80, 8)
    data = [{"inputs": row, "labels": row.sum()} for row in inputs]
    arguments = TrainingArguments(
        output_dir=out, max_steps=20, per_device_train_batch_size=8, save_steps=5, logging_steps=5, report_to="none",
        use_cpu=True, disable_tqdm=True, ddp_backend="gloo", learning_rate=1e-2,
    )
    model = Regression()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if os.path.isdir(out) else None)
    return model
"#;

/// Before the program: where a rank waits to be killed, and where checkpoints are. After it: its result, and that of the
/// same training without a failure, in the same process: a second start with these imports takes longer.
const BEFORE: &str = r#"
OUT = os.environ["MAINSTAY_CHECKPOINT_DIR"] + "/own"
def step(number):
    if number == 13 and str(ATTEMPT) in os.environ.get("WAITS", "").split(","):
        mark(f"waits.{ATTEMPT}.{RANK}")
        if RANK == 1:
            wait_for("never")
    mark(f"step.{ATTEMPT}.{RANK}.{number}")
"#;
const BEHIND: &str = r#"
import hashlib
def digest(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
mark(f"final.{RANK}", digest(train(OUT, [Waits()])))
mark(f"undisturbed.{RANK}", digest(train(OUT + ".undisturbed", [])))
"#;

/// The parameters of both ranks when one was killed in step 13 are those of an undisturbed run.
fn ends_as_an_undisturbed_run(program: &str) {
    let Some(python) = python_with_frameworks() else { return };
    if !is_root() {
        return skipped("only root can make network namespaces");
    }
    let python = python.display().to_string();
    let cluster = Cluster::in_namespaces(2);
    let variables = [("WAITS", "0"), ("PYTHON_EXEC", &python), ("OMP_NUM_THREADS", "1")];
    let jobs = cluster.start(&format!("{BEFORE}{program}{BEHIND}"), "--nproc-per-node 1", &variables);
    for (rank, job) in jobs.iter().enumerate() {
        job.mark(&format!("waits.0.{rank}"));
    }
    jobs[1].kill_rank(0, 1);
    let ends = cluster.ends(jobs);
    for end in &ends {
        end.assert_status(0);
        assert_eq!(end.summary().attempts, 2, "{end}");
    }
    let steps = |number: u32| cluster.stage(0).marks().join(format!("step.1.0.{number}")).exists();
    assert!(!steps(10) && steps(11), "the second attempt goes on from step 10\n{}", ends[0]);
    assert_undisturbed(&cluster, &[0, 1]);
}

#[test]
fn lightning_over_two_hosts_that_loses_a_rank_ends_as_an_undisturbed_run() {
    ends_as_an_undisturbed_run(LIGHTNING);
}

#[test]
fn transformers_over_two_hosts_that_loses_a_rank_ends_as_an_undisturbed_run() {
    ends_as_an_undisturbed_run(TRANSFORMERS);
}
