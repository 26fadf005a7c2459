"""GPUs found and shared out, and what the memory plan counts and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from art_sky.config import EngineConfig, TrainerConfig
from art_sky.errors import InvalidConfig
from art_sky.inference.gpus import Gpu, Placement, find_gpus, parse_gpus, place, visible
from art_sky.inference.memory_plan import MemoryPlan, ModelSize, free_memory, make_plan

TABLE = "0, GPU-aaaa, 81559, 1200\n1, GPU-bbbb, 81559, 0\n"
BIG = ModelSize(4_000_000_000, 5_000_000, 2 * 36 * 8 * 128, 36, 2560, 32, 8, 151_936)


def gpu(index: int = 0, total: int = 80_000, used: int = 0) -> Gpu:
    return Gpu(str(index), total, used)


def plan(
    size: ModelSize, placement: Placement, free: int = 200_000, context: int = 8192, **config: object
) -> MemoryPlan:
    return make_plan(size, EngineConfig(kind="vllm", **config), context, 16, placement, free)


def test_gpus_are_read_as_cuda_would() -> None:
    assert parse_gpus(TABLE, None) == (Gpu("0", 81559, 1200), Gpu("1", 81559, 0))
    assert parse_gpus(TABLE, "1,GPU-aa") == (Gpu("1", 81559, 0), Gpu("0", 81559, 1200))
    assert parse_gpus(TABLE, "") == () == parse_gpus("", None)
    assert parse_gpus(TABLE, "0,-1,1") == (Gpu("0", 81559, 1200),)
    assert Gpu("0", 81559, 1200).free_mib == 80359
    with pytest.raises(InvalidConfig, match="names '7'; the GPUs here are 0, 1"):
        parse_gpus(TABLE, "7")
    with pytest.raises(InvalidConfig, match="which is no GPU"):
        parse_gpus("0, GPU-aaaa, [N/A], 3\n", None)


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == ()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{TABLE.splitlines()[1]}'\n")
    program.chmod(0o755)
    assert find_gpus() == (Gpu("1", 81559, 0),)
    program.write_text("#!/bin/sh\necho 'no devices were found' >&2; exit 9\n")
    with pytest.raises(InvalidConfig, match="no devices were found"):
        find_gpus()


def test_one_gpu_is_shared_and_more_are_split() -> None:
    assert place(()) == Placement() and not place(()).shared
    assert place((gpu(),)).shared
    split = place((gpu(0), gpu(1), gpu(2)))
    assert (split.engine, split.trainer) == ((gpu(0),), (gpu(1), gpu(2))) and not split.shared
    assert visible(split.trainer) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}


def test_the_size_is_that_of_the_files(tiny_model: Path, tmp_path: Path) -> None:
    size = ModelSize.of(tiny_model)
    with safe_open(tiny_model / "model.safetensors", "np") as f:
        assert size.parameters == sum(f.get_tensor(k).size for k in f.keys())  # noqa: SIM118  # no mapping
    assert size.kv_per_token == 2 * 4 * 2 * 32
    # q, k, v, o, gate, up, down of each layer
    assert size.linear_sides == 4 * (256 + 192 + 192 + 256 + 384 + 384 + 384)
    assert [size.shards(n) for n in (0, 1, 2, 3, 8)] == [1, 1, 2, 2, 2]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="num_attention_heads"):
        ModelSize.of(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InvalidConfig, match=r"no readable config.json and \*.safetensors"):
        ModelSize.of(tmp_path)
    nested = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": nested}))
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    assert ModelSize.of(tmp_path) == size


def test_on_a_cpu_all_of_it_is_there_at_once(tiny_model: Path) -> None:
    made = plan(ModelSize.of(tiny_model), Placement(), free=10_000, context=512, dtype="float32")
    (moment,) = made.moments
    assert made.kv_cache_mib == 1024 and moment.there_mib == 10_000
    assert {s.what for s in moment.shares} >= {"weights", "adapters", "KV cache", "trainer's weights"}
    made.check()
    tight = plan(ModelSize.of(tiny_model), Placement(), free=moment.needed_mib - 1, context=512, dtype="float32")
    with pytest.raises(InvalidConfig, match=rf"main memory: {moment.needed_mib} of {moment.needed_mib - 1} MiB"):
        tight.check()


def test_on_one_gpu_they_take_turns() -> None:
    made = plan(BIG, place((gpu(),)))
    sampling, training, host = made.moments
    assert "sampling" in sampling.where and "training" in training.where and host.where.startswith("main memory")
    assert sampling.needed_mib <= 0.96 * 80_000
    assert made.kv_cache_mib > 40_000  # what is left
    weights = next(s.mib for s in sampling.shares if s.what == "weights")
    assert weights == pytest.approx(8e9 / 2**20, abs=1) and host.needed_mib == weights
    made.check()
    with pytest.raises(InvalidConfig, match="GPU 0 while sampling"):
        plan(BIG, place((gpu(total=16_000),))).check()
    with pytest.raises(InvalidConfig, match="main memory while training"):
        plan(BIG, place((gpu(),)), free=1000).check()


def test_split_gpus_are_counted_each() -> None:
    made = plan(BIG, place((gpu(0), gpu(1, used=79_000))))
    assert [m.where for m in made.moments] == ["GPU 0", "GPU 1"]
    with pytest.raises(InvalidConfig, match=r"GPU 1: \d+ of 1000 MiB"):
        made.check()


def test_a_sequence_must_fit_into_the_kv_cache() -> None:
    with pytest.raises(InvalidConfig, match=r"kv_cache_mib 64 is less than the 1152 MiB of one sequence of 8192"):
        plan(BIG, Placement(), kv_cache_mib=64)
    assert "KV cache 2048" in str(plan(BIG, Placement(), kv_cache_mib=2048))


def test_free_memory_is_a_sane_number() -> None:
    assert 64 < free_memory() < 1 << 30


def test_4_bit_weights_and_8_bit_moments_are_counted(tmp_path: Path) -> None:
    size = ModelSize(
        4_000_000_000, 5_000_000, 2 * 36 * 8 * 128, 36, 2560, 32, 8, 151_936,
        linear_parameters=3_600_000_000, largest_linear=25_000_000,
    )  # fmt: skip
    found = {}
    for settings in (TrainerConfig(), TrainerConfig(quantization="nf4", optimizer="adamw_8bit")):
        made = make_plan(size, EngineConfig(kind="vllm"), 8192, 16, place((gpu(0), gpu(1))), 200_000, settings)
        trainer = next(m for m in made.moments if m.where == "GPU 1")
        found[settings.quantization] = {s.what: s.mib for s in trainer.shares}
    plain, small = found["none"], found["nf4"]
    # QLoRA's table: 4.127 bits a parameter instead of 16, and the largest matrix once more in bfloat16.
    saved = 3_600_000_000 * (16 - 4.127) / 8 - 2 * 25_000_000
    assert plain["trainer's weights"] - small["trainer's weights"] == pytest.approx(saved / 2**20, abs=2)
    values = 5_000_000 * 16
    assert plain["its adapter and optimizer"] == pytest.approx(values * 16 / 2**20, abs=1)
    assert small["its adapter and optimizer"] == pytest.approx(values * (8 + 2 * 260 / 256) / 2**20, abs=1)
