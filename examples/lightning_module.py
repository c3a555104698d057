"""A LightningModule whose training step is a placed one; the Trainer does the rest.

It needs lightning, and uses two logical CPU devices; leave `machine` out to use GPUs.
"""

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import devplace as dp


class Ordinary(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(16, 4).double()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))


class Placed(Ordinary):
    automatic_optimization = False  # the step makes gradients and update

    def on_train_start(self) -> None:
        batch, optimizer = next(iter(self.trainer.train_dataloader)), self.optimizers().optimizer
        options = {"machine": 2, "budget": "10s"}
        self.step = dp.parallelize(self.model, batch, F.cross_entropy, optimizer, **options)

    def training_step(self, batch, index):
        self.step(*batch)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.step.sync()  # as on_train_epoch_end would, before the model is saved

    def on_train_end(self) -> None:
        self.step.close()


def trained(kind: type) -> dict:
    torch.manual_seed(0)
    module, off = kind(), ("logger", "enable_progress_bar", "enable_model_summary")
    data = TensorDataset(torch.randn(64, 16).double(), torch.randint(4, (64,)))
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **dict.fromkeys(off, False))
    trainer.fit(module, DataLoader(data, batch_size=16), DataLoader(data, batch_size=64))
    return {**module.state_dict(), "val_loss": trainer.callback_metrics["val_loss"]}


expected, found = trained(Ordinary), trained(Placed)
same = all(torch.allclose(found[name], value) for name, value in expected.items())
print("weights and validation loss as of the ordinary module:", same)
