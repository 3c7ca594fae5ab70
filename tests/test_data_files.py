"""Reading sources: what is found, in which order, and what a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.base.errors import UserError
from megatrain.data.config import DataConfig
from megatrain.data.files import Skipped, as_sources, check_sources, read_source
from megatrain.data.records import Sample, check_records


def read(source: object, format: str = "auto") -> list[Sample]:
    return list(check_records(read_source(source, format, Skipped()), format))


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffé\r\nb".encode())
    (sample,) = read(tmp_path / "a.txt")
    assert (sample.format, sample.record["text"]) == ("text", "é\nb")


def test_folder_is_its_text_files_by_name(tmp_path: Path) -> None:
    for name in ("b/z.md", "b/a.py", "a.rst", "c", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.bin").write_bytes(b"GIF\0text")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    skipped = Skipped()
    texts = [raw.record["text"] for raw in read_source(tmp_path, "auto", skipped)]
    assert texts == ["a.rst", "b/a.py", "b/z.md", "c"]
    assert skipped.files == ["latin1.txt", "picture.bin"]


def test_folder_of_jsonl_is_its_records(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"text": "2"})
    write_lines(tmp_path / "a.jsonl", {"text": "1"})
    assert [sample.record["text"] for sample in read(tmp_path)] == ["1", "2"]
    (tmp_path / "README.md").write_text("r")
    with pytest.raises(UserError, match=r"a\.jsonl.*data\.format to text"):
        read(tmp_path)
    assert len(read(tmp_path, "text")) == 3


def test_jsonl_array_list_and_dataset_agree(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": "a", "completion": "b", "id": 1}, {"prompt": "c", "completion": "d", "id": 2}]
    lines = write_lines(tmp_path / "a.jsonl", *records)
    lines.write_text("\n" + lines.read_text())
    (tmp_path / "a.json").write_text(json.dumps(records, indent=2))
    from_lines = read(lines)
    assert [sample.where for sample in from_lines] == [f"{lines}, line 2", f"{lines}, line 3"]
    for source in (tmp_path / "a.json", records, datasets.Dataset.from_list(records)):
        assert [sample.record for sample in read(source)] == [sample.record for sample in from_lines]


def test_missing_keys_of_a_dataset_are_none(tmp_path: Path) -> None:
    """A dataset library fills absent columns with None: that is no second format."""
    assert read([{"text": "a", "prompt": None, "messages": None}])[0].format == "text"


def test_builtin_source() -> None:
    first = next(iter(read_source("builtin:python-docs", "auto", Skipped())))
    assert first.where == "builtin:python-docs, row 1"
    with pytest.raises(UserError, match="builtin:nothing does not exist.*python-docs"):
        check_sources(["builtin:nothing"])


def test_sources_one_or_several() -> None:
    assert as_sources("a") == ["a"]
    assert as_sources(["a", "b"]) == ["a", "b"]
    assert as_sources([{"text": "a"}]) == [[{"text": "a"}]]


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file or folder: .*absent\.txt.*hf:NAME"):
        check_sources([tmp_path / "absent.txt"])


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, r"could not be loaded \(ConnectionError: not here\)"),
        (
            ConnectionError("nobody\nthere"),
            r"could not be loaded \(the Hub: no answer, ConnectionError: nobody, and no",
        ),
        (OSError(), r"could not be loaded \(the Hub: no answer, OSError, and no copy of it is here\)"),
    ],
)
def test_hub_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, answer: Exception | None, told: str) -> None:
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def dataset_info(self: object, name: str, *, timeout: float) -> None:
        assert timeout <= 10
        if answer is not None:
            raise answer

    def load_dataset(*args: object, **options: object) -> None:
        is_off = datasets.config.HF_HUB_OFFLINE and huggingface_hub.constants.HF_HUB_OFFLINE
        asked.append((args, options, is_off))
        raise ConnectionError("not here")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="hf:owner/name:fr:test " + told):
        read("hf:owner/name:fr:test")
    # A Hub that is silent is not asked again and again.
    assert asked == [(("owner/name", "fr"), {"split": "test"}, answer is not None)]
    assert not datasets.config.HF_HUB_OFFLINE and not huggingface_hub.constants.HF_HUB_OFFLINE


BAD_RECORDS = [
    ([{"text": "a"}, {"txt": "b"}], r"line 2: needs `text` \(as .*line 1 has\) but has keys txt"),
    ([{"content": "a"}], r"line 1: found keys content; rename them to `text`, or `prompt`"),
    ([{"text": "a", "messages": []}], r"line 1: keys fit several formats \(text, messages\); set data\.format"),
    ([{"text": "a"}, {"prompt": "a", "completion": "b"}], r"line 2: needs `text`"),
    ([{"prompt": "a"}], r"line 1: found keys prompt"),
    ([{"text": 5}], r"line 1: `text` is a int, not a string"),
    ([["a"]], r"line 1: a list where an object"),
    ([{"messages": []}], r"line 1: `messages` must be a list of at least one"),
    ([{"messages": [{"role": "user", "content": "a"}]}], r"line 1: no assistant turn"),
    ([{"messages": [{"role": "human", "content": "a"}]}], r"line 1, message 1: role 'human' is unknown.*assistant"),
    ([{"messages": [{"from": "human", "value": "a"}]}], r"line 1, message 1: must be an object like"),
    ([{"messages": [{"role": "assistant", "content": ["a"]}]}], r"message 1: `content` is list, not a string"),
    ([{"messages": [{"role": "assistant"}]}], r"message 1: `content` is NoneType"),
]


@pytest.mark.parametrize(("records", "message"), BAD_RECORDS)
def test_bad_record_names_line_and_remedy(tmp_path: Path, records: list, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(write_lines(tmp_path / "bad.jsonl", *records))
    assert str(caught.value).startswith(str(tmp_path / "bad.jsonl"))


def test_format_chooses_among_keys(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "a", "prompt": "b", "completion": "c"})
    assert read(path, "prompt_completion")[0].format == "prompt_completion"
    with pytest.raises(UserError, match=r"needs `messages` \(data\.format says so\)"):
        read(path, "messages")


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: not valid JSON .*column \d+"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('[{"text": "a"},\n]')
    with pytest.raises(UserError, match=r"a\.json, line 2: not valid JSON"):
        read(tmp_path / "a.json")


LONE = "\\ud83d"
"""As it stands in a JSON file: half of a character."""
WITH_HALF_A_CHARACTER = {
    "text": f'{{"text": "ab {LONE}"}}',
    "completion": f'{{"prompt": "a", "completion": "{LONE}"}}',
    "messages": f'{{"messages": [{{"role": "user", "content": "{LONE}"}}, {{"role": "assistant", "content": "b"}}]}}',
}


@pytest.mark.parametrize("key", WITH_HALF_A_CHARACTER)
def test_half_a_character_is_refused_with_file_line_and_key(tmp_path: Path, key: str) -> None:
    file = tmp_path / "a.jsonl"
    line = WITH_HALF_A_CHARACTER[key]
    file.write_text(line.replace(LONE, LONE + "\\ude00") + "\n" + line, encoding="utf-8")
    with pytest.raises(UserError, match=rf"a.jsonl, line 2: `{key}` has half a character .*ud83d.*remove it"):
        read(file)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xe9")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 text \(byte 2\); convert"):
        read(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not UTF-8"):
        read(tmp_path / "a.jsonl")


BAD_SETTINGS = [
    ({"format": "json"}, "data.format is 'json'; use one of auto"),
    ({"sequence_length": 1}, "data.sequence_length is 1; use 8 or more"),
    ({"eval_fraction": 1.5}, "data.eval_fraction is 1.5"),
    ({"eval_fraction": 0.1, "eval_path": "b"}, "both set"),
    ({"max_samples": 0}, "data.max_samples is 0"),
    ({"eval_samples": 5}, "nothing is held out"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_setting_is_named(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**{"path": "a", "sequence_length": 64, **settings})
