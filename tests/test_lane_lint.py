"""What the linter finds in a lane, and the block size that vLLM would really use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuguard.host import LocalHost
from gpuguard.serving.alignment import ModelShape, aligned_block, parse_shape
from gpuguard.serving.front_config import Route, render_front
from gpuguard.serving.lane import Lane, lane_adapter
from gpuguard.serving.lint import Surroundings, lint
from gpuguard.serving.sight import known_flags, surroundings

IMAGE = "localhost/vllm@sha256:" + "ab" * 32
SHAPE = ModelShape(
    kv_heads=2, head_dim=256, key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv=4
)


def make_lane(**changes: Any) -> Lane:
    base: dict[str, Any] = {
        "name": "int4",
        "engine": {"backend": "quadlet", "image": IMAGE},
        "model": {"path": "/srv/m", "served_name": "m", "manifest_sha256": "cd" * 32},
        "args": {
            "tensor-parallel-size": 4,
            "disable-custom-all-reduce": True,
            "max-model-len": 220000,
            "shutdown-timeout": 120,
        },
        "env": {"NCCL_P2P_LEVEL": "SYS", "VLLM_ENGINE_READY_TIMEOUT_S": 1800},
        "requires": {"p2p": "required"},
        "gate": {"canary": [{"prompt": "1 + 1 =", "expect": "2"}]},
    }
    for key, value in changes.items():
        known = base.get(key)
        both = isinstance(value, dict) and isinstance(known, dict)
        merged = {**known, **value} if both and known is not None else value
        base[key] = {k: v for k, v in merged.items() if v is not None} if both else merged
    return lane_adapter().validate_python(base)


KNOWN = Surroundings(
    cards=4, flags=known_flags(), lanes=frozenset({"int4", "fp8"}), nvlink=False, shape=SHAPE
)


@pytest.mark.parametrize(
    ("changes", "known", "code", "severity"),
    [
        ({"engine": {"image": "localhost/vllm:latest"}}, {}, "lane-image-floating", "error"),
        ({"engine": {"image": "localhost/vllm"}}, {}, "lane-image-floating", "error"),
        (
            {"engine": {"image": "localhost/vllm@sha256:" + "0" * 64}},
            {},
            "lane-image-placeholder",
            "error",
        ),
        ({"args": {"load-format": "dummy"}}, {}, "lane-dummy-weights", "error"),
        ({"args": {"shutdown-timeout": 0}}, {}, "lane-shutdown-timeout", "error"),
        ({"args": {"shutdown-timeout": None}}, {}, "lane-shutdown-timeout", "error"),
        ({"args": {"gpu-memory-utilization": 1.5}}, {}, "lane-memory-utilization", "error"),
        ({"args": {"gpu-memory-utilization": 0}}, {}, "lane-memory-utilization", "error"),
        ({"args": {"gpu-memory-utilization": "90%"}}, {}, "lane-memory-utilization", "error"),
        ({"port": 8000}, {"front_port": 8000}, "lane-port-of-front", "error"),
        ({"args": {"shutdown-timeout": 200}}, {}, "lane-stop-timeout", "error"),
        ({"args": {"tensor-parallel-size": 8}}, {}, "lane-too-few-cards", "error"),
        ({}, {"cards": None}, "lane-cards-unknown", "warning"),
        ({"args": {"kv-cache-dtipe": "fp8"}}, {}, "lane-flag-unknown", "warning"),
        # vLLM's parser takes beginnings of flags
        ({"args": {"load-form": "dummy"}}, {}, "lane-flag-short", "error"),
        ({"args": {"api-k": "x"}}, {}, "lane-flag-short", "error"),
        ({"args": {"hos": "0.0.0.0"}}, {}, "lane-flag-short", "error"),
        ({"args": {"load_format": " DUMMY "}}, {}, "lane-dummy-weights", "error"),
        ({"args": {"config": "/etc/more.yaml"}}, {}, "lane-argument-reserved", "error"),
        ({"args": {"pipeline-parallel-size": 2}}, {}, "lane-too-few-cards", "error"),
        ({"args": {"data-parallel-size": 2}}, {}, "lane-too-few-cards", "error"),
        ({"gate": {"canary": []}}, {}, "lane-no-canary", "warning"),
        (
            {"args": {"max-model-len": "32K"}, "expect": {"kv_tokens": 32767}},
            {},
            "lane-model-len",
            "error",
        ),
        ({"args": {"port": 9}}, {}, "lane-argument-reserved", "error"),
        ({"args": {"api-key": "x"}}, {}, "lane-secret", "error"),
        (
            {"args": {"block-size": 800, "kv-cache-dtype": "int4_per_token_head",
                      "mamba-ssm-cache-dtype": "bfloat16"}},
            {},
            "lane-block-size",
            "warning",
        ),
        ({"timeouts": {"first_start": 900}}, {}, "lane-start-timeout", "error"),
        ({"env": {"VLLM_ENGINE_READY_TIMEOUT_S": None}}, {}, "lane-engine-timeout", "warning"),
        ({"env": {"VLLM_ENGINE_READY_TIMEOUT_S": 380.0}}, {}, "lane-engine-timeout", "error"),
        ({"expect": {"kv_tokens": 200000}}, {}, "lane-model-len", "error"),
        ({}, {"pool_tokens": 200000}, "lane-model-len", "error"),
        (
            {"args": {"disable-custom-all-reduce": None}},
            {},
            "lane-custom-all-reduce",
            "warning",
        ),
        ({"env": {"NCCL_P2P_LEVEL": None}}, {}, "lane-nccl-level", "warning"),
        ({"env": {"NCCL_P2P_LEVEL": "NODE"}}, {}, "lane-nccl-level", "warning"),
        ({"env": {"NCCL_DEBUG": "WARN"}}, {}, "lane-nccl-debug", "error"),
        ({"env": {"NCCL_DEBUG_FILE": "/tmp/x"}}, {}, "lane-nccl-debug", "error"),
        ({"env": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "NET"}},
         {}, "lane-nccl-debug", "error"),
        ({"env": {"NCCL_P2P_DISABLE": 1}}, {}, "lane-p2p-disabled", "error"),
        ({"env": {"NCCL_P2P_DISABLE": 0}}, {}, "lane-p2p-disabled", "error"),
        (
            {"env": {"NCCL_P2P_DISABLE": 0}, "requires": {"p2p": "none"}},
            {},
            "lane-p2p-disabled",
            "error",
        ),
        ({"env": {"VLLM_CACHE_ROOT": "/x"}}, {}, "lane-variable-reserved", "error"),
        ({"env": {"VLLM_API_KEY": "x"}}, {}, "lane-secret", "error"),
        ({"env": {"HF_TOKEN": "x"}}, {}, "lane-secret", "error"),
        *(
            ({"env": env, "requires": {"p2p": p2p}}, {}, "lane-visible-cards",
             "warning" if p2p == "none" else "error")
            for env in ({"CUDA_VISIBLE_DEVICES": "2,3"}, {"NVIDIA_VISIBLE_DEVICES": "0"})
            for p2p in ("required", "preferred", "none")
        ),
        ({"env": {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}}, {}, "lane-visible-cards", "error"),
        ({"args": {"hf-token": "x"}}, {}, "lane-secret", "error"),
        *(
            (
                {"args": {"tensor-parallel-size": 2, "disable-custom-all-reduce": given},
                 "requires": {"p2p": p2p}},
                {},
                "lane-custom-all-reduce",
                "warning" if p2p == "required" else "error",
            )
            for given in (None, False)
            for p2p in ("required", "preferred", "none")
        ),
        ({"env": {"VLLM_SKIP_P2P_CHECK": 0}}, {}, "lane-p2p-check", "warning"),
        ({"engine": {"gpus": "none"}}, {}, "lane-p2p-without-cards", "error"),
        ({"model": {"manifest_sha256": None}}, {}, "lane-model-unpinned", "warning"),
        ({"fallback": ["nope"]}, {}, "lane-fallback-unknown", "error"),
        ({"fallback": ["int4"]}, {}, "lane-fallback-unknown", "error"),
    ],
)  # fmt: skip
def test_what_the_linter_finds(
    changes: dict[str, Any], known: dict[str, Any], code: str, severity: str
) -> None:
    found = lint(make_lane(**changes), replace(KNOWN, **known))
    assert [(p.code, p.severity) for p in found] == [(code, severity)]
    assert all(p.message and p.remedy for p in found)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("2m", 2000000), (4096, 4096),
     ("4096", 4096), ("auto", None), (None, None)],
)  # fmt: skip
def test_a_length_as_vllm_reads_it(given: str | int | None, tokens: int | None) -> None:
    assert make_lane(args={"max-model-len": given}).max_model_len == tokens


def test_a_good_lane_has_no_problems() -> None:
    assert lint(make_lane(), KNOWN) == ()
    quiet = {"env": {"NCCL_P2P_LEVEL": None}, "args": {"disable-custom-all-reduce": None}}
    assert lint(make_lane(**quiet), replace(KNOWN, nvlink=True)) == ()


@pytest.mark.parametrize(
    ("tensor_parallel", "kv", "state", "given", "expected"),
    [
        (4, "int4_per_token_head", "bfloat16", 800, 1600),
        (4, "int4_per_token_head", "bfloat16", None, 1552),
        (4, "int4_per_token_head", "bfloat16", 1600, 1600),
        (4, "fp8", "bfloat16", None, 800),
        (4, "bfloat16", "auto", None, 784),
        (4, "bfloat16", "bfloat16", 400, 400),
        (4, "something-new", "auto", 800, None),
    ],
)
def test_the_block_size_that_vllm_really_uses(
    tensor_parallel: int, kv: str, state: str, given: int | None, expected: int | None
) -> None:
    size = aligned_block(
        SHAPE, tensor_parallel=tensor_parallel, kv_dtype=kv, state_dtype=state, block_size=given
    )
    assert size == expected


def test_the_shape_comes_from_the_model() -> None:
    config = {
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert parse_shape({"text_config": config}) == SHAPE
    assert parse_shape({**config, "mamba_ssm_dtype": "bfloat16"}) == replace(
        SHAPE, state_dtype="bfloat16"
    )
    assert parse_shape({"num_key_value_heads": 2}) is None


@pytest.mark.parametrize("share", [0.01, 0.94, 1, "0.5", None])
def test_shares_of_memory_that_vllm_takes(share: object) -> None:
    lane = make_lane(args={"gpu-memory-utilization": share})
    assert "lane-memory-utilization" not in {problem.code for problem in lint(lane, KNOWN)}


@pytest.mark.parametrize(
    ("listen", "port"),
    [
        ("127.0.0.1:8000", 8000),
        ("0.0.0.0:8000", 8000),
        ("*:8000", 8000),
        ("[::]:8000", 8000),
        ("10.0.0.5:8000", None),  # engines listen on loopback only
        ("nonsense", None),
    ],
)
def test_the_port_that_the_front_takes_from_engines(
    tmp_path: Path, listen: str, port: int | None
) -> None:
    file = tmp_path / "etc/gpuguard/front.cfg"
    file.parent.mkdir(parents=True)
    file.write_text(render_front(listen, 30, Route(18001, is_open=False)))
    assert surroundings(LocalHost(tmp_path), make_lane(), ()).front_port == port


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "shutdown-timeout is not given, and vLLM's default is 0: "),
     (0, "shutdown-timeout is 0: "), (-5, "shutdown-timeout is -5: ")],
)  # fmt: skip
def test_a_value_that_the_file_does_not_say_is_not_put_into_its_mouth(
    given: int | None, said: str
) -> None:
    problems = lint(make_lane(args={"shutdown-timeout": given}), KNOWN)
    found = next(p for p in problems if p.code == "lane-shutdown-timeout")
    assert found.message.startswith(said)


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ({"backend": "venv", "venv": "/opt/v", "image": None}, "systemctl edit lane-int4.service"),
        ({"backend": "quadlet"}, "/etc/containers/systemd/lane-int4.container.d/secret.conf"),
        ({"backend": "compose"}, "/etc/gpuguard/secrets/int4.env"),
    ],
)
def test_each_backend_has_its_place_for_secrets(engine: dict[str, Any], place: str) -> None:
    problems = lint(make_lane(engine=engine, env={"HF_TOKEN": "x"}), KNOWN)
    found = next(p for p in problems if p.code == "lane-secret")
    assert place in found.remedy
    assert ("[Container]" in found.remedy) == (engine["backend"] == "quadlet")
