import dataclasses
from typing import Any

import numpy as np
import pytest

from tools.demo_model.architecture import DemoConfig
from tools.demo_model.encode import Answer, Encoded
from tools.demo_model.rows import Packer, collate
from tools.demo_model.shapes import checkpoint_shapes

torch = pytest.importorskip("torch", reason="only the training recipe needs torch")

SMALL = DemoConfig(
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    hc_count=2,
    hc_lowrank=8,
    heads_per_ngram=1,
    ngram_vocab_size_base=64,
    indexer_head_dim=16,
    indexer_budget=32,
)


def make_network(config: DemoConfig = SMALL, short: int = 0) -> Any:
    from tools.demo_model.network import Network, make_parameters

    parameters = make_parameters(config, 0, "cpu")
    return Network(config, parameters, short)


def run(network: Any, ids: list[int], positions: list[int], *, dense: bool = True) -> Any:
    with torch.no_grad():
        found = network.streams(
            network.parameters,
            torch.tensor([ids]),
            torch.tensor([positions]),
            torch.tensor(dense),
        )
    return found["x"][0]


def test_parameters_are_those_of_the_checkpoint() -> None:
    parameters = make_network().parameters
    shapes = {name: tuple(p.shape) for name, p in parameters.items() if name != "option_head"}
    assert shapes == checkpoint_shapes(SMALL)


def test_inverse_and_its_gradient_are_exact() -> None:
    from tools.demo_model.gdn import unit_lower_inverse

    lower = torch.randn(2, 64, 64, dtype=torch.double).tril(-1) * 0.3
    lower.requires_grad_()
    eye = torch.eye(64, dtype=torch.double)
    probe = torch.randn(2, 64, 64, dtype=torch.double)
    ours, direct = unit_lower_inverse(lower), torch.linalg.inv(eye + lower)
    torch.testing.assert_close(ours, direct)
    (ours_gradient,) = torch.autograd.grad((ours * probe).sum(), lower)
    (gradient,) = torch.autograd.grad((direct * probe).sum(), lower)
    torch.testing.assert_close(ours_gradient.tril(-1), gradient.tril(-1))


def test_inverse_survives_equal_keys() -> None:
    from tools.demo_model.gdn import unit_lower_inverse

    lower = torch.ones(1, 64, 64).tril(-1)
    product = unit_lower_inverse(lower) @ (torch.eye(64) + lower)
    torch.testing.assert_close(product[0], torch.eye(64), atol=1e-5, rtol=0)


def test_chunked_delta_rule_equals_the_plain_one() -> None:
    from tools.demo_model.gdn import chunk_delta_rule, step_delta_rule

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 192, 2, 16) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta, decay = torch.rand(2, 192, 2), -torch.rand(2, 192, 2)
    decay[:, 100] = -20.0
    ours = chunk_delta_rule(q, k, v, beta, decay)
    torch.testing.assert_close(ours, step_delta_rule(q, k, v, beta, decay), atol=2e-5, rtol=1e-4)


def test_packed_documents_do_not_see_each_other() -> None:
    network = make_network()
    rng = np.random.default_rng(0)
    first, second = rng.integers(1, 64, 64).tolist(), rng.integers(1, 64, 64).tolist()
    packed = run(network, [*first, *second], [*range(64), *range(64)])
    alone = run(network, second, list(range(64)))
    torch.testing.assert_close(packed[64:], alone, atol=1e-5, rtol=1e-4)


def test_later_tokens_do_not_change_earlier_ones() -> None:
    network = make_network()
    ids = np.random.default_rng(1).integers(1, 64, 128).tolist()
    changed = [*ids[:100], *(1 + i % 60 for i in range(28))]
    a = run(network, ids, list(range(128)), dense=False)
    b = run(network, changed, list(range(128)), dense=False)
    torch.testing.assert_close(a[:100], b[:100], atol=1e-6, rtol=1e-5)


def test_the_indexer_prunes_only_beyond_its_budget() -> None:
    network = make_network()
    ids = np.random.default_rng(2).integers(1, 64, 128).tolist()
    dense = run(network, ids, list(range(128)))
    sparse = run(network, ids, list(range(128)), dense=False)
    free = SMALL.indexer_budget + SMALL.indexer_compress_ratio - 1
    torch.testing.assert_close(dense[:free], sparse[:free])
    assert not torch.allclose(dense[free + 17 :], sparse[free + 17 :])


def test_windows_of_a_row_equal_rows_of_their_own() -> None:
    ids = np.random.default_rng(3).integers(1, 64, 128).tolist()
    positions = [*range(64), *range(64)]
    whole = run(make_network(short=0), ids, positions)
    halves = run(make_network(short=1), ids, positions)
    torch.testing.assert_close(whole, halves, atol=1e-5, rtol=1e-4)


def make_batch() -> Any:
    rng = np.random.default_rng(4)
    answer = Answer(28, [10, 11, 12], 1, [5, 9, 12], False, "x")
    texts = (Encoded(rng.integers(3, 64, 30).tolist(), [1.0] * 30, [answer]) for _ in range(99))
    packer = Packer(texts, 128, 64)
    batch = collate([packer.row(), packer.row()], 16)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: torch.from_numpy(v) for name, v in fields.items() if name != "kinds"}


def test_a_few_steps_learn_a_constant_answer() -> None:
    from tools.demo_model.network import LossWeights
    from tools.demo_model.optimizer import Optimizer

    network = make_network(short=1)
    optimizer = Optimizer(network.parameters)
    batch, answers = make_batch(), []
    for _ in range(12):
        losses = network.losses(network.parameters, batch, torch.tensor(False), LossWeights())
        losses.total.backward()
        assert all(p.grad is not None for p in network.parameters.values())
        optimizer.clip()
        optimizer.step(1.0)
        answers.append(float(losses.answer.detach()))
    assert answers[-1] < 0.6 * answers[0]


def test_fake_quantization_stores_sixteen_levels_and_passes_gradients() -> None:
    from tools.demo_model.training import fake_q4

    values = torch.randn(4, 64, requires_grad=True)
    stored = fake_q4(values)
    stored.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.ones_like(values))
    assert (stored - values).abs().max() < values.abs().max() / 7
    assert all(len(block.unique()) <= 16 for block in stored.detach().reshape(-1, 32))


def test_rates_rise_stay_and_fall() -> None:
    from tools.demo_model.training import LAST_FACTOR, rate_factor

    assert rate_factor(0, 0.0) < 0.02
    assert rate_factor(1000, 0.4) == 1.0
    assert rate_factor(1000, 1.0) == pytest.approx(LAST_FACTOR)
