"""The policy as data: what it refuses, what it means to Lightning, and that it survives storage."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_amp_plus.policy import PrecisionPolicy, Rule

LIGHTNING_STRINGS = ["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]


@pytest.mark.parametrize("precision", LIGHTNING_STRINGS)
def test_lightning_strings_come_back_as_themselves(precision: str) -> None:
    assert PrecisionPolicy.from_string(precision).lightning_precision == precision


@pytest.mark.parametrize(
    ("alias", "meaning"),
    [(16, "16-mixed"), ("16", "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true"), ("32", "32-true")],
)
def test_short_forms_mean_what_lightning_means(alias: Any, meaning: str) -> None:
    assert PrecisionPolicy.from_string(alias) == PrecisionPolicy.from_string(meaning)


def test_fp8_mixed_keeps_fp32_parameters_and_reduction_with_bf16_around() -> None:
    policy = PrecisionPolicy.from_string("fp8-mixed")
    assert (policy.compute, policy.params, policy.reduce, policy.base_compute) == ("fp8", "fp32", "fp32", "bf16")
    assert policy.lightning_precision == "bf16-mixed"
    assert policy.uses_fp8


def test_unknown_string_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown precision 'bf17'.*16-mixed.*fp8-mixed"):
        PrecisionPolicy.from_string("bf17")


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precisions_left_to_lightning_are_named_as_such(precision: str) -> None:
    with pytest.raises(ValueError, match="Lightning's own"):
        PrecisionPolicy.from_string(precision)


@pytest.mark.parametrize("params", ["bf16", "fp16"])
def test_sixteen_bit_parameters_are_a_true_policy(params: Any) -> None:
    assert PrecisionPolicy(params, params=params).is_true
    assert not PrecisionPolicy(params).is_true


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": "bfloat16"}, r"compute must be one of 'fp32', 'bf16', 'fp16', 'fp8'; found 'bfloat16'"),
        ({"compute": "fp32", "params": "fp8"}, "params must be one of"),
        ({"compute": "fp32", "reduce": None}, "reduce must be one of"),
        ({"compute": "fp32", "buffers": "int8"}, "buffers must be one of"),
        ({"compute": "fp32", "fallback": "fp32"}, "fallback must be one of 'error', 'bf16'"),
        ({"compute": "fp16", "params": "bf16"}, r"params='bf16' with compute='fp16'.*Set compute to 'bf16' or 'fp8'"),
        ({"compute": "bf16", "params": "fp16"}, r"Set compute to 'fp16', or params='fp32'"),
        ({"compute": "bf16", "master_weights": True}, "nothing to keep a master of"),
        ({"compute": "bf16", "master_weights": 1}, "master_weights must be True or False; found 1"),
        ({"compute": "bf16", "fp8_after_steps": 10}, "fp8_after_steps=10, but nothing in this policy computes in FP8"),
        ({"compute": "bf16", "fp8_when_stable": True}, "fp8_when_stable=True, but nothing"),
        ({"compute": "bf16", "fp8_in_evaluation": True}, "fp8_in_evaluation=True, but nothing"),
        ({"compute": "fp8", "fp8_after_steps": -1}, "0 or more; found -1"),
        ({"compute": "fp8", "fp8_after_steps": True}, "must be a count of steps"),
        (
            {"compute": "bf16", "rules": [Rule("a", recipe="delayed")]},
            "recipe=DelayedScaling.* of rule 'a'.*policy computes in",
        ),
        ({"compute": "bf16", "rules": Rule("a")}, "rules must be a list"),
        ({"compute": "bf16", "rules": ["a"]}, r"rules\[0\] must be a Rule or a mapping"),
        ({"compute": "bf16", "rules": [{"macht": "a"}]}, r"rules\[0\] has unknown keys \['macht'\]"),
        ({"compute": "bf16", "rules": [{"compute": "fp32"}]}, r"rules\[0\] needs the key 'match'"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"match": ""}, "found ''"),
        ({"match": "type:"}, "found 'type:'"),
        ({"match": None}, "found None"),
        ({"match": "a", "compute": "half"}, "compute of rule 'a' must be one of"),
        ({"match": "a", "compute": "bf16", "gemms": ["fprop"]}, "gemms=.* of rule 'a' is a setting of FP8"),
        ({"match": "a", "compute": "fp32", "recipe": "mx"}, "recipe=MXScaling.* of rule 'a' is a setting of FP8"),
        ({"match": "a", "compute": "fp8", "recipe": "best"}, "recipe of rule 'a': recipe='best': expected one of"),
        ({"match": "a", "compute": "fp8", "gemms": "fprop"}, "non-empty list"),
        ({"match": "a", "compute": "fp8", "gemms": []}, "non-empty list"),
        ({"match": "a", "compute": "fp8", "gemms": ["bias"]}, "gemms of rule 'a' must be one of"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**arguments)


def test_fp8_settings_are_taken_where_fp8_is() -> None:
    assert PrecisionPolicy("fp8", rules=[Rule("a", recipe="current", gemms=["fprop"])], fp8_after_steps=5).uses_fp8
    assert PrecisionPolicy("bf16", rules=[Rule("a", compute="fp8", recipe="delayed")], fp8_in_evaluation=True).uses_fp8
    assert PrecisionPolicy("fp8", params="bf16", master_weights=True).is_true


def test_rules_are_stored_as_a_tuple_of_rules_and_the_policy_is_hashable() -> None:
    policy = PrecisionPolicy("bf16", rules=[{"match": "head", "compute": "fp32"}, Rule("x")])  # type: ignore[list-item]
    assert policy.rules == (Rule("head", compute="fp32"), Rule("x"))
    assert len({policy, PrecisionPolicy("bf16", rules=policy.rules)}) == 1


def test_unknown_keys_of_a_stored_policy_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['computes'\]"):
        PrecisionPolicy.from_dict({"computes": "bf16"})
    with pytest.raises(ValueError, match="needs the key 'compute'"):
        PrecisionPolicy.from_dict({"params": "fp32"})


rules = st.builds(
    Rule,
    match=st.sampled_from(["a", "blocks.*", "type:LayerNorm"]),
    compute=st.sampled_from([None, "fp32", "bf16", "fp16", "fp8"]),
    reason=st.text(max_size=5),
) | st.just(Rule("x", compute="fp8", recipe="block", gemms=("fprop", "wgrad")))
policies = st.one_of(
    st.builds(
        PrecisionPolicy,
        compute=st.sampled_from(["fp32", "bf16", "fp8"]),
        reduce=st.sampled_from(["fp32", "bf16", "fp16"]),
        buffers=st.sampled_from([None, "fp32", "bf16"]),
        rules=st.lists(rules, max_size=3),
        fallback=st.sampled_from(["error", "bf16"]),
    ),
    st.builds(PrecisionPolicy, compute=st.just("fp16"), reduce=st.sampled_from(["fp32", "fp16"])),
    st.builds(PrecisionPolicy, compute=st.just("bf16"), params=st.just("bf16"), master_weights=st.booleans()),
    st.builds(
        PrecisionPolicy, compute=st.just("fp8"), fp8_after_steps=st.integers(0, 9), fp8_when_stable=st.booleans()
    ),
)


@given(policies)
def test_a_policy_survives_json(policy: PrecisionPolicy) -> None:
    restored = PrecisionPolicy.from_dict(json.loads(json.dumps(policy.to_dict())))
    assert restored == policy
    assert restored.fingerprint() == policy.fingerprint()


@given(policies, policies)
def test_fingerprints_differ_where_anything_but_a_reason_differs(one: PrecisionPolicy, other: PrecisionPolicy) -> None:
    def without_reasons(policy: PrecisionPolicy) -> dict[str, Any]:
        plain = policy.to_dict()
        return plain | {"rules": [rule | {"reason": ""} for rule in plain["rules"]]}

    assert (one.fingerprint() == other.fingerprint()) == (without_reasons(one) == without_reasons(other))


def test_fingerprint_is_the_same_in_another_process() -> None:
    policy = PrecisionPolicy("bf16", rules=[Rule("head", compute="fp32")])
    code = (
        "from lightning_amp_plus.policy import PrecisionPolicy, Rule;"
        "print(PrecisionPolicy('bf16', rules=(Rule('head', compute='fp32'),)).fingerprint())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == policy.fingerprint()
    assert len(printed) == 64


def test_a_configuration_file_mapping_becomes_a_policy() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PrecisionPolicy)
    config = parser.parse_object({"policy": {"compute": "bf16", "rules": [{"match": "head", "compute": "fp32"}]}})
    policy = parser.instantiate(config).policy
    assert policy == PrecisionPolicy("bf16", rules=[Rule("head", compute="fp32")])


def test_a_wrong_format_in_a_configuration_file_is_refused() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PrecisionPolicy)
    with pytest.raises(jsonargparse.ArgumentError, match="half"):
        parser.parse_object({"policy": {"compute": "half"}})


@pytest.mark.parametrize(
    ("precision", "known"),
    [
        ("16-mixed", True),
        (16, True),
        ("bf16", True),
        ("fp8-mixed", True),
        ("64-true", False),
        (True, False),
        (None, False),
    ],
)
def test_knows_what_from_string_takes(precision: object, known: bool) -> None:
    assert PrecisionPolicy.knows(precision) is known


@pytest.mark.parametrize("name", ["ours-1-16-mixed", "ours-1-moved", "ours-2-16-mixed"])
def test_policies_of_older_versions_keep_their_fingerprints(name: str) -> None:
    path = Path(__file__).parent / "data" / "checkpoints" / f"{name}.pt"
    saved = torch.load(path, weights_only=True)["lightning_amp_plus"]
    assert PrecisionPolicy.from_dict(saved["policy"]).fingerprint() == saved["fingerprint"]


def test_a_backend_that_a_rule_names_is_in_the_fingerprint() -> None:
    one, other = (
        PrecisionPolicy("bf16", rules=[Rule("a", compute="fp8", backend=backend)])
        for backend in ("torchao", "reference")
    )
    unset = PrecisionPolicy("bf16", rules=[Rule("a", compute="fp8")])
    assert len({policy.fingerprint() for policy in (one, other, unset)}) == 3
