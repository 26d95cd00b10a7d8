"""Which settings the teacher's engine inherits from the policy's engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.setup.run_components import RunComponents
from torchtune_ext.training.teacher import TeacherConfig

POLICY = EngineConfig(dtype="bfloat16", max_model_len=512, kv_cache_bytes=1 << 28, devices="1,2")


def test_teacher_engine_config_separates_devices_and_covers_policy():
    engine = TeacherConfig("teacher", {"devices": "3", "kv_cache_bytes": 1 << 30}).engine_config(POLICY)
    expected = {"devices": "3", "kv_cache_bytes": 1 << 30, "max_model_len": 513, "max_num_batched_tokens": 2048}
    assert engine == replace(POLICY, **expected)
    servers = EngineConfig(address="http://a:1,http://b:1", count=2, max_num_batched_tokens=99)
    alone = TeacherConfig("teacher").engine_config(servers)
    assert (alone.address, alone.count, alone.max_num_batched_tokens) == (None, None, 99)


def test_teacher_context_equal_to_policy_is_refused():
    with pytest.raises(ValueError, match=r"teacher.engine.max_model_len=512 .* engine.max_model_len=512"):
        TeacherConfig("teacher", {"max_model_len": 512}).engine_config(POLICY)


def test_a_key_that_no_engine_has_is_named():
    with pytest.raises(
        ValueError, match="unknown key 'teacher.engine.adress' in .*did you mean 'teacher.engine.address'"
    ):
        TeacherConfig("teacher", {"adress": "http://a:1"}).engine_config(POLICY)


@pytest.mark.parametrize(
    "policy, teacher, taken",
    [
        ({"devices": "1"}, {"devices": "2"}, None),
        ({"devices": "1"}, {"devices": "1"}, "0, 1"),
        ({"devices": "1"}, {}, "0, 1"),
        ({"devices": None}, {"devices": "1"}, None),
        ({"devices": None}, {}, None),  # all three share one device, and the caches of both engines are bounded
        ({"devices": None}, {"kv_cache_bytes": None}, "0"),
    ],
)
def test_gpus_that_a_teacher_may_have(policy, teacher, taken, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = SimpleNamespace(
        cfg=SimpleNamespace(engine=replace(POLICY, **policy), teacher=TeacherConfig("teacher", teacher)),
        precision=SimpleNamespace(dtype=torch.bfloat16),
        engine_config=replace(POLICY, **policy),
        ranks=SimpleNamespace(device=torch.device("cuda")),
    )
    if taken is None:
        assert RunComponents.teacher_engine_config(parts).devices == teacher.get("devices")
    else:
        with pytest.raises(ValueError, match=rf"a GPU that neither trains nor samples \(in use: {taken}\)"):
            RunComponents.teacher_engine_config(parts)
