"""Lightning on CPU: a regression with a validation loop, callbacks and a checkpoint; DDP with several ranks."""

import os
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", 40))
OUT = os.environ.get("OUT", ".")


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.unused = nn.Linear(2, 2) if os.environ.get("UNUSED") else None

    def step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def training_step(self, batch, number):
        loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", self.step(batch), sync_dist=bool(os.environ.get("SYNC")), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def main():
    pl.seed_everything(7)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1))
    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("DEVICES", 1)))
    strategy = os.environ.get("STRATEGY", "ddp_find_unused_parameters_true" if os.environ.get("UNUSED") else "ddp")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy if ranks > 1 else "auto",
        max_steps=STEPS,
        log_every_n_steps=5,
        precision=os.environ.get("PRECISION", "32-true"),
        default_root_dir=OUT,
        logger=CSVLogger(OUT),
        enable_progress_bar=not os.environ.get("NO_BAR"),
        callbacks=[ModelCheckpoint(dirpath=OUT, monitor="val_loss"), LearningRateMonitor(), EarlyStopping("val_loss", patience=50)],
        profiler=os.environ.get("PROFILER") or None,
        detect_anomaly=bool(os.environ.get("ANOMALY")),
    )
    loaders = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=16, shuffle=bool(os.environ.get("SHUFFLED")))
    resume = os.environ.get("RESUME") or None
    trainer.fit(Regression(), *loaders, ckpt_path=resume)
    if os.environ.get("WARN"):
        warnings.warn("the validation set is the training set", UserWarning, stacklevel=1)


if __name__ == "__main__":
    main()
