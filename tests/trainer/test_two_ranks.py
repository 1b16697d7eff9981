"""Several ranks are one: the same weights whoever has which packs, and errors of one are all's."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import ranks_together
from tests.trainer.ranks_together import MODES, STEPS, WAIT_S
from tests.trainer.trainees import ADAPTER, PLAIN, TIED, pack, phase, settings, step_of
from trainer.ranks.collectives import PeerFailed, Peers, PeersLost
from trainer.ranks.files import read_tensors
from trainer.ranks.trainee import Trainee
from trainer.ranks.types import ModelSettings
from trainer.ranks.weights import full_weights

modes = pytest.mark.parametrize("mode", MODES)


class Ranks:
    """What the ranks have left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(3)]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return read_tensors(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Three processes, started once for all tests here."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=ranks_together.work, args=(rank, str(folder))) for rank in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(2 * WAIT_S)
    stuck = [child.pid for child in children if child.is_alive()]
    for child in children:
        child.kill()
    assert not stuck
    found = Ranks(folder)
    for seen in found.seen:
        assert "failed" not in seen, seen["failed"]
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Single:
    """One rank that has all packs, after each of its steps."""

    def __init__(self, model: ModelSettings, steps: int, **change: Any) -> None:
        self.trainee = Trainee(settings(model=model, **change), Peers.alone())
        self.trainee.begin_phase(phase())
        self.first = self.weights()
        self.metrics: list[dict[str, float]] = []
        self.after: list[dict[str, torch.Tensor]] = []
        for seed in range(steps):
            self.metrics.append(self.trainee.train_step(step_of(seed), global_tokens=10))
            self.after.append(self.weights())

    def weights(self) -> dict[str, torch.Tensor]:
        model = self.trainee._model
        found = full_weights(model, self.trainee.settings.model, Peers.alone())
        return {name: weight.clone() for name, weight in found.items()}


@pytest.fixture(scope="module")
def single() -> Single:
    return Single(ModelSettings(config=TIED), STEPS + 2)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert set(one) == set(other)
    return all(torch.equal(one[name], other[name]) for name in one)


# -- ranks are one ---------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("world", ["three", "two"])
def test_ranks_with_7_3_and_0_tokens_are_one_rank_with_10(
    ranks: Ranks, single: Single, world: str, mode: str
) -> None:
    """EX-6.13: parameters after three steps of Adam agree, and so does each gradient's norm, which
    Adam itself would hide."""
    assert distance(ranks.weights(f"{world}-{mode}"), single.after[STEPS - 1]) < 1e-5
    assert distance(single.first, single.after[STEPS - 1]) > 1e-3
    count = 3 if world == "three" else 2
    for rank in range(count):
        for found, expected in zip(
            ranks.seen[rank][f"{world}-{mode}"], single.metrics[:STEPS], strict=True
        ):
            own = ("step_consumed_tokens", "efficient_attn_ratio")
            shared = {name: value for name, value in expected.items() if name not in own}
            assert {name: found[name] for name in shared} == pytest.approx(shared, rel=1e-3)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    consumed = [ranks.seen[r][f"{world}-{mode}"][0]["step_consumed_tokens"] for r in range(count)]
    assert consumed == [12, 8, 0][:count]


@modes
def test_a_mean_of_ranks_is_not_one_rank(ranks: Ranks, single: Single, mode: str) -> None:
    """The mutant: each rank divides by its own tokens, and ranks are averaged."""
    assert distance(ranks.weights(f"mutant-{mode}"), single.after[STEPS - 1]) > 1e-4


@modes
def test_untied_weights_and_checkpointed_activations_are_one_rank_too(
    ranks: Ranks, mode: str
) -> None:
    alone = Single(ModelSettings(config=PLAIN), 1)
    assert distance(ranks.weights(f"plain-{mode}"), alone.after[0]) < 1e-5
    assert distance(alone.first, alone.after[0]) > 1e-4


@modes
def test_an_adapter_over_ranks_is_that_of_one_and_merged_where_it_leaves(
    ranks: Ranks, mode: str
) -> None:
    alone = Single(ModelSettings(config=TIED, adapter=ADAPTER), 2, reference="adapter_off")
    found = ranks.weights(f"adapter-{mode}")
    assert distance(found, alone.after[1]) < 1e-5
    base = alone.first  # an adapter begins as nothing
    changed = {name for name in found if not torch.allclose(found[name], base[name], atol=1e-6)}
    assert changed
    assert all("q_proj" in name or "up_proj" in name for name in changed)
    expected = alone.trainee.reference_logprobs(pack([(3, 5)]))[0].tolist()
    assert ranks.seen[0][f"off-{mode}"] == pytest.approx(expected, abs=1e-5)


@modes
def test_ranks_see_the_same(ranks: Ranks, single: Single, mode: str) -> None:
    some = pack([(3, 5)])
    frozen = Trainee(settings(), Peers.alone()).logprobs(some)[0].tolist()
    now = single.trainee.logprobs(some)[0].tolist()
    for rank in (0, 1):
        assert ranks.seen[rank][f"reference_logprobs-{mode}"] == pytest.approx(frozen, abs=1e-5)
        assert ranks.seen[rank][f"logprobs-{mode}"] == pytest.approx(now, abs=1e-3)
    assert ranks.seen[0][f"logprobs-{mode}"] == ranks.seen[1][f"logprobs-{mode}"]


def test_every_rank_begins_with_the_weights_of_rank_0(ranks: Ranks) -> None:
    expected = Trainee(settings(seed=0), Peers.alone()).logprobs(pack([(3, 5)]))[0].tolist()
    assert ranks.seen[0]["starts"] == ranks.seen[1]["starts"] == pytest.approx(expected)


# -- states ----------------------------------------------------------------------------------


@modes
def test_ranks_that_were_saved_and_loaded_are_those_that_were_not(ranks: Ranks, mode: str) -> None:
    assert equal(ranks.weights(f"again-{mode}"), ranks.weights(f"more-{mode}"))
    for rank in (0, 1):
        assert ranks.seen[rank][f"again-{mode}"] == ranks.seen[rank][f"more-{mode}"]


@modes
def test_one_rank_goes_on_from_what_two_have_saved(ranks: Ranks, single: Single, mode: str) -> None:
    trainee = Trainee(settings(seed=9), Peers.alone())
    trainee.begin_phase(phase())
    trainee.load(ranks.folder / f"state-{mode}")
    assert trainee.optimizer_steps == STEPS
    for seed in (STEPS, STEPS + 1):
        trainee.train_step(step_of(seed), global_tokens=10)
    found = full_weights(trainee._model, trainee.settings.model, Peers.alone())
    assert distance(found, single.after[STEPS + 1]) < 2e-5


@modes
def test_what_ranks_export_is_loaded_by_transformers(ranks: Ranks, mode: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(ranks.folder / f"export-{mode}")
    assert equal(dict(loaded.state_dict()), ranks.weights(f"again-{mode}"))
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


# -- errors ----------------------------------------------------------------------------------


def test_an_error_on_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    """NeMo#3917: the rank that failed raises its own error, the others say whose it is."""
    errors = [seen["errors"] for seen in ranks.seen[:2]]
    assert errors[0]["one"] == (
        "PeerFailed: rank 1 failed, and the others stopped with it: KeyError: 'row 7 wént'"
    )
    assert errors[1]["one"] == "KeyError: 'row 7 wént'"
    assert [said["both"] for said in errors] == ["ValueError: mine is 0", "ValueError: mine is 1"]
    for said in errors:
        rest = {name: said[name] for name in ("none", "sum", "max", "min", "gather")}
        assert rest == {
            "none": "nothing", "sum": "[3.0]", "max": "[1]", "min": "[0]", "gather": "[0, 5]",
        }  # fmt: skip


@modes
def test_what_rank_0_cannot_write_or_read_fails_on_all_and_they_go_on(
    ranks: Ranks, single: Single, mode: str
) -> None:
    first, second = ranks.seen[:2]
    assert first[f"no client-{mode}"].startswith("ValueError: rank 0 writes the weights")
    assert first[f"no state-{mode}"].startswith("StateError: ")
    for name in (f"no client-{mode}", f"no state-{mode}"):
        assert second[name] == (
            f"PeerFailed: rank 0 failed, and the others stopped with it: {first[name]}"
        )
    for seen in (first, second):
        found = seen[f"usable-{mode}"][0]
        assert found["grad_norm"] == pytest.approx(single.metrics[0]["grad_norm"], rel=1e-4)


def test_a_rank_that_leaves_is_missed_at_once(ranks: Ranks) -> None:
    assert ranks.seen[0]["errors"]["left"].startswith("PeersLost: rank 0 of 2 waited")
    assert ranks.seen[0]["waited"] < WAIT_S / 2


def test_ranks_that_do_not_come_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(PeersLost, match="rank 1 did not meet the other 1 at file://"):
        Peers.join(1, 2, f"file://{tmp_path}/meet", timeout_s=0.5)


async def test_one_rank_agrees_with_itself() -> None:
    alone = Peers.alone()
    alone.agree()
    with pytest.raises(KeyError, match="mine"):
        alone.agree(KeyError("mine"))
    assert alone.all_reduce_sum(torch.tensor([2.0])).tolist() == [2.0]
    alone.close()


def test_peers_errors_survive_being_copied_between_processes() -> None:
    import copy

    error = copy.copy(PeerFailed(3, "KeyError: 'u'"))
    assert (error.rank, error.error) == (3, "KeyError: 'u'")
