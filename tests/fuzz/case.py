"""Golden cases as files, and their settings with all defaults: tests/golden/README.md."""

import json
import struct
from types import SimpleNamespace

import numpy as np

TYPES = {"F64": np.float64, "F32": np.float32, "I64": np.int64, "I32": np.int32, "U8": np.uint8}


def read_case(path):
    with open(path, "rb") as file:
        data = file.read()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    settings = header.pop("__metadata__")
    tensors = {}
    for name, t in header.items():
        first, last = t["data_offsets"]
        values = np.frombuffer(data[begin + first:begin + last], np.dtype(TYPES[t["dtype"]]).newbyteorder("<"))
        tensors[name] = values.reshape(t["shape"])
    return settings, tensors


def write_case(path, settings, tensors):
    header, at = {"__metadata__": {k: str(v) for k, v in settings.items()}}, 0
    for name, t in tensors.items():
        kind = next(k for k, v in TYPES.items() if v == t.dtype)
        header[name] = {"dtype": kind, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            file.write(np.ascontiguousarray(t).astype(t.dtype.newbyteorder("<")).tobytes())


DEFAULTS = dict(
    n_tokens=0, d_model=0, n_experts=8, top_k=0, expert="swiglu", act="relu", input="plain", ac_mode="paper",
    ac_spread="mad", ac_mix=1, ac_lambda=0.0, score="linear", cosine_keep_length=0, cosine_tau=1.0, grap_cosine=0,
    norm_node="down", norm_order="l2", router_act="relu", noise="none", noise_floor=0.01, noise_sigma=0.0,
    gate="softmax", gate_temperature=1.0, refine="none", similarity_tau=1.0, similarity_scale="none",
    lower_entropy_only=0, causal=0, attention_heads="min_entropy", attention_head=0, attention_sigma=1.0,
    attention_u="input", select="top_k", groups=1, groups_kept=1, group_score="max", top_p=0.6, threshold=0.05,
    threshold_learned=0, threshold_sigmoid=0, threshold_fallback="always", expert_choice_score="p",
    expert_choice_scope="batch", loss_predictor=0.0,
    affinity_mass=1.0, affinity_sum=0.0, capacity=0, capacity_min=1, slots=1, soft_normalise=0, weight="sum",
    weight_p=1.0, sparsemixer_eps=0.01, sparsemixer_sample=0, scale=1.0, apply_to="output", capacity_factor=0.0,
    drop_capacity=0, drop_factor=0.0, drop_factor_eval=0.0, drop_min=1, drop_order="position",
    capacity_bound="none", renormalize="before",
    loss_balance=0.0, balance_over="pairs", balance_scope="batch", loss_z=0.0, loss_importance=0.0,
    importance_over="probabilities", unbiased=0, loss_entropy=0.0, loss_usage_entropy=0.0,
    loss_similarity_same=0.0, loss_similarity_diff=0.0, loss_locality=0.0, nodes=1, loss_l1=0.0, loss_load=0.0,
    loss_orthogonal=0.0, loss_stable_balance=0.0, loss_distill=0.0, distill="ce_hard",
    bias_rate=0.0, ac_rho=0.9, add_input=0, loss_selector_entropy=0.0, loss_selector_reach=0.0, n_zero=0,
    swiglu_alpha=1.0, swiglu_limit=0.0, swiglu_offset=0.0, n_copy=0, n_constant=0,
    switch_from="top_k", switch_at=0, compete_rate=0.0, compete="softplus", compete_from=0,
    weight_over="all", zero_tau=1.0, zero_average=0, threshold_rho=0.99, logit_cap=0.0)


def configure(settings):
    c = SimpleNamespace(training="evaluation" not in settings)
    for name, default in DEFAULTS.items():
        text = settings.get(name.replace("loss_", "loss.", 1) if name.startswith("loss_") else name, default)
        setattr(c, name, type(default)(float(text)) if isinstance(default, (int, float)) else text)
    c.top_k = c.top_k or min(2, c.n_experts)
    return c
