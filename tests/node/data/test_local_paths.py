"""What may be opened for a run's text, and on whose word."""

from pathlib import Path

import pytest

from node.data.local_paths import NO_LOCAL_PATHS, LocalPathOptions, LocalPaths, as_written, local_paths, tokenizer_path
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError

SHA = "0" * 64
HERE = Path("/here")


@pytest.mark.parametrize("source", ["path:~/.ssh", "path:/etc/passwd", "path:corpus", "path:."])
def test_no_path_of_somebody_else_s_manifest_is_opened(source: str) -> None:
    place = local_paths(DataSection(source=source), NO_LOCAL_PATHS, own=False)
    assert place.value is None
    assert "--text" in place.reason
    assert source.removeprefix("path:") in place.reason


def test_the_person_s_word_counts_whoever_signed_and_whatever_the_manifest_says() -> None:
    for own in (True, False):
        place = local_paths(DataSection(source="path:/elsewhere"), LocalPathOptions(text=HERE), own=own)
        assert (place.value, place.reason) == (LocalPaths(HERE), "given by --text")


def test_one_s_own_manifest_is_believed() -> None:
    places = {"corpus/": Path("corpus"), "../corpus": Path("../corpus"), "~/corpus": Path.home() / "corpus"}
    for source, place in places.items():
        assert local_paths(DataSection(source=f"path:{source}"), NO_LOCAL_PATHS, own=True).value == LocalPaths(place)


@pytest.mark.parametrize("source", ["path:~/.ssh", "path:/home/u/.gnupg/x", "path:.netrc"])
def test_a_hidden_place_is_named_by_the_person_or_by_nobody(source: str) -> None:
    assert local_paths(DataSection(source=source), NO_LOCAL_PATHS, own=True).value is None
    told = Path(source.removeprefix("path:"))
    assert local_paths(DataSection(source=source), LocalPathOptions(text=told), own=False).value == LocalPaths(told)


def test_the_tokenizer_likewise() -> None:
    data = DataSection(tokenizer="file:/there/t.json", tokenizer_sha256=SHA)
    refused = tokenizer_path(data, None, own=False)
    assert refused.value is None
    assert "--tokenizer" in refused.reason
    assert local_paths(data, NO_LOCAL_PATHS, own=False).value == LocalPaths(), (
        "it is no file of this machine; peers have it"
    )
    assert local_paths(data, LocalPathOptions(tokenizer=HERE), own=False).value == LocalPaths(None, HERE)
    assert local_paths(data, NO_LOCAL_PATHS, own=True).value == LocalPaths(None, Path("/there/t.json"))


def test_a_tokenizer_that_nobody_has_named_is_left_to_the_peers_and_text_is_not() -> None:
    data = DataSection(source="path:x", tokenizer="file:t.json", tokenizer_sha256=SHA)
    assert local_paths(data, LocalPathOptions(text=HERE), own=False).value == LocalPaths(HERE)
    assert local_paths(data, LocalPathOptions(tokenizer=HERE), own=False).value is None
    assert local_paths(data, LocalPathOptions(text=HERE, tokenizer=HERE), own=False).value == LocalPaths(HERE, HERE)


def test_a_hub_is_asked_only_with_leave() -> None:
    data = DataSection(source="huggingface:some/set", revision="0" * 40, dealt_by="files")
    refused = local_paths(data, NO_LOCAL_PATHS, own=False)
    assert refused.value is None
    assert "--allow-hub" in refused.reason
    assert local_paths(data, LocalPathOptions(hub=True), own=False).value == LocalPaths()
    assert local_paths(DataSection(), NO_LOCAL_PATHS, own=False).value == LocalPaths(), "every machine has this text"
    assert local_paths(data, NO_LOCAL_PATHS, own=True).value == LocalPaths()


def test_whoever_runs_his_own_manifest_has_named_its_places() -> None:
    data = DataSection(source="path:~/.text", tokenizer="file:t.json", tokenizer_sha256=SHA)
    assert as_written(data) == LocalPaths(Path.home() / ".text", Path("t.json"))
    assert as_written(DataSection()) == LocalPaths()


def test_a_home_that_nobody_has_is_said() -> None:
    with pytest.raises(ConfigError, match="~nobody-of-that-name"):
        local_paths(DataSection(source="path:~nobody-of-that-name/text"), NO_LOCAL_PATHS, own=True)
