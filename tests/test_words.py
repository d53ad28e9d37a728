"""The count of odd constructions finds them in code, contracts and documents, and lets plain English pass."""

from pathlib import Path

import pytest

from docs import words

ODD = {
    "a.py": '''"""Of those that wait: nobody knows them."""\n\nraise ValueError("the peer is told what it sent")\n''',
    "b.py": "x = 1  # None where there is none\n",
    "c.proto": "// Of a lost hop, whoever\n// stands there answers.\nmessage Ping {}\n",
    "d.md": "# Title\n\nThe peer\nis told so.\n",
}
PLAIN = {
    "a.py": '''"""Sends a tensor. None if the peer is lost."""\n\nraise ValueError("the peer sent too many bytes")\n''',
    "c.proto": "// Answers a Ping. Sent twice a second.\nmessage Pong {}\n",
    "d.md": "A node hosts a stage.\n\n```\nOf whom nobody\n```\n\nThe field `whoever` is a name.\n",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_constructions_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(ODD[name])
    assert words.hits(tmp_path / name)[1]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_english_passes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(PLAIN[name])
    count, found = words.hits(tmp_path / name)
    assert count > 0
    assert found == []


def test_a_hit_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "d.md").write_text(ODD["d.md"])
    assert {line for line, _ in words.hits(tmp_path / "d.md")[1]} == {4}


def test_every_message_docstring_and_comment_is_read_once() -> None:
    source = '"""A module of ours."""\nx = f"the peer {1} sent nothing at all"  # a remark\n'
    assert len(list(words.python_texts(source))) == 3


@pytest.mark.parametrize("package", [*words.PACKAGES, *words.DOCUMENTS])
def test_limited_packages_keep_the_limit(package: str) -> None:
    count, odd = words.count(words.ROOT / package)
    assert 1000 * odd <= words.LIMIT * count
