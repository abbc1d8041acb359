"""What is refused, with the line a person reads; and what runs with a remark."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from routing_lab.config import ConfigError, Problem, check, load
from routing_lab.routing.members import BackboneFacts


def refused(*overrides: str, config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(overrides, config_dir)
    assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # unknown and misspelt
        ("router=amodd", "router = amodd: no such member; did you mean amod? there are amod, "),
        ("method=modd", "method = modd: no such member; did you mean mod? there are amod"),
        ("hydra/launcher=jobl", "hydra/launcher = jobl: no such member; did you mean joblib?"),
        ("sed=1", "sed = 1: no such key; did you mean seed?"),
        ("routr=amod", "routr = amod: no such key; did you mean router?"),
        ("capacity.fractoin=0.5", "capacity.fractoin = 0.5: no such key; did you mean fraction?"),
        ("+router.dims=[1]", "router.dims = [1]: router=amod has no such key; known: "),
        ("router.head.x=1", "router.head.x = 1: no such key"),
        ("router=", "router = '': no such member; there are "),
        ("router=null", "router = null: must be one of "),
        ("init.kind=nowhere", "init.kind = nowhere: must be one of checkpoint, dense, pretrained, run, scratch"),
        ("router=[", "router = [: is not a valid override: "),
        ("seed=0,1", "seed = 0,1: several values need -m"),
        # types and ranges
        (
            "capacity.fraction=1.5",
            "capacity.fraction = 1.5: must be a number greater than 0 and at most 1, or a list of such",
        ),
        ("capacity.fraction=0", "capacity.fraction = 0: must be a number greater than 0"),
        (
            "capacity.fraction=[0.5,1.5,0.5]",
            "capacity.fraction[1] = 1.5: must be a number greater than 0 and at most 1",
        ),
        ("capacity.fraction=half", "capacity.fraction = half: must be a number"),
        ("seed=-1", "seed = -1: must be a whole number at least 0"),
        ("seed=1.5", "seed = 1.5: must be a whole number"),
        ("seed=true", "seed = true: must be a whole number"),
        ("train.epochs=two", "train.epochs = two: must be a whole number at least 0"),
        ("train.lr=inf", "train.lr = Infinity: must be a number"),
        ("wandb.mode=onlin", "wandb.mode = onlin: must be one of offline, online, disabled"),
        ("name=a/b", "name = a/b: must be text"),
        ("train=quick", "train = quick: "),
        # interpolation
        ("train.lr=${nope.lr}", "train.lr = ${nope.lr}: cannot be resolved: "),
        ("seed=${seed}", "seed = ${seed}: cannot be resolved: "),
        ("train.frozen=[routers]", 'train.frozen = ["routers"]: router=amod has no parameters that could learn; use '),
        ("router=oracle", "router = oracle: is told which patches matter, and data=digits does not know; use "),
        # where
        ("placement.first=6", "placement.first = 6: the backbone has layers 0 to 5 (zero-based)"),
        ("placement=stages placement.layers=[3,6,9]", "placement.layers = 6, 9: the backbone has layers 0 to 5"),
        (
            "placement=list placement.layers=[2,7] placement.base=1",
            "placement.layers = 7: the backbone has layers 1 to 6",
        ),
        ("placement=list", "placement.layers: must be given"),
        ("placement=bilayer backbone.depth=2", "placement = bilayer: routes none of the 2 layers; use router=dense"),
        ("placement.first=0", "placement.attention_source = previous: routed layer 0 (zero-based) has no such layer"),
        (
            "placement=every placement.attention_source=previous",
            "layer 1, the source of routed layer 2, is itself routed",
        ),
        ("placement.attention_source=3", "placement.attention_source = 3: layer 3 runs after the selection"),
        ("placement.attention_source=next", "placement.attention_source = next: must be one of previous, lag"),
        ("bypass=project", "bypass = project: is defined for placement.sublayer=attention only, not block"),
        (
            "bypass=project placement.sublayer=mlp",
            "bypass = project: is defined for placement.sublayer=attention only, not mlp",
        ),
        # router
        (
            "router=cls_attention backbone.class_token=false backbone.pool=avg",
            "router = cls_attention: reads the class token, which this backbone does not have",
        ),
        ("router.head_reduction=head", "router.head = null: router.head_reduction=head needs"),
        ("router.head_reduction=head router.head=4", "router.head = 4: the backbone has heads 0 to 3"),
        ("router=subspace router.dims=[0,64]", "router.dims = [0, 64]: the backbone has channels 0 to 63"),
        ("router=subspace router.dims=[]", "router.dims = []: must be a list that is not empty"),
        (
            "router.exclude_queries=[registers]",
            'router.exclude_queries = ["registers"]: this backbone has no registers token',
        ),
        ("router.exclude_keys=[patches]", "router.exclude_keys[0] = patches: must be one of class, distillation"),
        ("router.corrupt=sink router.corrupt_token=17", "router.corrupt_token = 17: the backbone has tokens 0 to 16"),
        ("backbone=llama_micro", "backbone = llama_micro: is a language model, and task=classification takes a vision"),
        (
            "task=language data=digits",
            "data = digits: is images, and task=language reads text; use task=",
        ),
        ("task=language backbone=vit_micro", "and task=language takes a language model"),
        ("task=language train.mixup=0.2", "train.mixup = 0.2: changes images, and task=language reads text; use 0.0"),
        ("task=language train.distill=soft", "train.distill = soft: task=language learns from no teacher"),
        ("task=language isoflop.by=depth", "isoflop.by = depth: sizes a vision transformer"),
        # capacity and scaling
        ("capacity.fraction=[0.5,0.25]", "capacity.fraction = [0.5, 0.25]: has 2 entries for 3 routed layers"),
        (
            "capacity=threshold capacity.threshold=[0.1]",
            "capacity.threshold = [0.1]: has 1 entries for 3 routed layers",
        ),
        (
            "capacity.protect=class backbone.class_token=false backbone.pool=avg",
            "capacity.protect = class: this backbone has no",
        ),
        ("capacity=argmax", "capacity = argmax: follows the router's own decision, and router=amod makes none"),
        ("capacity=argmax router=random", "capacity = argmax: follows the router's own decision"),
        ("capacity.depth_schedule=linear", "capacity.fraction_last = null: capacity.depth_schedule=linear needs"),
        (
            "capacity.depth_schedule=cosine capacity.fraction_last=0.2 capacity.fraction=[1,0.5,0.2]",
            "capacity.depth_schedule = cosine: needs one number as capacity.fraction",
        ),
        (
            "scaling=top1_probability",
            "scaling = top1_probability: weighs two paths by a probability, which router=amod",
        ),
        (
            "scaling=soft_mix router=mlp",
            "scaling = soft_mix: is defined for placement.sublayer=attention only, not block",
        ),
        # backbone, data, files
        ("backbone.image_size=9", "backbone.image_size = 9: must be a multiple of backbone.patch_size=2"),
        ("backbone.patch_stride=3", "backbone.patch_stride = 3: must be at most backbone.patch_size=2"),
        (
            "data=planted backbone.patch_stride=1",
            "data = planted: knows which of 16 patches matter, and the backbone makes 49 of an image; use",
        ),
        ("data=planted backbone.patch_size=4 data.patch_size=2", "data = planted: knows which of 16 patches matter"),
        ("backbone.heads=5", "backbone.heads = 5: must divide backbone.width=64"),
        ("backbone.class_token=false", "backbone.pool = token: needs backbone.class_token=true"),
        ("backbone.mlp=null", "backbone.mlp = null: may be null only where backbone.timm_name is set"),
        ("backbone=timm", "backbone.timm_name: must be given"),
        (
            "backbone=timm backbone.timm_name=resnet18",
            "backbone.timm_name = resnet18: is a ResNet; a timm VisionTransformer",
        ),
        ("backbone=timm backbone.timm_name=vit_tinny_patch16_224", "did you mean vit_tiny_patch16_224"),
        ("init=pretrained", "init = pretrained: needs backbone.timm_name; backbone=vit_micro has none"),
        ("init=checkpoint", "init.path: must be given"),
        ("init=checkpoint init.path=missing.safetensors", "init.path = missing.safetensors: no such file (looked at "),
        ("init=dense train.epochs=0 train.warmup_epochs=0", "init.epochs = null: train.epochs=0 needs"),
        ("data=image_folder", "data.path: must be given"),
        ("data=image_folder data.path=missing", "data.path = missing: "),
        ("data=cifar10", "data.root = data: cifar10 is not there (looked at "),
    ],
)
def test_each_mistake_is_refused_in_one_telling_line(overrides: str, line: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = refused(*overrides.split())
    assert any(line in found for found in lines), lines
    assert len(lines) <= 2
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_and_a_single_class_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (line,) = refused("data=image_folder", f"data.path={empty}")
    assert line.startswith(f"data.path = {empty}: ")
    one = tmp_path / "one"
    (one / "cats").mkdir(parents=True)
    (one / "cats" / "1.png").write_bytes(b"not looked at")
    (line,) = refused("data=image_folder", f"data.path={one}")
    assert line.startswith(f"data.path = {one}: ")
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr("cats/1.png", b"")
    (line,) = refused("data=image_folder", f"data.path={tmp_path / 'one.zip'}")
    assert "one.zip" in line


def test_everything_is_reported_at_once() -> None:
    lines = refused(
        "router=amodd",
        "router.head=3",
        "capacity.fraction=1.5",
        "capacity.fractoin=0.5",
        "placement.first=9",
        "bypass=project",
        "backbone.image_size=9",
        "seed=-1",
        "train.lr=${nope}",
        "init=checkpoint",
        "init.path=missing.pt",
        "wandb.mode=1",
    )
    keys = [line.split(" = ")[0] for line in lines]
    assert sorted(keys) == sorted(
        [
            *("router", "capacity.fraction", "capacity.fractoin", "placement.first", "bypass", "backbone.image_size"),
            *("seed", "train.lr", "init.path", "wandb.mode"),
        ]
    )
    assert all("\n" not in line for line in lines)


def test_the_order_of_overrides_does_not_matter() -> None:
    assert (
        load(["capacity.threshold=0.3", "capacity=threshold"]).resolved
        == load(["capacity=threshold", "capacity.threshold=0.3"]).resolved
    )
    assert refused("capacity.threshold=high", "capacity=threshold", "sed=1") == refused(
        "sed=1", "capacity=threshold", "capacity.threshold=high"
    )


def test_a_dense_model_needs_no_routed_layer() -> None:
    config = load(["router=dense", "placement=bilayer", "backbone.depth=2", "bypass=project"]).config
    assert config.router.name == "dense"


def test_a_fill_policy_and_another_source_make_consecutive_layers_possible() -> None:
    load(["placement=every"])
    load(["placement=every", "placement.attention_source=previous", "placement.attention_fill=carry"])
    load(["placement=every", "placement.attention_source=0"])
    load(["placement=every", "placement.first=0", "placement.sublayer=mlp", "placement.attention_source=same"])


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        ("router=linear scaling=none", "router=linear is learned but gets no gradient under scaling=none"),
        ("router=mix scaling=straight_through scaling.form=stop_gradient", "scaling.form=stop_gradient: it stays"),
        ("router=random router.attention=random", "router.attention=random has no effect"),
        ("router=linear router.detach=false scaling=multiply", "router.detach=false has no effect"),
        ("router=random placement.attention_fill=zero", "placement.attention_fill=zero has no effect"),
        ("router.head=1", "router.head=1 has no effect"),
        ("scaling=straight_through", "scaling=straight_through equals scaling=none"),
        ("visibility=all placement.sublayer=mlp", "visibility=all has no effect"),
        ("capacity.fraction=1", "keeps every token"),
        ("capacity.fraction_last=0.2", "capacity.fraction_last has no effect"),
        ("capacity.protect_count=beside capacity.count_prefix=false", "capacity.protect_count=beside has no effect"),
        ("capacity.warmup=0.5 train.epochs=0", "capacity.warmup has no effect"),
        ("train.epochs=2", "train.warmup_epochs=5 lasts as long as training (train.epochs=2)"),
        ("capacity=threshold", "hardly any token is kept"),
        ("method=avit", "losses.halting_prior.center=8 lies behind the last layer, 5"),
        (
            "method=avit losses.halting_prior.center=null",
            "A-ViT's for a backbone of width 192, and none",
        ),
        ("method=avit backbone=deit_small", "of width 192, 75 at this one (384)"),
        ("method=attention_variance", "bypass.temperature=1 fuses by nearly equal weights"),
        ("router=attention_variance router.form=literal", "Eq. 6 as printed is zero for every token"),
    ],
)
def test_what_means_less_than_it_seems_runs_with_a_remark(overrides: str, remark: str) -> None:
    warnings = load(overrides.split()).warnings
    assert len([line for line in warnings if remark in line]) == 1, warnings


def test_the_defaults_run_without_a_remark() -> None:
    assert load().warnings == []
    assert load(["router=amod", "scaling=multiply", "seed=0"]).warnings == []
    assert load(["method=avit", "backbone=deit_tiny"]).warnings == []
    assert load(["method=attention_variance_scaled"]).warnings == []


def test_routing_of_a_given_model_is_checked_against_its_facts() -> None:
    facts = BackboneFacts(depth=12, width=384, heads=6, prefix=("class", "distillation"))
    config = load(["method=amod", "placement=stages", "placement.layers=[6,11]"], facts=facts).config
    assert config.placement.options == {"layers": [6, 11]}
    with pytest.raises(ConfigError, match="heads 0 to 5"):
        load(["router.head_reduction=head", "router.head=6"], facts=facts)
    causal = BackboneFacts(depth=4, width=64, heads=4, causal=True)
    (remark,) = load(["router=amod", "capacity=threshold", "capacity.threshold=0.1"], facts=causal).warnings
    assert remark.startswith("router=amod scores a token by later ones")
    assert load(["router=linear", "scaling=multiply", "capacity=threshold"], facts=causal).warnings == []


def test_a_stored_configuration_can_be_checked_again() -> None:
    loaded = load(["router=mix", "capacity=threshold", "seed=3"])
    again = check(loaded.resolved)
    assert again.resolved == loaded.resolved
    with pytest.raises(ConfigError, match="seed: is missing"):
        check({key: value for key, value in loaded.resolved.items() if key != "seed"})
    with pytest.raises(ConfigError, match="sead = 1: no such key; did you mean seed"):
        check({**loaded.resolved, "sead": 1})


def test_a_missing_configuration_folder_is_refused(tmp_path: Path) -> None:
    assert refused(config_dir=tmp_path / "nowhere")[0].startswith(f"--config-dir = {tmp_path}/nowhere: no such folder")


def test_a_problem_is_one_line_and_survives_pickling() -> None:
    import pickle

    error = ConfigError([Problem.of("a.b", [1, 2], "must be\nsomething"), Problem("c", None, "is missing")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
    assert str(error.problems[1]) == "c: is missing"


class TestOutsideMembers:
    """A member of the user's own module, named by `_target_` in the user's own folder."""

    @pytest.fixture(autouse=True)
    def _module(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "outside_axes.py").write_text(
            "from routing_lab.routing.members import RouterTraits, ScalingTraits\n"
            "class Deciding:\n"
            "    traits = RouterTraits(boundary=0.0, learned=True)\n"
            "    def __init__(self, spec, *, power=1.0): ...\n"
            "class ReadsClass:\n"
            "    traits = RouterTraits(attention=frozenset({'class_row'}), needs_class_token=True)\n"
            "    def __init__(self, spec): ...\n"
            "class Demanding:\n"
            "    traits = ScalingTraits(sublayers=('mlp',))\n"
            "    def __init__(self, *, strength): ...\n"
            "def from_layer(depth, *, first): return list(range(first, depth))\n"
        )
        self.conf = tmp_path / "conf"

    def write(self, axis: str, name: str, target: str, **options: float) -> None:
        (self.conf / axis).mkdir(parents=True, exist_ok=True)
        lines = [f"name: {name}", f"_target_: {target}", *(f"{key}: {value}" for key, value in options.items())]
        (self.conf / axis / f"{name}.yaml").write_text("\n".join(lines) + "\n")

    def test_its_options_and_traits_count(self) -> None:
        self.write("router", "mine", "outside_axes.Deciding", power=2.0)
        self.write("placement", "tail", "outside_axes.from_layer", first=4)
        loaded = load(["router=mine", "router.power=3", "placement=tail", "capacity=argmax"], self.conf)
        assert loaded.config.router.options == {"power": 3}
        assert loaded.config.router.corrupt == "none"
        assert loaded.warnings == [
            "router=mine is learned but gets no gradient under scaling=none: it stays as it was initialised"
        ]
        assert loaded.resolved["router"]["_target_"] == "outside_axes.Deciding"

    def test_refusals(self) -> None:
        self.write("router", "mine", "outside_axes.Deciding", powr=2.0)
        self.write("router", "gone", "outside_axes.Nothing")
        self.write("router", "lost", "no_such_module.Router")
        self.write("router", "cls", "outside_axes.ReadsClass")
        self.write("scaling", "strong", "outside_axes.Demanding")
        self.write("placement", "tail", "outside_axes.from_layer", first=9)
        conf = self.conf
        assert refused("router=mine", config_dir=conf) == [
            "router.powr = 2.0: outside_axes.Deciding has no such argument; did you mean power? it takes power"
        ]
        assert refused("router=gone", config_dir=conf) == [
            "router._target_ = outside_axes.Nothing: module outside_axes has no Nothing"
        ]
        assert "cannot be imported: ModuleNotFoundError" in refused("router=lost", config_dir=conf)[0]
        assert refused("router=cls", "backbone.class_token=false", "backbone.pool=avg", config_dir=conf) == [
            "router = cls: reads the class token, which this backbone does not have"
        ]
        assert refused("scaling=strong", config_dir=conf) == [
            "scaling.strength: is missing; outside_axes.Demanding requires it"
        ]
        assert refused("scaling=strong", "+scaling.strength=1", config_dir=conf) == [
            "scaling = strong: is defined for placement.sublayer=mlp only, not block"
        ]
        assert refused("placement=tail", "placement.attention_source=last_dense", config_dir=conf) == [
            "placement = tail: routes none of the 6 layers; use router=dense for that"
        ]
        assert "did you mean mine? there are amod" in refused("router=mime", config_dir=conf)[0]


@pytest.mark.parametrize(("capacity", "said"), [("topk", True), ("percentile", True), ("threshold", False)])
def test_a_capacity_that_looks_at_later_tokens_says_so_in_a_causal_model(capacity: str, said: bool) -> None:
    given = ["router=linear", "scaling=none", f"capacity={capacity}"]
    for causal in (True, False):
        warnings = load(given, facts=BackboneFacts(4, 32, 4, causal=causal)).warnings
        assert any(f"capacity={capacity} compares a token's score" in line for line in warnings) is (said and causal)
