"""On-policy distillation: the student speaks, the teacher grades every token.

    python client_examples/distillation.py --base-url URL --base-model NAME

The teacher is the base model with a few examples in its prompt; the student is an adapter that
sees the bare question. After training it answers like the teacher without the examples.

Words: the reverse KL of an answer is the sum over its tokens of student minus teacher logprob.
Each token's advantage is minus that difference, so the loss pulls the student to the teacher.
"""

import argparse
import os
import time
from typing import Any

import numpy as np
import tinker

EXAMPLES = [
    ("What is the capital of Italy?", "Rome."),
    ("What do bees make?", "Honey."),
    ("How many legs has a dog?", "Four."),
]
QUESTIONS = [
    "What is the capital of France?",
    "What color is the sky?",
    "What do cows drink?",
    "What is the largest ocean?",
]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distill a prompt into an adapter.")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_args()


def encode_prompt(tokenizer: Any, examples: list[tuple[str, str]], question: str) -> list[int]:
    """The examples as earlier turns, then the question."""
    messages = []
    for asked, answered in examples:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def make_datum(
    prompt: list[int], answer: tinker.SampledSequence, teacher_logprobs: list[float | None]
) -> tinker.Datum:
    """The teacher saw a longer prompt, so only the ends of the two sequences line up."""
    student = np.array(answer.logprobs)
    teacher = np.array(teacher_logprobs[-len(answer.tokens) :], dtype=float)
    tokens = prompt + answer.tokens
    before = np.zeros(len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": tinker.TensorData.from_numpy(np.concatenate([before, student])),
            "advantages": tinker.TensorData.from_numpy(np.concatenate([before, teacher - student])),
        },
    )


def ask(
    student: tinker.SamplingClient, prompts: list[list[int]], options: argparse.Namespace, seed: int
) -> list[tuple[int, tinker.SampledSequence]]:
    """Every answer of the student, with the index of its question."""
    params = tinker.SamplingParams(max_tokens=options.max_tokens, temperature=1.0, seed=seed)
    futures = [
        student.sample(tinker.ModelInput.from_ints(prompt), options.group_size, params)
        for prompt in prompts
    ]
    return [
        (index, answer)
        for index, future in enumerate(futures)
        for answer in future.result().sequences
    ]


def main() -> None:
    options = parse_options()
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server without keys takes any
    with tinker.ServiceClient(base_url=options.base_url) as service_client:
        training_client = service_client.create_lora_training_client(
            base_model=options.base_model, rank=options.rank, seed=0
        ).result()
        teacher = service_client.create_sampling_client(base_model=options.base_model).result()
        tokenizer = training_client.get_tokenizer()
        bare = [encode_prompt(tokenizer, [], question) for question in QUESTIONS]
        shown = [encode_prompt(tokenizer, EXAMPLES, question) for question in QUESTIONS]
        adam_params = tinker.AdamParams(learning_rate=options.learning_rate, eps=1e-8)

        for step in range(options.steps):
            started = time.monotonic()
            student = training_client.save_weights_and_get_sampling_client().result()
            answers = ask(student, bare, options, seed=step)
            scores = [
                teacher.compute_logprobs(tinker.ModelInput.from_ints(shown[index] + answer.tokens))
                for index, answer in answers
            ]
            datums = [
                make_datum(bare[index], answer, score.result())
                for (index, answer), score in zip(answers, scores, strict=True)
            ]
            fwd_bwd_future = training_client.forward_backward(datums, "importance_sampling")
            optim_step_future = training_client.optim_step(adam_params)
            fwd_bwd_future.result()
            optim_step_future.result()

            advantages = [datum.loss_fn_inputs["advantages"].to_numpy().sum() for datum in datums]
            print(f"step {step + 1:>2}/{options.steps}  KL {-np.mean(advantages):7.3f}", end="  ")
            example = tokenizer.decode(answers[0][1].tokens)
            print(f"{time.monotonic() - started:.1f} s  {example!r}", flush=True)


if __name__ == "__main__":
    main()
