"""`stable_reinforce` through the real SDK: what is recorded at sampling, the spans that name it,
and the refusals. The data are built as the cookbook's `rl_loop.py` and `rl/data_processing.py`
(0.6.1) build them, and by the cookbook itself where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    MODEL,
    PROTOBUF,
    Raw,
    adam,
    assert_same,
    fingerprint,
    generate,
    leaves_untouched,
    new_run,
    output_logprobs,
    pass_body,
    refused,
    rl,
    sampler_of,
    step,
    text,
    wait,
)
from tests.e2e.conftest import SETTINGS
from tests.running_server import RunningServer

PROMPT = text(3, 9)
LOSS: Any = "stable_reinforce"
SUBSTITUTE = "stable_reinforce_substitute:mean"
Prompt, Sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan


@pytest.fixture(scope="module")
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return new_run(service)


@pytest.fixture(scope="module")
def sampler(run: tinker.TrainingClient) -> tinker.SamplingClient:
    return sampler_of(run, record_stability_info=True)


@pytest.fixture(scope="module")
def sequence(sampler: tinker.SamplingClient) -> types.SampledSequence:
    return generate(sampler, PROMPT, 6, stop=[], seed=1)


def spans(sequence: types.SampledSequence, prompt_length: int) -> tuple[list[Any], list[Any]]:
    """As `rl_loop.py` names where the tokens of the input, and of the targets, came from."""
    id_, sampled = sequence.sequence_id, len(sequence.tokens)
    return (
        [
            Prompt(sequence_id=id_, length=prompt_length),
            Sampled(sequence_id=id_, length=sampled - 1),
        ],
        [
            Prompt(sequence_id=id_, offset=1, length=prompt_length - 1),
            Sampled(sequence_id=id_, length=sampled),
        ],
    )


def datum(
    sequence: types.SampledSequence, advantage: float = 1.0, prompt: list[int] = PROMPT
) -> types.Datum:
    """As `rl_loop.py` makes it: the targets within the prompt are 0."""
    before = len(prompt) - 1
    made = rl(
        [*prompt, *sequence.tokens],
        [0.0] * before + list(sequence.logprobs or []),
        [0.0] * before + [advantage] * len(sequence.tokens),
    )
    targets = types.TensorData(
        data=[0] * before + list(sequence.tokens), dtype="int64", shape=[made.model_input.length]
    )
    made = replace(made, loss_fn_inputs={**made.loss_fn_inputs, "target_tokens": targets})
    return made.with_provenance(*spans(sequence, len(prompt)))


def changed(made: types.Datum, **inputs: Any) -> types.Datum:
    """The same datum with other loss inputs; None leaves one out."""
    every = {**made.loss_fn_inputs, **inputs}
    return replace(made, loss_fn_inputs={n: v for n, v in every.items() if v is not None})


def evaluated(run: tinker.TrainingClient, *data: types.Datum, **config: float | str) -> Any:
    return wait(run.forward(list(data), LOSS, config or None))


def test_a_sampled_sequence_can_be_trained_on_by_its_name(
    run: tinker.TrainingClient, sequence: types.SampledSequence
) -> None:
    output = evaluated(run, datum(sequence))
    lp = output_logprobs(output)[-len(sequence.tokens) :]
    assert_same(lp, np.array(sequence.logprobs))
    assert output.metrics["loss:sum"] == pytest.approx(-lp.sum(), rel=1e-3)
    assert output.metrics["num_tokens:sum"] == len(sequence.tokens)
    assert output.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-3)
    assert output.metrics[SUBSTITUTE] == 1.0


def test_the_metric_of_the_substitute_survives_the_clients_chunks(
    run: tinker.TrainingClient, sequence: types.SampledSequence
) -> None:
    assert evaluated(run, *[datum(sequence)] * 40).metrics[SUBSTITUTE] == 1.0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_step_moves_the_sampled_tokens_the_way_of_their_advantage(
    service: tinker.ServiceClient, advantage: float
) -> None:
    learner = new_run(service, seed=4)
    sampled = generate(sampler_of(learner, record_stability_info=True), PROMPT, 8, stop=[])
    before = output_logprobs(step(learner, [datum(sampled, advantage)], loss=LOSS)).sum()
    after = output_logprobs(evaluated(learner, datum(sampled, advantage))).sum()
    assert (after - before) * advantage > 0


def test_the_logprobs_are_those_recorded_whatever_is_sent(
    run: tinker.TrainingClient, sequence: types.SampledSequence
) -> None:
    honest = datum(sequence)
    wanted = evaluated(run, honest).metrics
    length = honest.model_input.length
    assert evaluated(run, changed(honest, logprobs=None)).metrics == wanted
    assert evaluated(run, changed(honest, logprobs=[-9.0] * length)).metrics == wanted


def test_several_turns_are_one_datum(
    run: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    """O1 A1 O2 A2, as `trajectory_to_data` makes it: what a turn adds to the conversation is the
    end of that turn's prompt."""
    first = generate(sampler, PROMPT, 4, stop=[])
    heard = [*PROMPT, *first.tokens, *text(8, 5)]
    second = generate(sampler, heard, 3, stop=[])
    everything = [
        Prompt(sequence_id=first.sequence_id, length=len(PROMPT)),
        Sampled(sequence_id=first.sequence_id, length=4),
        Prompt(sequence_id=second.sequence_id, offset=len(PROMPT) + 4, length=5),
        Sampled(sequence_id=second.sequence_id, length=3),
    ]
    head, last = everything[0], everything[-1]
    advantages = [0.0] * (len(PROMPT) - 1) + [1.0] * 4 + [0.0] * 5 + [1.0] * 3
    made = rl([*heard, *second.tokens], [0.0] * len(advantages), advantages).with_provenance(
        [*everything[:-1], replace(last, length=2)],
        [replace(head, offset=1, length=len(PROMPT) - 1), *everything[1:]],
    )
    metrics = evaluated(run, made).metrics
    assert metrics["num_tokens:sum"] == 7
    assert metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-3)


def test_a_prompt_and_an_answer_of_one_token(
    run: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    """Spans of length 0 are legal: the loop makes them here."""
    one = generate(sampler, [65], 1, stop=[])
    assert evaluated(run, datum(one, prompt=[65])).metrics["num_tokens:sum"] == 1


def test_the_cookbooks_own_data_are_accepted(
    run: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    processing = pytest.importorskip("tinker_cookbook.rl.data_processing")
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, Transition

    sampled = generate(sampler, PROMPT, 5, stop=[])
    action = TokensWithLogprobs(
        tokens=list(sampled.tokens),
        maybe_logprobs=list(sampled.logprobs or []),
        sequence_id=sampled.sequence_id,
    )
    turn = Transition(
        ob=types.ModelInput.from_ints(PROMPT), ac=action, reward=1.0, episode_done=True
    )
    trajectory = Trajectory(transitions=[turn], final_ob=types.ModelInput.empty())
    [made] = processing.trajectory_to_data(trajectory, 0.5)
    assert evaluated(run, changed(made, mask=None)).metrics["num_tokens:sum"] == 5


def test_other_losses_take_spans_and_do_not_look_at_them(
    run: tinker.TrainingClient, sequence: types.SampledSequence
) -> None:
    """The cookbook attaches them always, also where nothing was recorded."""
    made = datum(sequence)
    unknown = made.with_provenance(*spans(replace(sequence, sequence_id="never:0"), len(PROMPT)))
    for loss in ("importance_sampling", "ppo", "cispo"):
        plain = replace(made, model_input_spans=None, loss_fn_input_spans=None)
        results = [wait(run.forward([one], loss)).metrics for one in (plain, made, unknown)]
        assert results[0] == results[1] == results[2]


def bad_spans(sequence: types.SampledSequence, **change: Any) -> types.Datum:
    """A datum whose last span of the targets is another one of the same length."""
    made = datum(sequence)
    inputs, rows = spans(sequence, len(PROMPT))
    return made.with_provenance(inputs, [*rows[:-1], replace(rows[-1], **change)])


def moved(sequence: types.SampledSequence) -> types.Datum:
    made = datum(sequence)
    inputs, rows = spans(sequence, len(PROMPT))
    return made.with_provenance([replace(inputs[0], offset=1), inputs[1]], rows)


def without_spans(sequence: types.SampledSequence) -> types.Datum:
    return replace(datum(sequence), model_input_spans=None, loss_fn_input_spans=None)


def forged(sequence: types.SampledSequence) -> types.Datum:
    made = datum(sequence)
    targets = list(made.loss_fn_inputs["target_tokens"].data)
    targets[-2] = (targets[-2] + 1) % 200
    return changed(made, target_tokens=targets)


def advantage_on_the_prompt(sequence: types.SampledSequence) -> types.Datum:
    made = datum(sequence)
    advantages = list(made.loss_fn_inputs["advantages"].data)
    advantages[2] = 0.5
    return changed(made, advantages=advantages)


def uncovered(sequence: types.SampledSequence) -> types.Datum:
    inputs, rows = spans(sequence, len(PROMPT))
    return replace(datum(sequence), model_input_spans=inputs[:1], loss_fn_input_spans=rows)


REFUSED = {
    "no spans": (without_spans, ("data[1]", "provenance", "with_provenance")),
    "an unknown sequence": (
        lambda s: bad_spans(s, sequence_id="nobody:0"),
        ("data[1].loss_fn_input_spans[1]", "nobody:0", "24 hours"),
    ),
    "past what was sampled": (
        lambda s: bad_spans(s, offset=1),
        ("data[1].loss_fn_input_spans[1]", "position 7", "6 tokens"),
    ),
    "past the prompt": (moved, ("data[1].model_input_spans[0]", "position 10", "9 tokens")),
    "other tokens": (forged, ("data[1].loss_fn_input_spans[1]", "token 4")),
    "an advantage on the prompt": (
        advantage_on_the_prompt,
        ("data[1]", "advantages", "0.5", "position 2"),
    ),
    "positions without a span": (uncovered, ("data[1].model_input_spans", "9", "14")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_not_sampled_is_refused(
    run: tinker.TrainingClient, sequence: types.SampledSequence, name: str
) -> None:
    make, words = REFUSED[name]
    with refused(*words):
        wait(run.forward_backward([datum(sequence), make(sequence)], LOSS))
    assert evaluated(run, datum(sequence)).metrics["num_tokens:sum"] == 6


def test_a_refusal_leaves_the_gradient_alone(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-me")
    learner = new_run(tinker.ServiceClient(base_url=own_server.url, api_key="tml-me"))
    sampled = generate(sampler_of(learner, record_stability_info=True), PROMPT, 6, stop=[])
    with leaves_untouched(learner), refused("advantages"):
        wait(learner.forward_backward([datum(sampled), advantage_on_the_prompt(sampled)], LOSS))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"beta": 1.0}, ("beta", "kl_coeff")),
        ({"kl_coeff": "much"}, ("kl_coeff", "much", "number")),
        ({"mode": "text"}, ("mode", "kl_coeff")),
        ({"kl_coeff": -1.0}, ("kl_coeff", "-1", "at least 0")),
    ],
)
def test_a_setting_it_does_not_have_is_refused(
    run: tinker.TrainingClient,
    sequence: types.SampledSequence,
    config: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    with refused(*words):
        evaluated(run, datum(sequence), **config)


def test_kl_coeff_weighs_the_distance_to_the_sampling_policy(
    service: tinker.ServiceClient,
) -> None:
    learner = new_run(service, seed=6)
    sampled = generate(sampler_of(learner, record_stability_info=True), PROMPT, 6, stop=[])
    step(learner, [datum(sampled)], learning_rate=3e-2, loss=LOSS)
    free, held = (evaluated(learner, datum(sampled), kl_coeff=k) for k in (0.0, 2.0))
    moved_by = output_logprobs(free)[-6:] - np.array(sampled.logprobs)
    difference = held.metrics["loss:sum"] - free.metrics["loss:sum"]
    assert difference == pytest.approx((moved_by**2).sum(), rel=1e-3)


def test_a_sample_that_was_not_recorded_is_not_known(run: tinker.TrainingClient) -> None:
    sampled = generate(sampler_of(run), PROMPT, 4, stop=[])
    with refused("not known", "record_stability_info"):
        evaluated(run, datum(sampled))


def test_a_sequence_of_another_session_or_tenant_is_refused(
    server: RunningServer, sequence: types.SampledSequence
) -> None:
    def evaluate_as(tenant: str) -> None:
        client = tinker.ServiceClient(base_url=server.url, api_key=server.keys[tenant])
        evaluated(new_run(client), datum(sequence))

    with refused("one session only"):
        evaluate_as("alice")
    with refused("not known"):
        evaluate_as("bob")


def test_a_body_without_spans_says_what_it_lacks(raw: Raw) -> None:
    made = rl(PROMPT, [0.0] * 8, [1.0] * 8)
    request = raw.promise(
        "forward_backward", pass_body(raw.run(), 1, [made], LOSS), headers=PROTOBUF
    )
    answer = raw.outcome(request)
    assert answer.status_code == 200
    assert answer.json()["category"] == "user"
    assert "data[0]: has no provenance" in answer.json()["error"]


def test_records_and_what_was_trained_on_them_outlast_a_crash(own_server: RunningServer) -> None:
    client = tinker.ServiceClient(base_url=own_server.url, api_key="tml-me")
    learner, twin = new_run(client), new_run(client)
    sampled = generate(sampler_of(learner, record_stability_info=True), PROMPT, 6, stop=[])
    step(learner, [changed(datum(sampled), logprobs=None)], loss=LOSS)
    step(learner, [datum(sampled, -1.0)], loss=LOSS)
    step(twin, [datum(sampled)], loss=LOSS)
    own_server.kill()
    own_server.start()
    step(twin, [datum(sampled, -1.0)], loss=LOSS)
    assert_same(fingerprint(learner), fingerprint(twin), 1e-5)


@pytest.fixture
def refusing(tmp_path: Path, model_path: Path) -> Iterator[RunningServer]:
    settings = {**SETTINGS, "HEARTH_STABLE_REINFORCE": "refuse"}
    running = RunningServer(tmp_path / "data", {MODEL: model_path}, settings)
    running.start()
    yield running
    running.kill()


def test_the_loss_can_be_refused_altogether(refusing: RunningServer) -> None:
    learner = new_run(tinker.ServiceClient(base_url=refusing.url, api_key="tml-me"))
    sampled = generate(sampler_of(learner, record_stability_info=True), PROMPT, 4, stop=[])
    with refused("stable_reinforce", "not published"):
        evaluated(learner, datum(sampled))
    wait(learner.forward_backward([datum(sampled)], "importance_sampling"))
    wait(learner.optim_step(adam()))
