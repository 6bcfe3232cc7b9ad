"""How do you use a mean that is not over the number of labels in the Transformers Trainer?

`torchrun --nproc-per-node 2 examples/hf_trainer.py` trains a tiny GPT-2, made from its config, on a loss in which rare
tokens count more, and compares it with one process. The Trainer divides by the number of labels of all processes and
accumulated batches, `num_items_in_batch`, for models that take it, but not by a sum of class weights.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gradavg import GradAvgReducer

EPOCHS = 3
TOKENS = 11
SAMPLES = 16
LENGTH = 12
CLASS_WEIGHTS = torch.linspace(0.1, 3, TOKENS)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    options: Any = dict.fromkeys(("bos_token_id", "eos_token_id", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_embd=16, n_layer=1, n_head=2, **options))


def new_data() -> list[dict[str, Tensor]]:
    tokens = torch.randint(TOKENS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(SAMPLES)[:, None] % (LENGTH - 1) + 2
    labels = tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return [{"input_ids": tokens[index], "labels": labels[index]} for index in range(SAMPLES)]


def mean_loss(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=CLASS_WEIGHTS, ignore_index=-100)
    return loss, CLASS_WEIGHTS[labels[labels != -100]].sum(), logits


class WeightedTrainer(Trainer):
    loss_is_scaled_for_ga = True  # the reducer divides by the weights of the window: the Trainer must not divide, too
    reducer: GradAvgReducer | None = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if self.reducer is None and isinstance(model, DistributedDataParallel):
            self.reducer = GradAvgReducer(reduction="weighted_mean")
            self.reducer.register(model)
        loss, weight, logits = mean_loss(model, inputs)
        if self.reducer is not None and torch.is_grad_enabled():
            loss = self.reducer.weigh(loss, weight=weight)
        if return_outputs:
            return loss, {"logits": logits}
        return loss


def on_one_process() -> nn.Module:
    model = new_model()
    batch = default_collate(new_data())  # all samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss, _, _ = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
    return model


def main() -> None:
    if "RANK" not in os.environ:  # which torchrun sets, and accelerate launch for several processes
        sys.exit("Start this example by: torchrun --nproc-per-node 2 examples/hf_trainer.py")
    sgd: Any = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    quiet: Any = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    counts: Any = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": EPOCHS}
    arguments = TrainingArguments("hf_output", use_cpu=True, ddp_find_unused_parameters=False, **sgd, **quiet, **counts)
    model = new_model()
    trainer = WeightedTrainer(model, arguments, train_dataset=new_data())  # 2 x 2 x 4 samples: all 16
    trainer.train()
    trainer.evaluate(new_data())
    pairs = zip(model.parameters(), on_one_process().parameters(), strict=True)
    difference = max((parameter - expected).abs().max().item() for parameter, expected in pairs)
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} processes: largest difference to one process {difference:.1e}")


if __name__ == "__main__":
    main()
