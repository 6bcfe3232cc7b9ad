"""A user's own LightningCLI, which imports nothing of this package."""

from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI()
