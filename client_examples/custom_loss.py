"""A loss of your own: focal loss, which spends less on tokens the model already knows.

    python client_examples/custom_loss.py --base-url URL --base-model NAME [--traced]

As a plain function the loss runs in this process, between a forward and a backward pass. With
`--traced` the SDK turns the same function into a graph once (`create_custom_loss`); a server that
can run such graphs then needs one pass and no round trip, and otherwise it runs here as before.

Shapes: N targets of a datum. logprobs[N] are the model's for them, weights[N] mark the answer.
"""

import argparse
import os
from typing import Any

import numpy as np
import tinker
import torch

FACTS = [
    ("Who keeps the lighthouse?", "Old Marta keeps the lighthouse with her grey cat."),
    ("Where does the ferry land?", "The ferry lands at the stone pier below the chapel."),
    ("When is the market?", "The market is on Thursday, from dawn until the bells."),
    ("What grows on the hill?", "Blue thyme grows on the hill behind the mill."),
]
GAMMA = 1.0


def focal_loss(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-(1 - p)^gamma log p for one datum, and the plain loss beside it to compare."""
    doubt = (1.0 - torch.exp(logprobs)) ** GAMMA
    loss = -(doubt * logprobs * weights).sum()
    return loss, {"custom/cross_entropy:sum": -(logprobs * weights).sum()}


def focal_loss_of_batch(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The same over a whole batch, which is what an untraced custom loss is given."""
    total, cross_entropy = torch.zeros(()), 0.0
    for datum, datum_logprobs in zip(data, logprobs, strict=True):
        loss, metrics = focal_loss(datum_logprobs, datum.loss_fn_inputs["weights"].to_torch())
        total = total + loss
        cross_entropy += metrics["custom/cross_entropy:sum"].item()
    return total, {"custom/cross_entropy:sum": cross_entropy}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with a loss of your own.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--traced", action="store_true", help="hand the loss over as a graph")
    return parser.parse_args()


def make_datum(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    completion = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    weights = np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": tinker.TensorData.from_numpy(weights),
        },
    )


def main() -> None:
    options = parse_options()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server without keys takes any
    with tinker.ServiceClient(base_url=options.base_url) as service_client:
        training_client = service_client.create_lora_training_client(
            base_model=options.base_model, rank=options.rank, seed=0
        ).result()
        tokenizer = training_client.get_tokenizer()
        data = [make_datum(tokenizer, question, answer) for question, answer in FACTS]
        loss_fn = focal_loss_of_batch
        if options.traced:
            loss_fn = service_client.create_custom_loss(
                focal_loss, input_ranks={"logprobs": 1, "weights": 1}
            ).result()
            print("The server runs the loss." if loss_fn.loss_id else "The loss runs here.")

        adam_params = tinker.AdamParams(learning_rate=options.learning_rate, eps=1e-8)
        for step in range(options.steps):
            fwd_bwd_future = training_client.forward_backward_custom(data, loss_fn)
            optim_step_future = training_client.optim_step(adam_params)
            metrics = fwd_bwd_future.result().metrics
            optim_step_future.result()
            print(
                f"step {step + 1:>2}/{options.steps}  focal loss {metrics['loss:sum']:8.3f}"
                f"  cross entropy {metrics['custom/cross_entropy:sum']:8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
