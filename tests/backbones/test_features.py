"""What a routed encoder says besides its output: features at every position, as timm's users call for them."""

from __future__ import annotations

import pytest
import torch
from tests.backbones.families import FAMILIES, inputs_of
from tests.routing.tiny import images, routed, vit
from timm.models.eva import Eva

ARMS = {
    "skip": ["router=linear", "scaling=multiply"],
    "drop": ["router=random", "bypass=drop", "placement=list", "placement.layers=[1,2]"],
    "fuse": ["method=evit", "placement=list", "placement.layers=[1,2]"],
    "merge": ["method=tome"],
    "ponder": ["router=random", "bypass=ponder"],
}
TIMM_NAMES = ("vit", "vit-registers", "vit-gap", "eva02", "rope-mixed", "beit")


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_a_dense_model_gives_what_the_original_gives(name: str) -> None:
    original = FAMILIES[name]()
    model = routed(["router=dense"], original)
    with torch.no_grad():
        features = original.forward_features(images())
        assert torch.equal(model.forward_features(images()), features)
        assert torch.equal(model.features(images()).x, features)
        assert torch.equal(
            model.forward_head(features, pre_logits=True), original.forward_head(features, pre_logits=True)
        )
        for options in (
            {},
            {"indices": 2, "norm": True, "output_fmt": "NLC"},
            {"indices": [0, -2], "return_prefix_tokens": True, "intermediates_only": True, "stop_early": True},
        ):
            expected = original.forward_intermediates(images(), **options)
            found = model.forward_intermediates(images(), **options)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(_flat(found), _flat(expected), strict=True))


@pytest.mark.parametrize("arm", ARMS)
def test_head_of_features_is_the_output(arm: str) -> None:
    model = routed(ARMS[arm])
    with torch.no_grad():
        assert torch.equal(model.forward_head(model.forward_features(images())), model(images()))


def test_a_removed_token_keeps_its_last_state() -> None:
    model = routed(ARMS["drop"])
    with torch.no_grad():
        _, trace, tokens = model(images(), return_trace=True, return_tokens=True)
        features = model.features(images())
        final, states = model.forward_intermediates(images(), norm=True)
    assert features.x.shape == (3, 17, 32)
    assert torch.equal(final, features.x)
    assert torch.equal(features.map(), states[-1])
    assert torch.equal(features.map()[0, :, 1, 2], features.x[0, 1 + 4 + 2])
    gone = trace[2].source < 0
    early = trace[1].source < 0
    assert gone.sum() > early.sum() > 0
    for sample in range(3):
        left = features.x[sample, ~gone[sample]]
        assert torch.equal(left, tokens.x[sample])
        patches = states[0][sample].flatten(1).T
        assert torch.equal(features.x[sample, 1:][early[sample, 1:]], patches[early[sample, 1:]])


def test_halted_tokens_are_put_back_with_their_output() -> None:
    model = routed(ARMS["ponder"])
    with torch.no_grad():
        features = model.features(images())
        _, tokens = model(images(), return_tokens=True)
    assert torch.equal(features.x, tokens.x)


@pytest.mark.parametrize("name", ["vit", "eva02", "hf-vit", "hf-dinov2-registers", "hf-dinov3", "hf-siglip"])
def test_images_of_other_sizes(name: str) -> None:
    """Twelve by eight pixels in a model that was built for eight by eight."""
    if name == "vit":
        original = vit(dynamic_img_size=True)
    elif name == "eva02":
        original = Eva(8, 2, embed_dim=32, depth=4, num_heads=2, use_rot_pos_emb=True, dynamic_img_size=True).eval()
    else:
        original = FAMILIES[name]()
    x = torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(2))
    options = {"interpolate_pos_encoding": True} if name in ("hf-vit", "hf-siglip") else {}
    with torch.no_grad():
        expected = original(x, **options)
        expected = expected if isinstance(expected, torch.Tensor) else expected[0]
        found = routed(["router=dense"], original)(x)
        if name != "hf-dinov3":  # its first output are the states
            assert torch.equal(found, expected)
        model = routed(ARMS["drop"], original)
        features = model.features(x)
        assert features.grid == (6, 4)
        assert features.map().shape == (2, 32, 6, 4)
        assert features.prefix.shape[1] == len(model.adapter.prefix)


@pytest.mark.parametrize("name", ["vit", "eva"])
def test_dropped_patches_leave_true_origins(name: str) -> None:
    if name == "vit":
        model = routed(["router=linear"], vit(patch_drop_rate=0.5, reg_tokens=1))
    else:
        torch.manual_seed(0)
        eva = Eva(8, 2, embed_dim=32, depth=4, num_heads=2, num_classes=5, patch_drop_rate=0.5, use_rot_pos_emb=True)
        model = routed(["router=linear"], eva.eval())
    with torch.no_grad():
        every, _ = model.embed(images())
        model.train()
        left, _ = model.embed(images())
        assert left.x.shape[1] == every.num_prefix + 8
        origin = left.origins()
        assert (origin[:, : every.num_prefix] == -1).all()
        for sample in range(3):
            rows = every.num_prefix + origin[sample, every.num_prefix :]
            assert torch.equal(left.x[sample, every.num_prefix :], every.x[sample, rows])
        torch.manual_seed(7)
        entered = model.embed(images())[0].origins()
        torch.manual_seed(7)
        _, trace = model(images(), return_trace=True)
        assert not torch.equal(entered, origin)
        assert all(torch.equal(layer.origin, entered) for layer in trace.layers)
        with pytest.raises(ValueError, match="8 tokens fill no grid of 4 x 4"):
            model.features(images()).map()
        torch.manual_seed(5)
        expected = model.backbone(images())
        dense = routed(["router=dense"], model.backbone).train()
        torch.manual_seed(5)
        torch.testing.assert_close(dense(images()), expected, rtol=0, atol=1e-5)


def test_features_say_what_they_cannot() -> None:
    model = routed(["router=random", "capacity=threshold", "capacity.threshold=0.4", "bypass=drop"])
    with torch.no_grad():
        with pytest.raises(ValueError, match="different numbers of tokens"):
            model.forward_features(images())
        assert model.features(images()).map().shape == (3, 32, 4, 4)
    with pytest.raises(ValueError, match="the backbone has layers 0 to 3"):
        model.forward_intermediates(images(), indices=[4])
    with pytest.raises(ValueError, match="tokens fill no grid"):
        routed(["router=linear"], FAMILIES["llama"]()).features(inputs_of("llama")).map()


def _flat(found: object) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    assert isinstance(found, (list, tuple))
    return [tensor for part in found for tensor in _flat(part)]
