"""Direct preference optimization: a loss of your own, computed on your side.

    python client_examples/dpo.py --base-url URL --base-model NAME

The service returns the logprobs of each answer and takes back the gradient with respect to them
(`forward_backward_custom`), so the loss below runs in this process, in plain torch.

Words: datums come in pairs, chosen then rejected. The margin of a pair is how much more the model
prefers the chosen answer than the reference (the base model) does; the loss is -log sigmoid of it.
"""

import argparse
import os
from typing import Any

import numpy as np
import tinker
import torch

PAIRS = [  # question, chosen: it comes to the point, rejected: it does not
    ("What is the capital of Italy?", "Rome.", "Great question! As an assistant I can say Rome."),
    ("What color is grass?", "Green.", "Well, that depends, but I would have to say green."),
    ("How many legs has a dog?", "Four.", "I am happy to help! A dog usually has four legs."),
    ("What do bees make?", "Honey.", "Certainly! It is well known that bees make honey."),
    ("What is frozen water?", "Ice.", "That is interesting! Frozen water is called ice."),
    ("What is 3 + 4?", "Seven.", "Let me think about that for you. The answer is seven."),
]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a model to prefer short answers.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    return parser.parse_args()


def make_datum(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    """One conversation; the weights mark the answer, which alone is compared."""
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


def answer_logprobs(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The summed logprob of every answer, as [number of pairs, 2]: chosen, rejected."""
    sums = [
        (datum_logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()
        for datum, datum_logprobs in zip(data, logprobs, strict=True)
    ]
    return torch.stack(sums).reshape(-1, 2)


def main() -> None:
    options = parse_options()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server without keys takes any
    with tinker.ServiceClient(base_url=options.base_url) as service_client:
        training_client = service_client.create_lora_training_client(
            base_model=options.base_model, rank=options.rank, seed=0
        ).result()
        tokenizer = training_client.get_tokenizer()
        data = [
            make_datum(tokenizer, question, answer)
            for question, *answers in PAIRS
            for answer in answers
        ]
        # A fresh adapter changes nothing yet, so what it says now is what the base model says.
        untrained = training_client.forward(data, "cross_entropy").result()
        reference = answer_logprobs(
            data, [output["logprobs"].to_torch() for output in untrained.loss_fn_outputs]
        )

        def dpo_loss(
            data: list[tinker.Datum], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            gain = options.beta * (answer_logprobs(data, logprobs) - reference)
            margins = gain[:, 0] - gain[:, 1]
            accuracy = (margins > 0).float().mean().item()
            metrics = {"margin:mean": margins.mean().item(), "accuracy:mean": accuracy}
            return -torch.nn.functional.logsigmoid(margins).sum(), metrics

        adam_params = tinker.AdamParams(learning_rate=options.learning_rate, eps=1e-8)
        for step in range(options.steps):
            fwd_bwd_future = training_client.forward_backward_custom(data, dpo_loss)
            optim_step_future = training_client.optim_step(adam_params)
            metrics = fwd_bwd_future.result().metrics
            optim_step_future.result()
            print(
                f"step {step + 1:>2}/{options.steps}  loss {metrics['loss:sum'] / len(PAIRS):.4f}"
                f"  accuracy {metrics['accuracy:mean']:.0%}  margin {metrics['margin:mean']:+.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
