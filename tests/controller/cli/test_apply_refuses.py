"""Jobs that cannot be: said with file, line or field, exit code 1, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from everstep.controller.cli.jobfile import read_jobs
from everstep.controller.cli.main import app
from everstep.controller.local.checkpoint_folder import check_checkpoint_folder
from jobs import job_document


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_LOCAL_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def _apply(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["local", "apply", *words], input=stdin)


def _refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    done = _apply("-f", str(path))
    assert done.exit_code == 1
    assert not (tmp_path / "state").exists()
    return done.stderr


def _document(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return job_document(folder=tmp_path, words=("python", "train.py"), **options)


def _container(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]["template"]["spec"]["containers"][0]
    return found


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = _apply("-f", "nowhere.yaml")
    assert done.exit_code == 1
    assert done.stderr == 'error: the path "nowhere.yaml" does not exist\n'
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "yaml: line 3: "),
        ("a: 1\n\tb: 2\n", "yaml: line 2: "),
        ("kind: MultiSliceJob\nkind: Job\n", "yaml: line 2: key 'kind' already set in map"),
        ("", "error: no objects passed to apply"),
        ("--- \n---\n", "error: no objects passed to apply"),
        ("just words", "found the text 'just words', expected a mapping"),
        ("- 1\n- 2\n", "found a list of 2, expected a mapping"),
        ("a: !!python/object:os.system x\n", "yaml: line 1: "),
    ],
    ids=["open bracket", "tab", "twice", "empty", "only dashes", "text", "list", "python tag"],
)
def test_text_that_is_no_job_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in _refused(tmp_path, text)


def test_a_misspelt_field_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    document = _document(tmp_path)
    document["spec"]["slices"]["desird"] = document["spec"]["slices"].pop("desired")
    said = _refused(tmp_path, yaml.safe_dump(document))
    assert 'The MultiSliceJob "llm" is invalid' in said
    assert "spec.slices.desird" in said
    assert "desired" in said


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    document = _document(tmp_path)
    document["spec"]["slices"] |= {"min": 5, "max": 1}
    document["spec"]["checkpoint"]["everySteps"] = 0
    said = _refused(tmp_path, yaml.safe_dump(document))
    assert "* spec.slices.min: " in said
    assert "* spec.checkpoint.everySteps: " in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"command": ["python", "trian.py"]},
            "containers[0].command[1]: found 'trian.py', expected a script that exists in",
        ),
        (
            {"command": ["python"], "args": ["-W", "error", "-u", "trian.py"]},
            "containers[0].args[3]: found 'trian.py', expected a script that exists in",
        ),
        (
            {"command": ["no-such-program", "train.py"]},
            "containers[0].command[0]: found 'no-such-program', expected a program that is on",
        ),
        (
            {"command": ["./train.py"]},
            "containers[0].command[0]: found './train.py', expected a program that can be run",
        ),
        (
            {"workingDir": "not-there"},
            "containers[0].workingDir: found '",
        ),
    ],
    ids=["script", "script in args", "program", "not executable", "folder"],
)
def test_a_program_that_is_not_there_is_named(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    document = _document(tmp_path)
    _container(document).update(change)
    assert said in _refused(tmp_path, yaml.safe_dump(document))


def test_what_only_a_cluster_can_do_is_refused(tmp_path: Path) -> None:
    document = _document(tmp_path, slices=300)
    said = _refused(tmp_path, yaml.safe_dump(document))
    assert "spec.slices.desired: found 300, expected at most 254 slices" in said


def test_a_bucket_that_is_no_address_is_refused(tmp_path: Path) -> None:
    document = _document(tmp_path)
    document["spec"]["checkpoint"]["uri"] = "s3://bucket/llm"
    said = _refused(tmp_path, yaml.safe_dump(document))
    assert "spec.checkpoint.uri: found" in said
    assert "s3://bucket/llm" in said


def test_of_two_jobs_none_is_created_when_one_is_wrong(tmp_path: Path) -> None:
    good, bad = _document(tmp_path), _document(tmp_path)
    bad["metadata"]["name"] = "Not A Name"
    assert "metadata.name" in _refused(tmp_path, yaml.safe_dump_all([good, bad]))


def test_the_same_job_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    document = _document(tmp_path)
    assert "more than once" in _refused(tmp_path, yaml.safe_dump_all([document, document]))


def test_a_bad_timeout_is_found_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(_document(tmp_path)))
    done = _apply("-f", str(path), "--wait", "--timeout", "soon")
    assert done.exit_code == 2
    assert "--timeout: found 'soon', expected a duration" in done.stderr
    assert not (tmp_path / "state").exists()


def test_no_file_at_all_is_a_usage_error() -> None:
    done = _apply()
    assert done.exit_code == 2


def _with_uri(tmp_path: Path, uri: str) -> str:
    document = _document(tmp_path)
    document["spec"]["checkpoint"]["uri"] = uri
    return yaml.safe_dump(document)


@pytest.mark.parametrize("form", ["file://{}", "{}"])
@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("file", "a file at {place}"),
        ("file/below", "a file at {file}, above {place}"),
        ("foreign", "something else in {place} (mine.csv, notes.txt)"),
        ("/proc/nope", "/proc/nope cannot be made (/proc: No such file or directory)"),
        ("/proc/nope/below", "/proc/nope/below cannot be made (/proc: No such file or directory)"),
    ],
)
def test_a_checkpoint_folder_of_this_machine_that_cannot_be_one_is_refused(
    tmp_path: Path, place: str, found: str, form: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    for name in ("notes.txt", "mine.csv"):
        (tmp_path / "foreign" / name).write_text("")
    where = str(tmp_path / place)
    said = _refused(tmp_path, _with_uri(tmp_path, form.format(where)))
    wanted = found.format(place=where, file=tmp_path / "file")
    assert f"spec.checkpoint.uri: found '{wanted}', expected " in said
    assert sorted(one.name for one in (tmp_path / "foreign").iterdir()) == ["mine.csv", "notes.txt"]


@pytest.mark.parametrize(
    "made",
    [
        (),
        ("here/",),
        ("here/lost+found/",),
        ("here/_everstep/ledger/", "here/a.txt"),
        ("here/12/",),
    ],
    ids=["nothing", "empty", "a fresh disk", "a run", "maybe steps of Orbax"],
)
def test_a_folder_that_can_be_a_runs_is_accepted_and_nothing_is_left_in_it(
    tmp_path: Path, made: tuple[str, ...]
) -> None:
    for name in made:
        path = tmp_path / name
        path.mkdir(parents=True) if name.endswith("/") else path.write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert check_checkpoint_folder(f"file://{tmp_path}/here") is None
    assert check_checkpoint_folder("gs://bucket/run") is None
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, "{a: " * 5000 + "1" + "}" * 5000])
def test_text_that_is_nested_too_deep_is_said_in_words_of_the_file(
    tmp_path: Path, text: str
) -> None:
    said = _refused(tmp_path, text)
    assert said.endswith("job.yaml: yaml: nested too deep to be read; a job has a dozen levels\n")
    assert "recursion" not in said


def test_a_status_in_the_file_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(_document(tmp_path) | {"status": {"phase": "Running"}}))
    (job,) = read_jobs(str(path))
    said = capsys.readouterr().err
    assert said == (
        f'Warning: multislicejob "{job.metadata.name}": status is passed over: the controller '
        "writes it\n"
    )
    path.write_text(yaml.safe_dump(_document(tmp_path)))
    read_jobs(str(path))
    assert capsys.readouterr().err == ""
