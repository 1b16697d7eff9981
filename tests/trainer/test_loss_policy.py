"""Policy losses, a token a number, with the values of the specification and of their papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer.loss import LossConfig, policy_metrics
from trainer.loss.policy import POLICY_LOSSES, PolicyInputs

PPO = LossConfig(clip_low=0.2, clip_high=0.2)


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


def inputs(
    ratios: list[float],
    advantages: list[float],
    *,
    logprobs: list[float] | None = None,
    lengths: list[int] | None = None,
    mask: list[int] | None = None,
) -> PolicyInputs:
    """Tokens of these ratios; the log-probs are leaves, so that gradients can be asked for."""
    now = torch.tensor([logprobs or [-1.0] * len(ratios)], requires_grad=True)
    old = now.detach() - torch.tensor([ratios]).log()
    return PolicyInputs(
        logprobs=now,
        old_logprobs=old,
        advantages=torch.tensor([advantages]),
        mask=torch.tensor([mask or [1] * len(ratios)]).bool(),
        cu_seq_lens=torch.tensor([0, *lengths] if lengths else [0, len(ratios)]).cumsum(0).int(),
    )


def losses(config: LossConfig, given: PolicyInputs) -> tuple[list[float], list[float]]:
    """The loss of each token, and the gradient of each log-prob."""
    assert isinstance(config.policy, str)
    loss = POLICY_LOSSES[config.policy](given, config)
    loss.sum().backward()
    grad = given.logprobs.grad
    return loss[0].tolist(), [] if grad is None else grad[0].tolist()


RATIOS, SIGNS = [1.1, 1.5, 0.5, 4.0], [1.0, 1.0, -1.0, -1.0]


def test_ex_6_9_ppo() -> None:
    loss, grad = losses(PPO, inputs(RATIOS, SIGNS))
    assert loss == near([-1.1, -1.2, 0.8, 3.0])
    assert sum(loss) / 4 == near(0.375)
    # What is clipped has no gradient: a good token that rose enough, a bad one that fell enough.
    assert grad == near([-1.1, 0.0, 0.0, 0.0])


def test_ex_6_9_decoupled_clip() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    loss, grad = losses(config, inputs(RATIOS, SIGNS))
    assert loss == near([-1.1, -1.28, 0.8, 4.0])
    assert sum(loss) / 4 == near(0.605)
    assert grad == near([-1.1, 0.0, 0.0, 4.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "single", "dual"),
    [(4.0, -1.0, 4.0, 3.0), (4.0, -0.5, 2.0, 1.5), (2.5, -2.0, 5.0, 5.0), (4.0, 1.0, -1.2, -1.2)],
)
def test_dual_clip_bounds_bad_tokens_alone(
    ratio: float, advantage: float, single: float, dual: float
) -> None:
    without = LossConfig(clip_low=0.2, clip_high=0.2, dual_clip=None)
    assert losses(without, inputs([ratio], [advantage]))[0] == near([single])
    assert losses(PPO, inputs([ratio], [advantage]))[0] == near([dual])


def test_ex_6_9_metrics() -> None:
    metrics = policy_metrics(inputs(RATIOS, SIGNS), PPO)
    assert metrics == near(
        {
            "ratio_abs_dev_mean": 1.025,
            "kl1": -0.298481,
            "kl3": 0.476519,
            "clip_frac_low": 0.25,
            "clip_frac_high": 0.5,
            "ratio_max": 4.0,
            "ratio_min": 0.5,
        }
    )


def test_metrics_of_no_token_are_zero() -> None:
    metrics = policy_metrics(inputs(RATIOS, SIGNS, mask=[0, 0, 0, 0]), PPO)
    assert set(metrics.values()) == {0.0}


def test_metrics_look_at_trained_tokens_alone() -> None:
    metrics = policy_metrics(inputs([1.1, 50.0], [1.0, 1.0], mask=[1, 0]), PPO)
    assert metrics["ratio_max"] == near(1.1)
    assert metrics["clip_frac_high"] == 0


def test_gspo_has_one_ratio_a_sequence() -> None:
    """Means of log-ratios 0.05, 0.4 and -0.5, and a gradient for every token."""
    config = LossConfig(policy="gspo", clip_low=0.2, clip_high=0.2)
    logs = [0.2, -0.1, 0.4, -0.5]
    given = inputs([math.exp(v) for v in logs], [1.0, 1.0, 1.0, -1.0], lengths=[2, 1, 1])
    loss, grad = losses(config, given)
    assert loss == near([-1.0512711, -1.0512711, -1.2, 0.8])
    assert grad == near([-1.0512711, -1.0512711, 0.0, 0.0])


def test_gspo_means_over_trained_tokens() -> None:
    config = LossConfig(policy="gspo", clip_low=0.9, clip_high=9.0)
    given = inputs([math.exp(0.3), math.exp(5.0), math.exp(0.1)], [1.0] * 3, mask=[1, 0, 1])
    assert losses(config, given)[0][0] == near(-math.exp(0.2))


def test_gspo_of_nothing_is_finite() -> None:
    config = LossConfig(policy="gspo", clip_low=0.2, clip_high=0.2)
    assert losses(config, inputs([2.0], [0.0], mask=[0]))[0] == [0.0]


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    given = {"logprobs": [-1.0, -2.0, -0.5, -0.25]}
    upper = LossConfig(policy="cispo", clip_high=0.2)
    loss, grad = losses(upper, inputs(RATIOS, SIGNS, **given))
    assert loss == near([1.1, 2.4, -0.25, -0.3])
    assert grad == near([-1.1, -1.2, 0.5, 1.2])
    both = LossConfig(policy="cispo", clip_low=0.2, clip_high=0.2)
    assert losses(both, inputs(RATIOS, SIGNS, **given))[0] == near([1.1, 2.4, -0.4, -0.3])


def test_policy_gradient_is_reinforce() -> None:
    given = inputs(RATIOS, [1.0, 2.0, -1.0, 0.0], logprobs=[-1.0, -2.0, -0.5, -0.25])
    loss, grad = losses(LossConfig(policy="policy_gradient"), given)
    assert loss == near([1.0, 4.0, -0.5, 0.0])
    assert grad == near([-1.0, -2.0, 1.0, 0.0])


@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo", "policy_gradient"])
def test_at_a_ratio_of_one_all_have_the_gradient_of_reinforce(policy: str) -> None:
    """Before the first optimizer step nothing is clipped."""
    config = LossConfig(policy=policy, clip_low=0.2, clip_high=0.2)
    _, grad = losses(config, inputs([1.0] * 3, [1.0, -2.0, 0.5], lengths=[2, 1]))
    assert grad == near([-1.0, 2.0, -0.5])


def test_a_log_ratio_is_within_twenty() -> None:
    far = PolicyInputs(
        logprobs=torch.tensor([[0.0, -90.0]]),
        old_logprobs=torch.tensor([[-90.0, 0.0]]),
        advantages=torch.tensor([[-1.0, 1.0]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
        cu_seq_lens=torch.tensor([0, 2], dtype=torch.int32),
    )
    assert far.log_ratio.tolist() == [[20.0, -20.0]]
    assert bool(torch.isfinite(POLICY_LOSSES["ppo"](far, PPO)).all())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "nope"}, "'nope' is none of ppo, gspo, cispo, policy_gradient"),
        ({"clip_high": 0.2}, "ppo needs clip_low"),
        ({"clip_low": 0.2}, "ppo needs clip_high"),
        ({"policy": "cispo"}, "cispo needs clip_high"),
        ({"policy": "gspo", "clip_high": 0.2}, "gspo needs clip_low"),
        ({"clip_low": 0.2, "clip_high": -1.0}, "clip_high is a number from 0 on"),
        ({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.0}, "dual_clip is above 1"),
        ({"policy": "policy_gradient", "kl": "k9"}, "kl is one of k1"),
        ({"policy": "policy_gradient", "old_logprobs": "guess"}, "'recompute' or 'rollout'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossConfig(**settings)
