"""Reinforcement learning: sample, reward, step, and sample from the new weights.

    python client_examples/rl.py --base-url URL --base-model NAME

The reward is the share of short words in an answer. Nobody shows the model how to speak plainly;
it finds out from the rewards alone.

Words: the samples of one prompt are a group; an answer's advantage is its reward minus the mean
of its group. The loss needs the logprobs the tokens were sampled at, as sampling returned them.
"""

import argparse
import os
import time
from typing import Any

import numpy as np
import tinker

PROMPTS = [
    "Explain what a bank does.",
    "Describe how the internet works.",
    "What is photosynthesis?",
    "What does a government do?",
]
SHORT = 4


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a model to use short words, by reward.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_args()


def reward_of(answer: str) -> float:
    """The share of words of at most four letters; nothing for an answer without words."""
    words = [word.strip(".,:;!?'\"()") for word in answer.split()]
    return sum(0 < len(word) <= SHORT for word in words) / max(len(words), 1)


def encode_prompt(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def make_datum(
    prompt: list[int], sequence: tinker.SampledSequence, advantage: float
) -> tinker.Datum:
    """One sampled answer: the advantage lies on its tokens, and nothing on the prompt's."""
    assert sequence.logprobs is not None
    tokens = prompt + sequence.tokens
    before = [0.0] * (len(prompt) - 1)
    logprobs = np.array(before + sequence.logprobs)
    advantages = np.array(before + [advantage] * len(sequence.tokens))
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": tinker.TensorData.from_numpy(logprobs),
            "advantages": tinker.TensorData.from_numpy(advantages),
        },
    )


def rollout(
    sampling_client: tinker.SamplingClient, tokenizer: Any, options: argparse.Namespace, seed: int
) -> tuple[list[tinker.Datum], float, str]:
    """Sample a group for every prompt; returns the datums, the mean reward and one answer."""
    params = tinker.SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=seed)
    prompts = [encode_prompt(tokenizer, question) for question in PROMPTS]
    futures = [
        sampling_client.sample(tinker.ModelInput.from_ints(prompt), options.group_size, params)
        for prompt in prompts
    ]
    datums, rewards, answer = [], [], ""
    for prompt, future in zip(prompts, futures, strict=True):
        group = future.result().sequences
        answers = [tokenizer.decode(sequence.tokens) for sequence in group]
        group_rewards = [reward_of(answer) for answer in answers]
        baseline = float(np.mean(group_rewards))
        datums += [
            make_datum(prompt, sequence, reward - baseline)
            for sequence, reward in zip(group, group_rewards, strict=True)
        ]
        rewards.append(baseline)
        answer = answers[int(np.argmax(group_rewards))]
    return datums, float(np.mean(rewards)), answer


def main() -> None:
    options = parse_options()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server without keys takes any
    with tinker.ServiceClient(base_url=options.base_url) as service_client:
        training_client = service_client.create_lora_training_client(
            base_model=options.base_model, rank=options.rank, seed=0
        ).result()
        tokenizer = training_client.get_tokenizer()
        adam_params = tinker.AdamParams(learning_rate=options.learning_rate, eps=1e-8)
        for step in range(options.steps):
            started = time.monotonic()
            sampling_client = training_client.save_weights_and_get_sampling_client().result()
            datums, reward, answer = rollout(sampling_client, tokenizer, options, seed=step)
            fwd_bwd_future = training_client.forward_backward(datums, "importance_sampling")
            optim_step_future = training_client.optim_step(adam_params)
            fwd_bwd_future.result()
            optim_step_future.result()
            print(f"step {step + 1:>2}/{options.steps}  reward {reward:.3f}", end="  ")
            print(f"{time.monotonic() - started:.1f} s  {' '.join(answer.split())}", flush=True)


if __name__ == "__main__":
    main()
