"""The Python that the documents print, with the real frameworks."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
FENCE = re.compile(r"^( *)```python\n(.*?)^ *```", re.M | re.S)

NET = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
        def forward(self, x, labels=None):
            out = self.net(x)
            return {"loss": out.square().mean(), "logits": out}
"""

# By page: the packages that it needs, and what the program around each of its snippets has.
TUTORIAL = {
    "huggingface.md": (("transformers", "accelerate"), NET + """
    import transformers
    model = Net()
    data = [{"x": torch.randn(4), "labels": torch.zeros(1)} for _ in range(8)]
    arguments = transformers.TrainingArguments(output_dir="/shared/llm", max_steps=2, report_to=[], use_cpu=True)
    """),
    "jax.md": (("jax",), """
    import jax
    train_step = jax.jit(lambda state: (state + 1, state * 0.5))
    """),
    "lightning.md": (("lightning",), """
    import torch, lightning.pytorch as pl
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
        def training_step(self, batch, _):
            self.trainer.should_stop = True
            return self.net(batch).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)
    model, data = Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    """),
    "pytorch.md": (("torch",), """
    import os, torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss, out_dir = 0.5, "."
    """),
}  # fmt: skip


def snippets(page: Path) -> list[str]:
    return [textwrap.dedent(indent + text) for indent, text in FENCE.findall(page.read_text())]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_each_tutorial_with_python_is_run():
    assert {page.name for page in ROOT.glob("docs/tutorial/*.md") if snippets(page)} == set(TUTORIAL)


@pytest.mark.parametrize("name", TUTORIAL)
def test_the_snippets_of_a_tutorial_run_as_printed(python, tmp_path, name):
    packages, before = TUTORIAL[name]
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    for number, snippet in enumerate(snippets(ROOT / "docs/tutorial" / name)):
        # A folder that all hosts share, of this test's own.
        code = (textwrap.dedent(before) + snippet).replace("/shared/llm", str(tmp_path / f"shared-{number}"))
        done = python(
            code, check=False, LOCAL_WORLD_SIZE=1, GROUP_WORLD_SIZE=1, MAINSTAY_CHECKPOINT_DIR=tmp_path / f"steps-{number}"
        )
        assert done.returncode == 0, f"{snippet}\n{done.stderr}"


def test_whatever_of_mainstay_a_document_uses_is_there(python):
    used = set()
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for snippet in snippets(page):
            used.update(re.findall(r"\bmainstay(?:\.[A-Za-z_]\w*)+", snippet))
    assert {"mainstay.step", "mainstay.checkpoint.load"} < used
    packages = {"dcp": "torch", "jax": "jax", "lightning": "lightning", "torch": "torch", "transformers": "transformers"}
    missing = {part for part, package in packages.items() if not is_installed(package)}
    python("import mainstay\n" + "\n".join(name for name in sorted(used) if name.split(".")[1] not in missing))
