"""What people mistype, and what means nothing: one line for each problem, exit code 2, nothing half-written.

A table: command, words, and what the answer says. Every answer is plain text without a traceback, and the folder the
command was given in is as it was.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from routing_lab.config import identity, load, run_folder
from routing_lab.runs.files import write_json

STUDY = """
question: Is it so?
hypothesis: {statement: It is., predicted: {it: positive}}
seeds: [0, 1, 2]
common: [train.epochs=0, wandb.mode=disabled]
arms:
  one: [router=amod]
  two: [router=random]
reference: two
contrasts:
  it: {arms: [one, two], differ_in: router}
decision:
  rules: [{verdict: supports, says: it is, when: {it: positive}}]
  otherwise: {verdict: mixed, says: it is not}
scales: {toy: {overrides: [], seconds_per_cell: 1, machine: a laptop}}
"""

RECORD = {
    "schema": 1,
    "run_id": "1",
    "name": "good",
    "status": "finished",
    "seed": 0,
    "metrics": {"test/acc": 0.5},
    "config": {"router": {"name": "amod"}},
}

LONG = "x" * 300
DEEP = "/".join(["x" * 200] * 30)

TRAIN: list[tuple[str, str]] = [
    # keys and groups
    ("rooter=amod", "rooter = amod: no such key"),
    ("router=amodd", "router = amodd: no such member; did you mean amod?"),
    ("router=", "router"),
    ("router=null", "router"),
    ("scaling=triple", "scaling = triple: no such member"),
    ("capacity=top_k", "capacity = top_k: no such member; did you mean topk?"),
    ("placement=somewhere", "placement = somewhere: no such member"),
    ("bypass=teleport", "bypass = teleport: no such member"),
    ("visibility=none", "visibility = none: no such member"),
    ("backbone=resnet50", "backbone = resnet50: no such member"),
    ("data=mnist", "data = mnist: no such member"),
    ("init=zeros", "init = zeros: no such member"),
    ("recipe=slow", "recipe = slow: no such member"),
    ("method=alchemy", "method = alchemy: no such member"),
    ("losses=[rato]", "losses"),
    ("losses=ratio losses.ratio.weight=-1", "losses.ratio.weight = -1"),
    ("losses.z.weight=1", "losses.z.weight"),
    ("hydra/launcher=slrm", "hydra/launcher = slrm: no such member"),
    ("router.alpha=1", "router.alpha = 1: no such key"),
    ("capacity.fractoin=0.5", "capacity.fractoin = 0.5: no such key; did you mean fraction?"),
    ("train.learning_rate=1", "train.learning_rate = 1: no such key"),
    ("a b", "is not a valid override"),
    ("seed", "is not a valid override"),
    ("=3", "is not a valid override"),
    ("data.path=été data=image_folder", "quoted once for the shell and once for Hydra: \"data.path='été'\""),
    ("paths.runs=~/x", "quoted once for the shell and once for Hydra: \"paths.runs='~/x'\""),
    ("seed=[", "is not a valid override"),
    ("seed=1 seed=", "seed"),
    # seed and name
    ("seed=-1", "seed = -1: must be a whole number at least 0"),
    ("seed=1.5", "seed = 1.5: must be a whole number"),
    ("seed=one", "seed = one: must be a whole number"),
    ("seed=null", "seed"),
    ("seed=true", "seed"),
    ("seed=18446744073709551616", "seed = 18446744073709551616: must be a whole number at least 0 and less than"),
    ("seed=0,1", "several values need -m"),
    ("seed=range(3)", "several values need -m"),
    ("name=..", "name = ..: must"),
    ("name=.hidden", "name = .hidden: must"),
    ("name=-rf", "name = -rf: must"),
    ("name=a/b", "name = a/b: must"),
    ("'name=a b'", "name = a b: must"),
    ("name=", "name"),
    (f"name={LONG}", "must be text"),
    ("arm=a/b", "arm = a/b: must"),
    ("'arm=a b'", "arm = a b: must"),
    ("arm=..", "arm = ..: must"),
    ("study=../x", "study = ../x: must"),
    ("rerun=maybe", "rerun = maybe: must be true or false"),
    ("rerun=1", "rerun = 1: must be true or false"),
    # capacity
    ("capacity.fraction=0", "capacity.fraction = 0"),
    ("capacity.fraction=1.5", "capacity.fraction = 1.5"),
    ("capacity.fraction=-0.5", "capacity.fraction = -0.5"),
    ("capacity.fraction=nan", "capacity.fraction"),
    ("capacity.fraction=inf", "capacity.fraction"),
    ("capacity.fraction=half", "capacity.fraction = half"),
    ("capacity.fraction=[]", "capacity.fraction"),
    ("capacity.fraction=[0.5,0]", "capacity.fraction[1] = 0"),
    ("capacity.fraction=null", "capacity.fraction"),
    ("capacity.order=middle", "capacity.order = middle: must be one of highest, lowest"),
    ("capacity.protect=all", "capacity.protect = all: must be one of"),
    ("capacity.protect_count=both", "capacity.protect_count = both: must be one of inside, beside"),
    ("capacity.persist=maybe", "capacity.persist = maybe: must be one of"),
    ("capacity.warmup=1", "capacity.warmup = 1"),
    ("capacity.rounding=up", "capacity.rounding = up: must be one of floor, ceil, round"),
    ("capacity=percentile capacity.compare=eq", "capacity.compare = eq: must be one of"),
    ("capacity=threshold capacity.threshold=high", "capacity.threshold = high"),
    ("capacity=argmax", "capacity"),
    # placement
    ("placement=list placement.layers=[]", "placement.layers"),
    ("placement=list placement.layers=[99]", "placement.layers"),
    ("placement=list placement.layers=[-1]", "placement.layers"),
    ("placement=list placement.layers=[1,1]", "placement.layers"),
    ("placement.first=0", "placement"),
    ("placement.first=99", "placement"),
    ("placement.stride=0", "placement.stride = 0"),
    ("placement.sublayer=head", "placement.sublayer = head: must be one of"),
    ("placement.active=never", "placement.active = never: must be one of"),
    ("placement.attention_source=99", "placement.attention_source"),
    ("placement.lag=0", "placement.lag = 0"),
    # other axes
    ("router.corrupt=burn", "router.corrupt = burn: must be one of"),
    ("router.corrupt_strength=-1", "router.corrupt_strength = -1"),
    ("router.attention=none", "router.attention = none: must be one of"),
    ("router.detach=perhaps", "router.detach = perhaps: must be true or false"),
    ("router=subspace router.dims=[]", "router.dims"),
    ("scaling=multiply scaling.normalize=max", "scaling.normalize = max: must be one of"),
    ("bypass=project", "bypass"),
    ("bypass=fuse bypass.temperature=0", "bypass.temperature = 0"),
    ("bypass=merge bypass.merged=-1", "bypass.merged"),
    ("router=cls_attention backbone.class_token=false backbone.pool=avg", "class"),
    # backbone
    ("backbone.width=0", "backbone.width = 0"),
    ("backbone.width=65", "backbone.width"),
    ("backbone.depth=0", "backbone.depth = 0"),
    ("backbone.heads=7", "backbone"),
    ("backbone.patch_size=3", "backbone"),
    ("backbone.image_size=0", "backbone.image_size = 0"),
    ("backbone.dropout=1", "backbone.dropout = 1"),
    ("backbone.drop_path=-0.1", "backbone.drop_path = -0.1"),
    ("backbone.registers=-1", "backbone.registers = -1"),
    ("backbone.pool=max", "backbone.pool = max: must be one of"),
    ("backbone=timm backbone.timm_name=nosuch", "backbone.timm_name"),
    ("backbone=llama_micro", "backbone"),
    # recipe
    ("train.epochs=-1", "train.epochs = -1: must be a whole number at least 0"),
    ("train.epochs=1.5", "train.epochs = 1.5"),
    ("train.epochs=ten", "train.epochs = ten"),
    ("train.batch_size=0", "train.batch_size = 0"),
    ("train.eval_batch_size=0", "train.eval_batch_size = 0"),
    ("train.accumulate=7", "train.accumulate = 7"),
    ("train.lr=0", "train.lr = 0"),
    ("train.lr=-1", "train.lr = -1"),
    ("train.lr=fast", "train.lr = fast: must be a number"),
    ("train.min_lr=1", "train.min_lr = 1: expected at most train.lr"),
    ("train.weight_decay=-1", "train.weight_decay = -1"),
    ("train.betas=[0.9]", "train.betas"),
    ("train.betas=[0.9,1]", "train.betas"),
    ("train.momentum=1", "train.momentum = 1"),
    ("train.layer_decay=0", "train.layer_decay = 0"),
    ("train.clip_grad=0", "train.clip_grad = 0"),
    ("train.schedule=zigzag", "train.schedule = zigzag: must be one of"),
    ("train.warmup_epochs=-1", "train.warmup_epochs = -1"),
    ("train.precision=8", "train.precision = 8: must be one of"),
    ("train.precision=16-mixed runtime.accelerator=cpu", "train.precision = 16-mixed"),
    ("train.ema_decay=1", "train.ema_decay = 1"),
    ("train.label_smoothing=1", "train.label_smoothing = 1"),
    ("train.augment=wild", "train.augment = wild: must be one of"),
    ("train.mixup=-1", "train.mixup = -1"),
    ("train.mixup=0.5 train.batch_size=63", "train.batch_size = 63"),
    ("train.cutmix=0.5 train.batch_size=6 train.accumulate=2", "train.batch_size = 6"),
    ("train.mixup_prob=2", "train.mixup_prob = 2"),
    ("train.erasing=2", "train.erasing = 2"),
    ("train.distill=warm", "train.distill = warm: must be one of"),
    ("train.distill=soft train.distill_teacher=initial", "train.distill_teacher = initial"),
    ("train.distill_temperature=0", "train.distill_temperature = 0"),
    ("train.selection=luck", "train.selection = luck: must be one of"),
    ("train.optimizer=", "train.optimizer"),
    ("init=dense train.epochs=0", "init.epochs"),
    # data
    ("data=image_folder", "data.path: must be given"),
    ("data=image_folder data.path=nowhere", "data.path = nowhere: nothing there"),
    ("data=image_folder data.path=empty", "data.path = empty: no images in class folders there"),
    ("data=image_folder data.path=file.txt", "data.path = file.txt: cannot be read as a ZIP archive"),
    ("data=image_folder data.path=pipe", "it is a pipe"),
    ("data=image_folder data.path=nowhere data.duplicates=maybe", "data.duplicates = maybe: must be one of"),
    ("data=image_folder data.path=nowhere data.val_fraction=0", "data.val_fraction = 0"),
    ("data=image_folder data.path=nowhere data.test_fraction=0.9 data.val_fraction=0.2", "leave nothing to train on"),
    ("data=cifar10 data.root=nowhere", "data.root = nowhere: cifar10 is not there"),
    ("data=imagenet data.root=nowhere", "data.root = nowhere: no folder 'train'"),
    ("data=imagenet100 data.root=nowhere", "data.root = nowhere"),
    ("data=digits data.num_classes=9", "data.num_classes = 9"),
    ("data.mean=[0.5,0.5]", "data.mean"),
    ("data.std=[0.0]", "data.std"),
    ("data=planted data.num_classes=1", "data.num_classes = 1"),
    ("data=planted data.num_train=0", "data.num_train = 0"),
    ("data=planted data.noise=-1", "data.noise = -1"),
    ("data=planted data.num_informative=99", "data.num_informative"),
    ("data=planted train.augment=standard", "train.augment = standard"),
    ("data=planted train.augment=randaugment", "train.augment = randaugment"),
    ("data=planted data.seed=18446744073709551616", "data.seed = 18446744073709551616"),
    # init
    ("init=checkpoint", "init.path: must be given"),
    ("init=checkpoint init.path=nowhere.pth", "init.path = nowhere.pth: no such file"),
    ("init=checkpoint init.path=empty", "init.path = empty: no such file"),
    ("init=checkpoint init.path=file.txt init.entry=", "init.entry"),
    # runtime, tracking, folders
    ("runtime.accelerator=quantum", "runtime.accelerator = quantum: must be one of"),
    ("runtime.devices=0", "runtime.devices = 0"),
    ("runtime.workers=-1", "runtime.workers = -1"),
    ("runtime.threads=0", "runtime.threads = 0"),
    ("runtime.verify=twice", "runtime.verify = twice: must be one of stat, content"),
    ("wandb.mode=loud", "wandb.mode = loud: must be one of"),
    ("paths.runs=file.txt", "paths.runs = file.txt: is a file"),
    ("paths.runs=file.txt/runs", "paths.runs = file.txt/runs: "),
    ("paths.runs=/proc/nowhere", "paths.runs = /proc/nowhere: "),
    ("paths.runs=", "paths.runs"),
    ("isoflop.by=height", "isoflop.by = height: must be one of"),
    ("isoflop.tolerance=-1", "isoflop.tolerance = -1"),
    # sweeps
    ("seed=interval(0,1) -m", "seed = interval(0,1)"),
    ("seed=range(0,0) -m", "seed = range(0,0)"),
    ("seed=0,-1 -m", "seed = -1: must be a whole number at least 0"),
    ("router=amod,amodd -m", "router = amodd: no such member"),
    ("capacity.fraction=0.5,2 -m", "capacity.fraction = 2"),
    ("seed=range(3,0) -m", "seed = range(3,0)"),
    ("capacity.fraction=interval(0.1,0.9) -m", "capacity.fraction = interval(0.1,0.9)"),
    ("hydra.sweep.dir=file.txt/x -m", "hydra.sweep.dir = file.txt/x: "),
    ("hydra.sweep.dir=/proc/x -m", "hydra.sweep.dir = /proc/x: "),
    ("paths.runs=file.txt seed=0,1 -m", "paths.runs = file.txt: is a file"),
    ("hydra.run.dir=file.txt", "hydra.run.dir = file.txt: is a file"),
    ("hydra.run.dir=/proc/x", "hydra.run.dir = /proc/x: "),
    (f"paths.runs={LONG}", "a part of it has 300 bytes"),
    (f"paths.runs={DEEP}", "bytes, which leaves no room for the names of files"),
    (f"hydra.run.dir={DEEP}", "bytes, which leaves no room for the names of files"),
    ("hydra/launcher=submitit_slurm seed=0,1 -m", "hydra/launcher = submitit_slurm: needs SLURM's program srun"),
    ("arm=${oc.env:NOWHERE} -m", "arm = ${oc.env:NOWHERE}: cannot be resolved"),
    ("name=${oc.env:PWD}", "name = /"),
    # options
    ("--config-name nosuch", "--config-name = nosuch: "),
    ("--config-path /nope", "--config-path = /nope: no such folder"),
    ("--config-dir nope", "--config-dir = nope: no such folder"),
]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "small.yaml").write_text(STUDY)
    (tmp_path / "broken.yaml").write_text("name: [")
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "file.jsonl").write_text("{")
    odd = STUDY.replace("one:", "a b:").replace("[one, two]", "[a b, two]")
    arms = "".join(f'  "{name}": [router=linear]\n' for name in ("a/b", "a,b", "${oc.env:HOME}"))
    (tmp_path / "spaced.yaml").write_text(odd.replace("reference:", arms + "reference:"))
    (tmp_path / "measured.yaml").write_text(f"metric: test/nonsense{STUDY}")
    (tmp_path / "seeded.yaml").write_text(STUDY.replace("[0, 1, 2]", "[18446744073709551616, 1, 2]"))
    (tmp_path / "two words.yaml").write_text(STUDY)
    (tmp_path / "runs" / "good-1").mkdir(parents=True)
    write_json(tmp_path / "runs" / "good-1" / "run.json", RECORD)
    return tmp_path


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def refused(command: str, words: list[str], capfd: pytest.CaptureFixture[str], scene: Path) -> list[str]:
    """The lines a command answers a mistake with."""
    before = listing(scene)
    code: Any = 0
    try:
        code = import_module(f"routing_lab.{command}").main(words)
    except SystemExit as left:
        code = left.code
    out, err = capfd.readouterr()
    assert code == 2, (code, out, err)
    assert "Traceback" not in out + err
    assert listing(scene) == before
    assert all(line.isprintable() for line in err.splitlines())
    return err.splitlines()


def identifier(value: Any) -> str:
    return str(value)[:60]


@pytest.mark.parametrize(("words", "said"), TRAIN, ids=identifier)
def test_train_refuses(
    words: str, said: str, scene: Path, trained: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    lines = refused("train", shlex.split(words), capfd, scene)
    assert any(said in line for line in lines), lines
    assert len(lines) <= 4
    assert trained == []


REPORT = [
    ("nowhere", "nowhere: not a folder"),
    ("file.txt", "file.txt: not a folder"),
    ("empty", "no runs"),
    ("empty --out here", "no runs"),
    ("runs --out file.txt", "--out = file.txt: is a file"),
    ("runs --out file.txt/x", "--out = file.txt/x: "),
    ("runs --out /proc/x", "--out = /proc/x: "),
    ("runs --out runs/good-1/run.json/x", "run.json is a file"),
    (f"runs --out {LONG}", "a part of it has 300 bytes"),
    (f"runs --out {DEEP}", "bytes, which leaves no room for the names of files"),
    ("runs --claims nope.yaml", "--claims = nope.yaml: no such file"),
    ("runs --claims list.yaml", "list.yaml"),
    ("runs --claims small.yaml", "small.yaml"),
    ("small.yaml", "no runs of study small there"),
    ("empty.yaml", "empty: question={'name': 'empty'}: Field required"),
    ("nope.yaml", "nope.yaml"),
    ("broken.yaml", "broken.yaml"),
    ("list.yaml", "list.yaml"),
    ("small.yaml --runs nope", "nope: not a folder"),
    ("empty --format pdf", "unrecognized arguments"),
]

OTHERS = [
    ("dashboard", "nope.yaml", "nope.yaml: no such file"),
    ("dashboard", "small.yaml --runs nope", "--runs = nope: not a folder"),
    ("dashboard", "small.yaml --spec a/b/c.json", "--spec = a/b/c.json: a/b: no such folder"),
    ("dashboard", "small.yaml --spec empty", "--spec = empty: is a folder"),
    ("dashboard", "small.yaml --spec file.txt/x", "--spec = file.txt/x: file.txt: no such folder"),
    ("dashboard", "small.yaml --scale huge", "scale='huge'"),
    ("probe", "nowhere probe=selection", "RUN = nowhere: is no run folder"),
    ("probe", "probe=selection", "at least one run folder is expected"),
    ("probe", "runs/good-1 probe=nosuch", "probe = nosuch"),
    ("probe", "runs/good-1 sample.nosuch=1", "sample.nosuch = 1: no such key"),
    ("look", "nowhere", "nowhere"),
    ("look", "runs/good-1", "config.yaml"),
]

REMARKS = [
    ("train.batch_size=5000", "train.batch_size=5000 is above the 1257 training examples"),
    ("data=planted train.erasing=0.5", "train.erasing=0.5 takes out or mixes planted patches"),
    ("data=planted train.mixup=0.5", "train.mixup=0.5 takes out or mixes planted patches"),
    ("data=planted train.cutmix=0.5", "train.cutmix=0.5 takes out or mixes planted patches"),
]

STUDIES = [
    ("nope.yaml", "nope.yaml"),
    ("empty", "empty: Is a directory"),
    ("empty.yaml", "empty: arms={'name': 'empty'}: Field required"),
    ("file.txt", "file: question="),
    ("/proc/nowhere.yaml", "no such file"),
    ("nope.jsonl", "nope.jsonl"),
    ("file.jsonl", "file.jsonl"),
    ("broken.yaml", "broken.yaml"),
    ("list.yaml", "list.yaml"),
    ("small.yaml scale=huge", "huge"),
    ("small.yaml seed=3", "seed = 3: "),
    ("small.yaml arm=x", "arm = x: "),
    ("small.yaml study=x", "study = x: "),
    ("small.yaml rerun=maybe", "rerun = maybe: must be true or false"),
    ("small.yaml seed=3 arm=x", "arm = x: "),
    ("spaced.yaml", "arms.a b: the name of an arm is at most 100 letters"),
    ("spaced.yaml", "arms.a/b: the name of an arm is"),
    ("spaced.yaml --plan", "arms.a,b: the name of an arm is"),
    ("spaced.yaml --plan", "arms.${oc.env:HOME}: the name of an arm is"),
    ("measured.yaml --plan", "metric='test/nonsense': no run records it"),
    ("seeded.yaml --plan", "seeds from 1000 on are set apart"),
    ("'two words.yaml'", "name='two words': String should match"),
    ("small.yaml paths.runs=/proc/x", "paths.runs = /proc/x: "),
    ("small.yaml hydra/launcher=slrm", "hydra/launcher = slrm: no such member"),
    ("small.yaml train.optimizer=", "train.optimizer"),
    ("small.yaml router=nosuch", "router = nosuch"),
    ("small.yaml train.epochs=-1", "train.epochs = -1"),
    ("small.yaml --config-dir nope", "--config-dir = nope: no such folder"),
    ("small.yaml paths.runs=file.txt", "paths.runs = file.txt: is a file"),
]


@pytest.mark.parametrize(("words", "said"), REPORT, ids=identifier)
def test_report_refuses(words: str, said: str, scene: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = refused("report", shlex.split(words), capfd, scene)
    assert any(said in line for line in lines), lines


@pytest.mark.parametrize(("words", "said"), STUDIES, ids=identifier)
def test_study_refuses(
    words: str, said: str, scene: Path, trained: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    lines = refused("study", shlex.split(words), capfd, scene)
    assert any(said in line for line in lines), lines
    assert trained == []


@pytest.mark.parametrize(("command", "words", "said"), OTHERS, ids=identifier)
def test_the_other_commands_refuse(
    command: str, words: str, said: str, scene: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = refused(command, shlex.split(words), capfd, scene)
    assert any(said in line for line in lines), lines


@pytest.mark.parametrize(("words", "remark"), REMARKS, ids=identifier)
def test_what_runs_and_means_less_is_remarked(
    words: str, remark: str, scene: Path, train: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(*shlex.split(words)) == 0
    assert remark in capfd.readouterr().out


def test_a_path_at_home_and_one_with_an_accent_are_taken(
    scene: Path, train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(scene / "home"))
    assert train("paths.runs='~/été'", "seed=0,1", "-m") == 0
    assert len(list((scene / "home" / "été").glob("*/run.json"))) == 2
    assert (scene / "home" / "été" / "sweeps").is_dir()
    assert not (scene / "~").exists()


def test_a_run_name_that_no_file_system_takes_is_shortened_in_its_folder() -> None:
    loaded = load(["name=" + "x" * 100])
    names = {axis: getattr(loaded.config, axis).model_copy(update={"name": "é" * 100}) for axis in ("router", "data")}
    long = loaded.config.model_copy(update={"name": None, **names})
    folder = run_folder(long, loaded.resolved).name
    assert len(folder.encode()) <= 200
    assert folder.endswith(identity(loaded.resolved))
    assert run_folder(loaded.config, loaded.resolved).name == f"{'x' * 100}-s0-{identity(loaded.resolved)}"
