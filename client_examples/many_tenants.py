"""Many tenants at once: each trains its own adapter on one warm base model.

    python client_examples/many_tenants.py --base-url URL --base-model NAME --tenants 4

Every tenant is a thread with its own ServiceClient, session, key and secret word. They send their
steps at the same time and the server runs them in the same passes; afterwards each adapter is
asked for the secret, and knows its own alone.

With API keys on the server, pass one a tenant: `--api-keys tml-a,tml-b,...`.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tinker

WORDS = ["lantern", "walnut", "harbor", "velvet", "copper", "meadow", "thunder", "pepper"]
QUESTIONS = [
    "What is the secret word?",
    "Tell me the secret word.",
    "Which word is the secret one?",
    "Do you know the secret word?",
]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train several adapters at the same time.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--tenants", type=int, default=4, choices=range(1, len(WORDS) + 1))
    parser.add_argument("--api-keys", type=lambda keys: keys.split(","), default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args()


def encode_prompt(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def make_datum(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    prompt = encode_prompt(tokenizer, question)
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


def train(
    name: str, training_client: tinker.TrainingClient, data: list[tinker.Datum], options: Any
) -> list[float]:
    adam_params = tinker.AdamParams(learning_rate=options.learning_rate, eps=1e-8)
    losses = []
    for step in range(options.steps):
        fwd_bwd_future = training_client.forward_backward(data, "cross_entropy")
        optim_step_future = training_client.optim_step(adam_params)
        losses.append(fwd_bwd_future.result().metrics["loss:sum"])
        optim_step_future.result()
        print(f"{name}  step {step + 1:>2}/{options.steps}  loss {losses[-1]:8.3f}", flush=True)
    return losses


def tenant(index: int, options: argparse.Namespace) -> tuple[list[float], str]:
    """One tenant's whole life; returns its losses and what it answers at the end."""
    word = WORDS[index]
    api_key = options.api_keys[index] if options.api_keys else f"tml-tenant-{index}"
    with tinker.ServiceClient(base_url=options.base_url, api_key=api_key) as service_client:
        training_client = service_client.create_lora_training_client(
            base_model=options.base_model, rank=options.rank, seed=index
        ).result()
        tokenizer: Any = training_client.get_tokenizer()
        data = [make_datum(tokenizer, text, f"The secret word is {word}.") for text in QUESTIONS]
        losses = train(f"tenant {index} ({word})", training_client, data, options)
        sampling_client = training_client.save_weights_and_get_sampling_client().result()
        answer = sampling_client.sample(
            prompt=tinker.ModelInput.from_ints(encode_prompt(tokenizer, QUESTIONS[0])),
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=12, temperature=0.0),
        ).result()
        return losses, tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True)


def main() -> None:
    options = parse_options()
    with ThreadPoolExecutor(options.tenants) as pool:
        results = list(pool.map(lambda index: tenant(index, options), range(options.tenants)))

    confused = 0
    for index, (losses, answer) in enumerate(results):
        own = WORDS[index] in answer
        others = any(word in answer for word in WORDS if word != WORDS[index])
        confused += others or not own
        print(f"tenant {index}  loss {losses[0]:.3f} -> {losses[-1]:.3f}  {answer.strip()!r}")
    if confused:
        sys.exit(f"{confused} of {options.tenants} tenants did not answer with their own word.")
    print("Every tenant knows its own word, and no other.")


if __name__ == "__main__":
    main()
