"""The one encoder that serving and fine-tuning share, and the metric it uses."""

import pytest
import torch

from hf_lowbit.loopvq.codebook import LoopVQCodebook
from hf_lowbit.loopvq.encoder import METRIC_FLOOR, encode, entry_norms, fisher_metric
from hf_lowbit.loopvq.grouping import Grouping
from hf_lowbit_kernels import vq_decode


GROUPING = Grouping(4, 2, 8, 32)  # T=4, T_c=2, c=4, NG=8, two blocks


def parts(seed=0, metric=True):
    generator = torch.Generator().manual_seed(seed)
    entries = torch.randn(2, 3, 8, 256, 8, generator=generator)
    weights = torch.rand(4, 3, 32, generator=generator) * 4 + 0.01 if metric else None
    codebook = LoopVQCodebook(GROUPING, 3, metric)
    codebook.store("key", entries, weights)
    codebook.store("value", entries.flip(0), weights)
    return codebook, generator


@pytest.mark.parametrize("metric", [True, False])
def test_every_entry_encodes_to_itself(metric):
    codebook, _ = parts(metric=metric)
    for side in ("key", "value"):
        for block in range(2):
            tables = codebook.block_tables(side, block)  # [T_c, H, NG, 256, c]
            states = tables.permute(0, 3, 1, 2, 4).flatten(-2).float()  # entry r of every group as token r
            codes = codebook.encode(side, block, states)
            assert torch.equal(codes, torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand_as(codes))
            for m in range(2):
                assert torch.equal(vq_decode(codes, codebook.table(side, 2 * block + m)), states[m].half())


@pytest.mark.parametrize("metric", [True, False])
def test_codes_minimize_the_weighted_distance(metric):
    codebook, generator = parts(metric=metric)
    states = torch.randn(2, 50, 3, 32, generator=generator)
    codes = codebook.encode("key", 1, states)
    weights = codebook.metric("key", 1) if metric else torch.ones(2, 3, 32)
    for token in (0, 17, 49):
        for head in range(3):
            for group in range(8):
                at = slice(group * 4, group * 4 + 4)
                gap = (
                    codebook.block_tables("key", 1)[:, head, group].double()
                    - states[:, token, head, None, at].double()
                )
                cost = (weights[:, head, None, at].double() * gap.square()).sum((0, 2))
                chosen = cost[int(codes[token, head, group])]
                assert chosen <= cost.min() * (1 + 1e-6)


def test_the_metric_changes_codes():
    codebook, generator = parts()
    states = torch.randn(2, 200, 3, 32, generator=generator)
    tables = codebook.block_tables("key", 0)
    plain = encode(states, tables, entry_norms(tables, None), None)
    assert (codebook.encode("key", 0, states) != plain).any()


def test_derived_norms_follow_the_table():
    codebook, generator = parts()
    states = torch.randn(2, 20, 3, 32, generator=generator)
    codebook.encode("key", 0, states)
    codebook.store("key", torch.randn(2, 3, 8, 256, 8, generator=generator), torch.rand(4, 3, 32) + 0.1)
    fresh = LoopVQCodebook(GROUPING, 3, True)
    fresh.load_state_dict(codebook.state_dict())
    assert torch.equal(codebook.encode("key", 0, states), fresh.encode("key", 0, states))


def test_fisher_metric_has_mean_one_in_each_group_and_a_floor():
    sensitivity = torch.rand(4, 3, 32, generator=torch.Generator().manual_seed(1)) + 0.1
    sensitivity[:, 0, :4] = 0  # a group no gradient reached
    sensitivity[0, 1, 4] = 1e6
    metric = fisher_metric(sensitivity, GROUPING)
    assert torch.equal(metric, metric.half().float()) and metric.min() > 0
    assert torch.equal(metric[:, 0, :4], torch.ones(4, 4))
    groups = metric.view(2, 2, 3, 8, 4).transpose(1, 2).movedim(2, -1).flatten(-2)  # [nB, H, NG, c * T_c]
    assert groups.mean(-1).sub(1).abs().max() < 1e-2
    assert groups[0, 1, 1].min() == torch.tensor(METRIC_FLOOR).half().float()
    ratio = metric[2, 2, 8] / metric[3, 2, 9]
    assert ratio.item() == pytest.approx((sensitivity[2, 2, 8] / sensitivity[3, 2, 9]).item(), rel=2e-2)


def test_a_bad_table_is_not_stored():
    codebook, _ = parts()
    before = codebook.key_table.clone()
    for entries, metric, message in (
        (torch.full((2, 3, 8, 256, 8), float("nan")), torch.ones(4, 3, 32), "NaN or Inf"),
        (torch.full((2, 3, 8, 256, 8), 1e6), torch.ones(4, 3, 32), "fp16"),
        (torch.zeros(2, 3, 8, 256, 8), None, "metric"),
    ):
        with pytest.raises(ValueError, match=message):
            codebook.store("key", entries, metric)
    assert torch.equal(codebook.key_table, before)
