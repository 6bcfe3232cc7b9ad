"""How do you train what a config file says? `python -m examples.cli fit --config examples/config.yaml`."""

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI()
