"""PyTorch Forecasting's temporal fusion transformer on waves: `python forecasting_tft.py 2 result.pt`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer, seed_everything
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from saved import run_of_arguments, save


def main() -> None:
    run = run_of_arguments()
    seed_everything(0)
    noise = np.random.default_rng(0).standard_normal(3 * 16)
    time = np.tile(np.arange(16), 3)
    series = np.repeat(["a", "b", "c"], 16)
    frame = pd.DataFrame({"time": time, "series": series, "value": np.sin(time) + 2 + noise / 10})
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        # One length for all: the model cuts the padding behind the longest sample in some tensors only, and fails
        # where a rank's samples are shorter than the batch was padded to.
        min_encoder_length=6,
        max_encoder_length=6,
        min_prediction_length=3,
        max_prediction_length=3,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=4,
        dropout=0.0,
        loss=QuantileLoss(),
        optimizer="sgd",
        learning_rate=0.05,
    )
    trainer = Trainer(enable_checkpointing=False, limit_train_batches=5, **run.trainer_options)
    trainer.fit(model, data.to_dataloader(batch_size=8), data.to_dataloader(train=False, batch_size=7))
    save(model, trainer, run.output)


if __name__ == "__main__":
    main()
