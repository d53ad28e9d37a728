"""The values make the RunId, all of them and nothing else; and only the author's signature over them is believed."""

import copy
import hashlib
import math
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from protocol.identity.invitations import Grant
from protocol.identity.keys import Identity, peer_id_of, verify
from protocol.manifest import join_link, signing
from protocol.manifest.manifest import MAX_MANIFEST_BYTES, Manifest, manifest_from_table, parse_toml
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import MAX_MODULES, ModuleId, RunId

AUTHOR = Identity.generate()
Table = dict[str, Any]
Keys = tuple[str, ...]

SMALL: Table = {
    "protocol": 2,
    "name": "small",
    "model": {"vocabulary": 257, "hidden": 64, "heads": 4, "kv_heads": 2, "feed_forward": 128, "sequence": 32},
    "stages": {"blocks": [1, 1, 1]},
    "training": {"inner_tokens": 128},
}


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Tables that the schema takes, with extreme floats and text; many keys are left out now and then."""
    heads, kv, rows, sequence = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 8)), 16
    below_one = st.floats(0, 1).filter(lambda x: x < 1)
    positive = st.floats(0, 1).filter(lambda x: x > 0)
    digest = draw(st.none() | st.text("0123456789abcdef", min_size=64, max_size=64))
    characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    data: Table = {"source": "path:." + draw(st.text(characters, max_size=40)), "held_out": draw(below_one)}
    if digest:
        data |= {"tokenizer": "file:a" + draw(st.text("abc äß\t\x7f\"\\'/")), "tokenizer_sha256": digest}
    stages: Table = {"blocks": [draw(st.integers(0, 3)), *draw(st.lists(st.integers(1, 1024), min_size=1, max_size=9))]}
    if draw(st.booleans()):
        stages["per_path"] = draw(st.integers(1, len(stages["blocks"]) - 1))
    if draw(st.booleans()):
        stages["visit_ratio"] = draw(st.floats(1, 2))
    inner = {"learning_rate": draw(positive), "beta1": draw(below_one | st.just(-0.0)), "epsilon": draw(positive)}
    return {
        "protocol": 2,
        "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "model": {
            "vocabulary": draw(st.integers(257, 1_000_000)),
            "feed_forward": draw(st.integers(8, 262_144)),
            "rope_theta": draw(st.floats(0, 1e9).filter(lambda x: x > 0)),
        }
        | {"hidden": heads * kv * 8, "heads": heads * kv, "kv_heads": kv, "sequence": sequence},
        "stages": stages,
        "data": data,
        "training": {
            "rows": rows,
            "inner_tokens": rows * sequence * draw(st.integers(1, 2**40)),
            "fragments": draw(st.integers(1, 64)),
            "round_seconds": draw(positive),
            "inner": inner,
        },
        "codecs": {
            "activations": draw(st.sampled_from(["none", "bf16", "int8", "int4"])),
            "gradients": draw(st.sampled_from(["none", "bf16", "int8", "int4"])),
            "pseudo_gradients": draw(st.sampled_from(["none", "bf16", "int8", "int4", "int2"])),
            "state": draw(st.sampled_from(["none", "planes"])),
        },
    }


def leaves(table: Table, at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def changed(table: Table, keys: Keys, value: Any) -> Table:
    other = copy.deepcopy(table)
    place = other
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    return other


def full_table(manifest: Manifest) -> Table:
    """All values, defaults included, as TOML gives them."""
    return tomllib.loads(signing.toml_of(manifest))


def shuffled(table: Table, order: random.Random) -> Table:
    items = [(key, shuffled(value, order) if isinstance(value, dict) else value) for key, value in table.items()]
    order.shuffle(items)
    return dict(items)


def flat_toml(table: Table) -> bytes:
    """Another way to write the same: dotted keys, no sections, other white space, comments."""
    lines = []
    for index, (keys, value) in enumerate(leaves(table)):
        written = signing.toml_value(tuple(value) if isinstance(value, list) else value)
        lines.append(f"  {'.'.join(keys)}   =\t{written} # {index}\r\n")
    return "".join(lines).encode()


def small() -> Manifest:
    return manifest_from_table(copy.deepcopy(SMALL))


def test_the_run_id_of_a_known_manifest_never_changes() -> None:
    """Written out by hand: a change here means that no older run can be joined any more."""
    expected = (
        b'{"codecs":{"activations":"none","gradients":"none","pseudo_gradients":"none","state":"planes"},'
        b'"data":{"files":null,"held_out":0.02,"source":"python-stdlib","tokenizer":"bytes","tokenizer_sha256":null},'
        b'"model":{"dtype":"float32","family":"llama","feed_forward":128,"heads":4,"hidden":64,"kv_heads":2,'
        b'"norm_epsilon":1e-05,"rope_theta":10000.0,"sequence":32,"vocabulary":257},"name":"small","protocol":2,"seed":0,'
        b'"stages":{"blocks":[1,1,1],"experts":1,"per_path":null,"reordering":"none"},'
        b'"training":{"fragments":1,"inner":{"beta1":0.9,"beta2":0.95,"clip_norm":1.0,"epsilon":1e-08,"learning_rate":0.001,'
        b'"name":"adamw","weight_decay":0.1},"inner_steps":50,"inner_tokens":128,'
        b'"outer":{"learning_rate":0.7,"momentum":0.9,"name":"nesterov"},"round_seconds":900.0,"rows":4,'
        b'"schedule":{"final_ratio":0.1,"kind":"cosine","total_steps":1000,"warmup_steps":20},"staleness":0}}'
    )
    assert signing.canonical(small()) == expected
    assert signing.run_id_of(small()) == hashlib.sha256(b"skipstone-manifest:" + expected).hexdigest()


def test_another_process_with_another_hash_seed_agrees() -> None:
    program = (
        "import protocol.manifest.signing as s, sys; print(s.read_signed_manifest(sys.stdin.buffer.read(), None).run)"
    )
    signed, command = signing.sign_manifest(small(), AUTHOR), [sys.executable, "-c", program]
    environment = {"PYTHONHASHSEED": "7"}
    result = subprocess.run(command, input=signed.text, capture_output=True, check=True, env=environment)
    assert result.stdout.decode().strip() == signed.run


@given(tables())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_signed_reads_back_the_same(table: Table) -> None:
    manifest = manifest_from_table(table)
    signed = signing.sign_manifest(manifest, AUTHOR)
    again = signing.read_signed_manifest(signed.text, signed.run)
    assert (again, again.manifest) == (signed, manifest)
    assert (again.run, again.author) == (signing.run_id_of(manifest), AUTHOR.peer)
    assert verify(AUTHOR.public_key, again.signature, b"skipstone-manifest:" + signing.canonical(manifest))


@given(tables(), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_order_and_layout_do_not_matter(table: Table, order: random.Random) -> None:
    signed = signing.sign_manifest(manifest_from_table(table), AUTHOR)
    other_layout = flat_toml(shuffled(tomllib.loads(signed.text.decode()), order))
    assume(len(other_layout) < MAX_MANIFEST_BYTES)
    again = signing.read_signed_manifest(other_layout, signed.run)
    assert (again.run, again.text) == (signed.run, signed.text)


def other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, list):
        return [[*value[:-1], other] for other in other_values(value[-1])]
    if isinstance(value, str):
        names = ("path:/tmp", "file:other", "bfloat16", "adjacent", "linear", "int8", "none", "planes", "causal")
        return [value + "x", *names, "0" * 64]
    if isinstance(value, float):
        return [math.nextafter(value, 0.5), math.nextafter(value, 2.0)]
    return [value + 1, value * 2]


def test_a_change_of_any_value_makes_another_run_and_breaks_the_signature() -> None:
    """One key after the other gets another value; only those that have but one value in this version cannot."""
    stages = {"blocks": [1, 1, 1], "per_path": 1, "visit_ratio": 1.5}
    data = {"tokenizer": "file:a", "tokenizer_sha256": "1" * 64}
    tokens = {"warmup_tokens": 512, "total_tokens": 4096}
    training = {"inner_tokens": 256, "schedule": tokens}  # so that rows and sequence can double
    scaling = {"kind": "llama3", "factor": 8.0, "low_frequency_factor": 0.5}
    model = SMALL["model"] | {"attention": "documents", "head_dim": 4, "rope_scaling": scaling, "positions": 4096}
    model |= {"tied_embeddings": True, "attention_bias": True}
    parts = {"model": model, "stages": stages, "data": data, "training": training}
    parts |= {"start": {"modules": ["2" * 64] * 3}}
    base = full_table(manifest_from_table(SMALL | parts))
    signed = signing.sign_manifest(manifest_from_table(copy.deepcopy(base)), AUTHOR)
    unchangeable = set()
    for keys, value in leaves(base):
        seen = 0
        for other in (other for other in other_values(value) if other != value):
            try:
                manifest = manifest_from_table(changed(base, keys, other))
            except ManifestError:
                continue
            assert signing.run_id_of(manifest) != signed.run, keys
            with pytest.raises(ManifestError, match=r"signature.value: not the author's"):
                signing.read_signed_manifest(signing.render(manifest, signed.author, signed.signature), None)
            seen += 1
        if not seen:
            unchangeable.add(".".join(keys))
    one_value = {"protocol", "stages.reordering", "model.family", "model.rope_scaling.kind"}
    assert unchangeable <= one_value | {"training.inner.name", "training.outer.name"}


def test_every_key_of_the_schema_is_in_the_canonical_form_and_in_the_text() -> None:
    """So that a key added to the schema cannot be forgotten here."""

    def names(schema: dict[str, Any], at: dict[str, Any]) -> Iterator[str]:
        for key, field in at["properties"].items():
            inner = schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"))
            yield key
            if inner:
                yield from names(schema, inner)

    schema = Manifest.model_json_schema()
    # Of another family than what is used below, and of no run that starts from an existing model.
    everything = set(names(schema, schema)) - {"sliding_window", "residual", "token_rank"}
    later = changed(changed(SMALL, ("stages", "visit_ratio"), 1.5), ("model", "attention"), "documents")
    later = changed(later, ("training", "schedule"), {"warmup_tokens": 64, "total_tokens": 640})
    of_soap = {"name": "soap", "refresh_steps": 20, "refresh_lag": 3, "largest_side": 512}
    later["training"] |= {"staleness_steps": 50, "inner": {**of_soap, "momentum": 0.9, "look_ahead": 0.5}}
    later |= {"routing": {"router": "ab" * 32}, "stages": later["stages"] | {"experts": 2, "workers": "paths"}}
    model = {"head_dim": 4, "tied_embeddings": True, "attention_bias": True, "positions": 4096}
    later["model"] |= {**model, "rope_scaling": {"kind": "linear", "factor": 2.0}}
    later["data"] = {"source": "huggingface:some/talks", "labels": "assistant", "revision": "ab" * 20}
    later["data"] |= {"dealt_by": "files", "open": True, "inviters": [AUTHOR.peer], "token_files": "eJwDAAAAAAE="}
    later["data"] |= {"tokenizer": "file:a", "tokenizer_sha256": "ef" * 32, "ends": [7, 8], "beginning": 0}
    start = {"modules": ["cd" * 32] * len(later["stages"]["blocks"])}
    later |= {"start": start, "paths": {"max_jump": 2, "full_every": 10}}
    mistral = changed(changed(later, ("model", "family"), "mistral"), ("model", "attention_bias"), False)
    windowed = changed(mistral, ("model", "sliding_window"), 4096)
    assert '"sliding_window":4096' in signing.canonical(manifest_from_table(windowed)).decode()
    narrow = manifest_from_table(changed(changed(SMALL, ("model", "residual"), 4), ("model", "token_rank"), 3))
    assert re.search(b'"residual":4.*"token_rank":3', signing.canonical(narrow))
    assert "token numbers" in signing.toml_of(narrow)
    written = manifest_from_table(later)
    text, form = signing.toml_of(written), signing.canonical(written).decode()
    assert {"clip_norm", "total_steps", "per_path", "kv_heads"} <= everything
    assert [key for key in everything if f'"{key}":' not in form] == []
    assert [key for key in everything if key not in text] == []


def test_a_key_that_was_added_later_is_left_out_at_its_default() -> None:
    """So that an older run keeps its RunId, and a peer of an older version can read what this one writes."""
    said = manifest_from_table(changed(SMALL, ("stages", "visit_ratio"), 1))
    assert (signing.canonical(said), signing.toml_of(said)) == (signing.canonical(small()), signing.toml_of(small()))
    assert "\n# visit_ratio = 1.0\n" in signing.toml_of(small())
    assert "visit_ratio" not in full_table(small())["stages"]
    other = manifest_from_table(changed(SMALL, ("stages", "visit_ratio"), 1.5))
    assert b'"visit_ratio":1.5' in signing.canonical(other)
    assert "\nvisit_ratio = 1.5\n" in signing.toml_of(other)


WRONG_VALUES: dict[str, list[object]] = {
    "training.inner.name": ["sgd"],
    "training.inner.refresh_lag": [0],
    "training.inner.momentum": [1.0],
    "training.inner.look_ahead": [-0.1, 4.1],
    "training.staleness_steps": [-1, 1.5],
    "training.inner.largest_side": [100_000],
    "data.inviters": [["nobody"], [AUTHOR.peer] * 17],
    "data.ends": [[-1], [1_000_000], [0] * 65, 7, [True]],
    "data.token_files": ["A" * 40_001, "a.b", "\n"],
    "stages.visit_ratio": [0.99, 2.01, math.nan, math.inf, "1.5"],
    "training.fragments": [0, 65],
    "training.rows": [0],
    "training.round_seconds": [0.0, -1.0, math.inf, math.nan],
    "codecs.pseudo_gradients": ["planes", "top_k_4"],
    "codecs.state": ["int8"],
    "codecs.activations": ["planes"],
}


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        *((path, value, path) for path, values in WRONG_VALUES.items() for value in values),
        ("training.inner", {"refresh_steps": 4, "refresh_lag": 5}, "refresh_lag (5) must be at most refresh_steps (4)"),
        ("training.schedule", {"total_tokens": 640}, "together"),
        ("training.schedule", {"warmup_tokens": 640}, "together"),
        ("training.schedule", {"warmup_tokens": 640, "total_tokens": 640}, "less than total_tokens"),
        ("training.schedule", {"warmup_tokens": -1, "total_tokens": 640}, "warmup_tokens"),
        ("codecs.activations", "fp8", "codecs.activations: Input should be 'none', 'bf16', 'int8' or 'int4'"),
        ("model.residual", -1, "model.residual"),
        ("model.residual", 64, "residual (64) must be less than hidden"),
        ("model", {**SMALL["model"], "residual": 4, "tied_embeddings": True}, "residual needs tied_embeddings = false"),
        ("model.hiden", 64, "model.hiden: unknown key; did you mean hidden?"),
        ("stages.reordering", "adjacent", "stages.reordering: Input should be 'none'"),
    ],
)
def test_an_impossible_a_clashing_or_a_former_value_is_refused(path: str, value: object, why: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(why)):
        manifest_from_table(changed(SMALL, tuple(path.split(".")), value))


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (0.0, -0.0), (0.1, 0.1000000000000000055), (1e-3, 0.001), (5e-1, 0.5)]
)
def test_the_same_number_in_other_words_is_the_same_run(one: float, other: float) -> None:
    keys = ("training", "schedule", "final_ratio")
    assert len({signing.run_id_of(manifest_from_table(changed(SMALL, keys, value))) for value in (one, other)}) == 1


def test_the_text_explains_itself_and_carries_no_comment_of_others() -> None:
    signed = signing.sign_manifest(small(), AUTHOR)
    assert b"# Rows (sequences) per microbatch.\nrows = 4\n" in signed.text
    assert b"# per_path is not set\n" in signed.text
    assert signing.read_signed_manifest(b"# Trust me.\n" + signed.text, signed.run).text == signed.text
    assert max(len(line) for line in signed.text.splitlines()) <= 120


def test_another_run_is_refused_with_both_names() -> None:
    signed = signing.sign_manifest(small(), AUTHOR)
    with pytest.raises(ManifestError) as raised:
        signing.read_signed_manifest(signed.text, RunId("0" * 64))
    assert signed.run in str(raised.value)
    assert "0" * 64 in str(raised.value)


@pytest.mark.parametrize(("signer", "purpose"), [(Identity.generate(), "manifest"), (AUTHOR, "record")])
def test_a_signature_by_another_key_or_for_another_purpose_is_refused(signer: Identity, purpose: str) -> None:
    signature = signer.sign(f"skipstone-{purpose}:".encode() + signing.canonical(small()))
    with pytest.raises(ManifestError, match="not the author's signature"):
        signing.read_signed_manifest(signing.render(small(), AUTHOR.peer, signature), None)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("", "not signed"),
        ('[signature]\nauthor = "x"', "two keys"),
        ('[signature]\nauthor = 1\nvalue = "eA=="', "strings"),
        ('[signature]\nauthor = "x"\nvalue = "*"', "not base64"),
        ('[signature]\nauthor = "x"\nvalue = "eA=="', "1 bytes"),
        (f'[signature]\nauthor = "x"\nvalue = "{"A" * 86}=="', r"signature.author: 'x' is not the peer id"),
        ("[[signature]]", "must be a table"),
    ],
)
def test_a_malformed_signature_is_refused(signature: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        signing.read_signed_manifest(f"{signing.toml_of(small())}\n{signature}\n".encode(), None)


HOSTILE = {
    "not UTF-8": b"\xff\xfe",
    "too long": b"#" * (MAX_MANIFEST_BYTES + 1),
    "deep arrays": b"a = " + b"[" * 60_000,
    "deep closed arrays": b"seed = " + b"[" * 30_000 + b"]" * 30_000,
    "arrays just within the parser's depth": b"seed = " + b"[" * 200 + b"]" * 200,
    "deep inline tables": b"a = " + b"{a=" * 20_000,
    "one deep key": b".".join([b"a"] * 32_000) + b" = 1",
    "deep header with many keys": b"["
    + b".".join([b"a"] * 6_000)
    + b"]\n"
    + b"\n".join(b"k%d=1" % i for i in range(6_000)),
    "digits": b"seed = " + b"1" * 60_000,
    "hexadecimal digits": b"seed = 0x" + b"f" * 60_000,
    "out of 64 bits": b"seed = 9223372036854775808",
    "not a number": b"model.rope_theta = nan",
    "many tables": b"\n".join(b"[a%d]" % i for i in range(8_000)),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_text_ends_in_a_manifest_error(case: str) -> None:
    with pytest.raises(ManifestError):
        manifest_from_table(parse_toml(HOSTILE[case]))
    with pytest.raises(ManifestError):
        signing.read_signed_manifest(HOSTILE[case], None)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_end_in_a_manifest_error(text: bytes) -> None:
    with pytest.raises(ManifestError):
        signing.read_signed_manifest(text, None)


def test_a_strange_key_cannot_write_to_the_terminal() -> None:
    with pytest.raises(ManifestError) as raised:
        manifest_from_table(parse_toml(b'"\\u001b[2J" = 1\n' + signing.toml_of(small()).encode()))
    assert str(raised.value).isprintable()


def test_a_value_that_cannot_be_read_back_is_not_signed() -> None:
    table = changed(SMALL | {"data": {}}, ("data", "source"), "path:" + "." * 100)
    with pytest.raises(ManifestError, match="dots"):
        signing.sign_manifest(manifest_from_table(table), AUTHOR)


@pytest.mark.parametrize(("version", "advice"), [(1, "make a new run"), (99, "a newer Skipstone")])
def test_a_run_of_another_protocol_is_refused_with_a_sentence(version: int, advice: str) -> None:
    with pytest.raises(ManifestError, match=f"needs protocol version {version}; this Skipstone speaks .*{advice}"):
        manifest_from_table({"protocol": version, "whatever": "else"})


def test_a_run_has_4096_modules_at_most() -> None:
    manifest = manifest_from_table(with_experts(65, stages=64))
    assert len(manifest.modules()) == MAX_MODULES
    assert all(manifest.has(module) for module in manifest.modules())
    assert not any(manifest.has(module) for module in (ModuleId(0, 1), ModuleId(64), ModuleId(1, 65)))
    with pytest.raises(ManifestError, match="1024 stages with 1024 experts each make 1047553 modules; a run has 4096"):
        manifest_from_table(with_experts(1024, stages=1024))
    with pytest.raises(ManifestError, match="a run has 4096 at most"):
        manifest_from_table(with_experts(66, stages=64))


def with_experts(experts: object, stages: int = 3, **changes: object) -> Table:
    model = SMALL["model"] | {"attention": "documents"}
    return SMALL | {"model": model, "stages": {"blocks": [1] * stages, "experts": experts}, **changes}


def test_stages_may_have_different_numbers_of_experts() -> None:
    manifest = manifest_from_table(with_experts([1, 3, 1]))
    assert manifest.modules() == (ModuleId(0), *(ModuleId(1, expert) for expert in range(3)), ModuleId(2))
    assert all(manifest.has(module) for module in manifest.modules())
    assert not any(manifest.has(module) for module in (ModuleId(0, 1), ModuleId(1, 3), ModuleId(2, 1)))
    assert [manifest.stages.experts_at(stage) for stage in range(3)] == [1, 3, 1]
    assert manifest.stages.has_experts
    signed = signing.sign_manifest(manifest, AUTHOR)
    assert signing.read_signed_manifest(signed.text, signed.run).manifest == manifest
    # One number is that of every stage but the first.
    assert manifest_from_table(with_experts(2)).stages.experts_of_each == (1, 2, 2)
    assert not manifest_from_table(with_experts(1)).stages.has_experts
    assert manifest_from_table(with_experts([1, 2, 2])).modules() == manifest_from_table(with_experts(2)).modules()


ROUTER = "ab" * 32


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (with_experts([1, 2]), "one for each of the 3 stages"),
        (with_experts([2, 2, 2]), "the first of which is 1"),
        (with_experts([1, 0, 2]), "greater than or equal to 1"),
        (with_experts("2"), "experts"),
        (with_experts(2, model=SMALL["model"]), 'needs model.attention = "documents"'),
        (with_experts(1, routing={"router": ROUTER}), "routing must not be given"),
        (with_experts(2, routing={"router": "ab"}), "routing.router"),
        (with_experts(2, routing={}), "routing.router: missing"),
        (with_experts(2, routing={"router": ROUTER, "reshard": 0.25}), "routing.reshard: unknown key"),
        (with_experts(2, routing={"router": ROUTER, "prefix": 0}), "routing.prefix"),
    ],
)
def test_experts_that_make_no_sense_are_refused(table: Table, why: str) -> None:
    with pytest.raises(ManifestError, match=why):
        manifest_from_table(table)


def test_a_routers_hash_and_prefix_are_in_the_run_id() -> None:
    by_chance = manifest_from_table(with_experts(2))
    routed = manifest_from_table(with_experts(2, routing={"router": ROUTER, "prefix": 64}))
    assert b'"routing"' not in signing.canonical(by_chance)
    assert (by_chance.route_prefix, routed.route_prefix, small().route_prefix) == (256, 64, 0)
    assert signing.run_id_of(by_chance) != signing.run_id_of(routed)
    signed = signing.sign_manifest(routed, AUTHOR)
    assert signing.read_signed_manifest(signed.text, signed.run).manifest == routed


def test_a_schedule_by_tokens_comes_back_from_its_text() -> None:
    """Though its steps, at their defaults, are written beside it."""
    tokens = {"warmup_tokens": 64, "total_tokens": 640}
    made = manifest_from_table(changed(SMALL, ("training", "schedule"), tokens))
    assert made.training.schedule_tokens == (64, 640)
    assert manifest_from_table(parse_toml(signing.toml_of(made).encode())) == made
    steps = small().training
    assert steps.schedule_tokens == (20 * steps.inner_tokens, 1000 * steps.inner_tokens)


RUN = RunId("0123456789abcdef" * 4)
PEER = peer_id_of(bytes(range(32)))
ADDRESS = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
INVITATION = Grant.issue(AUTHOR, RUN, 1, 2**40)

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: not ip.is_unspecified and not ip.is_multicast).map(lambda ip: f"ip4/{ip}"),
    st.ip_addresses(v=6).filter(lambda ip: not ip.is_unspecified and not ip.is_multicast).map(lambda ip: f"ip6/{ip}"),
    st.lists(labels, min_size=1, max_size=4).map(lambda parts: "dns4/" + ".".join(parts)),
    st.lists(labels, min_size=1, max_size=4).map(lambda parts: "dns6/" + ".".join(parts)),
)
ports = st.integers(1, 65_535)
transports = ports.map(lambda port: f"tcp/{port}") | ports.map(lambda port: f"udp/{port}/quic-v1")
peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
addresses = st.builds(lambda host, transport, peer: f"/{host}/{transport}/p2p/{peer}", hosts, transports, peers)
links = st.builds(
    join_link.JoinLink,
    st.text("0123456789abcdef", min_size=64, max_size=64).map(RunId),
    st.lists(addresses, min_size=1, max_size=join_link.MAX_LINK_PEERS).map(tuple),
    st.sampled_from([None, INVITATION]),
)


@given(links)
def test_a_link_round_trips(link: join_link.JoinLink) -> None:
    assert (join_link.parse_link(str(link)), join_link.parse_link(f"  {link}\n")) == (link, link)


@given(st.binary(min_size=16, max_size=16), st.sampled_from([None, INVITATION]))
def test_a_short_link_round_trips_in_one_line(half: bytes, invitation: Grant | None) -> None:
    link = join_link.ShortLink(half.hex(), ("203.0.113.7:4001", "[2001:db8::1]:4002", "node.example:1"), invitation)
    assert join_link.parse_link(f" {link}\n") == link
    assert len(str(join_link.short_link(RUN, link.addresses[:1]))) == 10 + 26 + 1 + len("203.0.113.7:4001")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{'a' * 26}@::1:4001", "not HOST:PORT"),
        (f"{'a' * 26}@203.0.113.7", "not HOST:PORT"),
        (f"{'a' * 26}@203.0.113.7:65536", "not HOST:PORT"),
        (f"{'a' * 26}@[fe80::1%eth0]:1", "not HOST:PORT"),
        (f"{'a' * 26}@" + ",".join(["a:1"] * 17), "17 peers"),
        (f"{'a' * 26}@", "not HOST:PORT"),
        (f"{'a' * 25}b@203.0.113.7:1", "26 characters of base32"),
        (f"{'A' * 26}@203.0.113.7:1", "26 characters of base32"),
    ],
)
def test_a_malformed_short_link_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        join_link.parse_link(f"skipstone:{text}")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_leaves_it_alone(shell: str) -> None:
    link = str(join_link.JoinLink(RUN, (ADDRESS, f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{PEER}"), INVITATION))
    for written in (link, f"'{link}'", f'"{link}"'):
        printed = subprocess.run([shell, "-c", f"printf %s {written}"], capture_output=True, check=True).stdout
        assert printed.decode() == link


def test_the_documented_form() -> None:
    assert str(join_link.JoinLink(RUN, (ADDRESS, ADDRESS))) == f"skipstone:{RUN}@{ADDRESS},{ADDRESS}"
    assert str(join_link.parse_link(join_link.EXAMPLE)) == join_link.EXAMPLE


def test_the_longest_link_is_accepted_and_hosts_are_kept_in_their_shortest_spelling() -> None:
    name = ".".join(["a" * 63] * 3 + ["b" * 61])
    link = join_link.JoinLink(RUN, (f"/dns4/{name}/udp/65535/quic-v1/p2p/{PEER}",) * join_link.MAX_LINK_PEERS)
    assert join_link.parse_link(str(link)) == link
    link = join_link.JoinLink(RUN, (f"/ip6/2001:0DB8:0:0::1/tcp/1/p2p/{PEER}", f"/dns4/Node.Example/tcp/1/p2p/{PEER}"))
    assert link.peers == (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", f"/dns4/node.example/tcp/1/p2p/{PEER}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://example.org", "must begin with 'skipstone:'"),
        (f"skipstone:{RUN}", "no '@'"),
        (f"skipstone:{RUN}@", "is not /HOST-KIND/"),
        (f"skipstone:{RUN[:-1]}@{ADDRESS}", "64 lower-case"),
        (f"skipstone:{RUN.upper()}@{ADDRESS}", "64 lower-case"),
        (f"skipstone:{RUN}@{ADDRESS}, {ADDRESS}", "white space"),
        (f"skipstone:{RUN}@" + ",".join([ADDRESS] * 17), "17 peers"),
        (f"skipstone:{RUN}@" + ADDRESS * 200, "characters"),
    ],
)
def test_a_malformed_link_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        join_link.parse_link(text)
    assert join_link.EXAMPLE in str(raised.value)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (ADDRESS[1:], "is not /HOST-KIND/"),
        (ADDRESS + "/p2p-circuit", "is not /HOST-KIND/"),
        (f"/ip4/127.0.0.1/udp/4001/p2p/{PEER}", "is not /HOST-KIND/"),
        (f"/dnsaddr/node.example/tcp/4001/p2p/{PEER}", "not with ip4, ip6, dns4 or dns6"),
        (f"/ip4/127.0.0.256/tcp/4001/p2p/{PEER}", "not an ip4 address"),
        (f"/ip6/127.0.0.1/tcp/4001/p2p/{PEER}", "not an ip6 address"),
        (f"/ip6/fe80::1%eth0/tcp/4001/p2p/{PEER}", "zone"),
        (f"/ip4/0.0.0.0/tcp/4001/p2p/{PEER}", "can be dialled"),
        (f"/ip4/224.0.0.1/tcp/4001/p2p/{PEER}", "can be dialled"),
        (f"/dns4/{'a' * 64}/tcp/4001/p2p/{PEER}", "host name"),
        (f"/dns4/a\x1b[2J/tcp/4001/p2p/{PEER}", "host name"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}", "1 to 65535"),
        (f"/ip4/127.0.0.1/tcp/٤٠/p2p/{PEER}", "1 to 65535"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not the peer id"),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER[:-1]}", "not the peer id"),
    ],
)
def test_a_malformed_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        join_link.parse_link(f"skipstone:{RUN}@{ADDRESS},{address}")
    assert str(raised.value).isprintable()
    with pytest.raises(ConfigError, match=message):
        join_link.JoinLink(RUN, (address,))
    with pytest.raises(ConfigError, match="names 0 peers"):
        join_link.JoinLink(RUN, ())


@pytest.mark.parametrize("invitation", ["", "AAAA", "A" * 141, "%" * 142, "A" * 8000])
def test_a_malformed_invitation_is_refused(invitation: str) -> None:
    with pytest.raises(ConfigError, match=r"not an invitation|characters"):
        join_link.parse_link(f"skipstone:{RUN}@{ADDRESS}?invitation={invitation}")


@given(st.text(max_size=200) | st.text(max_size=100).map(lambda text: f"skipstone:{RUN}@{ADDRESS}{text}" + "x"))
def test_any_text_ends_in_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        join_link.parse_link(text)


@pytest.mark.parametrize(
    ("host", "multiaddr"),
    [
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/4001"),
        ("2001:db8::1", "/ip6/2001:db8::1/tcp/4001"),
        ("node.example", "/dns4/node.example/tcp/4001"),
    ],
)
def test_a_host_as_a_multiaddr_can_stand_in_a_link(host: str, multiaddr: str) -> None:
    assert join_link.multiaddr_of(host, 4001) == multiaddr
    assert join_link.JoinLink(RUN, (f"{multiaddr}/p2p/{PEER}",)).peers == (f"{multiaddr}/p2p/{PEER}",)
